"""One file of tensors in the safetensors format, written and read as a stream.

The library's own ``save_file`` and ``load_file`` do not fit: the first cannot hash what it writes in the same pass, the
second maps the file into live tensors. The format itself is small, and any safetensors reader opens these files:

    8 bytes   length of the header, little endian
    header    JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    data      the tensors' bytes without holes, little endian, row-major

* Data is laid out by falling item size, so every tensor is aligned; the header keeps the caller's order.
* Dtypes that the format has no code for (complex128, sub-byte integers ...) are stored as ``U8`` bytes, their real
  dtype and shape in the metadata. Quantized, sparse and meta tensors are refused by name.
* Names that share one tensor (tied weights) are stored once; reading gives the same tensor under each name.
* Reading trusts nothing: lengths are checked against the file's size before anything is allocated, and a file that
  holds a pickle or a zip is refused by name. No byte of it is ever executed.
* SHA-256 runs in a second thread while the first one writes or reads (`Hasher`): hashlib and file calls both release
  the GIL, so a hashed write costs about the longer of the two, not their sum.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import torch

from elastic_spark.errors import CheckpointError, CheckpointInvalid

#: Bytes per write, read and hash call. Large enough to amortise the hand-over, small enough to stay in the cache.
CHUNK = 4 << 20
#: Tensors smaller than this are gathered into one chunk.
SMALL = 64 << 10
#: The format's own limit of the header's length.
MAX_HEADER = 100_000_000
#: Where in ``__metadata__`` this package keeps what the format has no place for.
OWN_KEY = "elastic_spark"

_CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_CODE_OF = {name: code for code, name in _CODES.items()}


#: A tensor in the header: dtype, shape, (begin, end) in bytes of the data.
_Entry: TypeAlias = tuple[torch.dtype, list[int], tuple[int, int]]


class Readable(Protocol):
    """What reading needs of an open file."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...
    def read(self) -> bytes: ...


@dataclass(frozen=True)
class Layout:
    """A file about to be written: its header and, in file order, the tensors behind it."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]
    size: int

    def chunks(self) -> Iterator[memoryview]:
        """The file's bytes in order. Chunks of stored tensors are views, not copies, wherever the tensor allows it."""
        pending = bytearray(len(self.header).to_bytes(8, "little") + self.header)
        for tensor in self.tensors:
            data = _bytes_of(tensor)
            if len(data) < SMALL:
                pending += data
                if len(pending) < CHUNK:
                    continue
                data = memoryview(b"")
            if pending:
                yield memoryview(pending)
                pending = bytearray()
            for begin in range(0, len(data), CHUNK):
                yield data[begin : begin + CHUNK]
        if pending:
            yield memoryview(pending)


def plan(tensors: Mapping[str, torch.Tensor], own: Mapping[str, Any]) -> Layout:
    """Lay out ``tensors`` (any shape, any strides, any device) as one file.

    ``own`` is JSON kept in the header, given back by `read`. Raises `CheckpointError` naming a tensor that cannot be
    stored.
    """
    aliases: dict[str, str] = {}
    raw: dict[str, list[Any]] = {}
    stored: dict[str, torch.Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        _check(name, tensor)
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and (first := seen.setdefault(identity, name)) != name:
            aliases[name] = first
        else:
            stored[name] = tensor.detach()
    entries: dict[str, dict[str, Any]] = {name: {} for name in stored}
    offset = 0
    order = sorted(stored, key=lambda name: -stored[name].element_size())
    for name in order:
        tensor, end = stored[name], offset + stored[name].numel() * stored[name].element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        code, shape = _CODE_OF.get(dtype), list(tensor.shape)
        if code is None:
            raw[name] = [dtype, shape]
            code, shape = "U8", [end - offset]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    extra = {"own": dict(own), "order": list(tensors) if aliases else [], "aliases": aliases, "raw": raw}
    text = json.dumps({"__metadata__": {OWN_KEY: json.dumps(extra)}, **entries}, separators=(",", ":"))
    header = text.encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER:
        raise CheckpointError(
            f"{len(tensors)} tensors need a header of {len(header)} bytes, the format ends at {MAX_HEADER}"
        )
    return Layout(header, tuple(stored[name] for name in order), 8 + len(header) + offset)


def _check(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{name!r} is a {type(tensor).__name__}, not a tensor: it belongs into the meta part")
    why = ""
    if name == "__metadata__":
        why = "this name is taken by the file format"
    elif tensor.layout is not torch.strided:
        why = f"its layout is {tensor.layout}: make it dense"
    elif tensor.is_quantized:
        why = f"it is quantized ({tensor.dtype}): store its int_repr(), scale and zero point"
    elif tensor.device.type == "meta":
        why = "it is on the meta device and has no values"
    if why:
        raise CheckpointError(f"tensor {name!r} cannot be stored in a checkpoint: {why}")


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major: a view where it is contiguous in host memory, else of a copy."""
    if not tensor.numel():
        return memoryview(b"")
    tensor = tensor.resolve_conj().resolve_neg()
    if carrier := _CARRIERS.get(tensor.element_size()):  # torch cannot copy every dtype, such as int4, but these
        tensor = tensor.view(carrier)
    return _view(tensor.cpu().contiguous())


def _view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor as bytes."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # reshape keeps an odd stride of a single element
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


class Hasher:
    """SHA-256 of a stream of chunks, computed by a thread of its own.

    Chunks are not copied: they must not change before `hexdigest` returns. At most ``depth`` of them wait.
    """

    def __init__(self, depth: int = 64) -> None:
        self._digest = hashlib.sha256()
        self._chunks: queue.Queue[memoryview | None] = queue.Queue(depth)
        self._thread = threading.Thread(target=self._run, name="checkpoint-sha256", daemon=True)

    def __enter__(self) -> Hasher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hexdigest()

    def update(self, chunk: memoryview) -> None:
        self._chunks.put(chunk)

    def hexdigest(self) -> str:
        """Wait for the chunks given so far and end the thread."""
        if self._thread.is_alive():
            self._chunks.put(None)
            self._thread.join()
        return self._digest.hexdigest()

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._digest.update(chunk)


def read(
    file: Readable, size: int, where: str, moved: Callable[[], None] = lambda: None
) -> tuple[dict[str, torch.Tensor], dict[str, Any], str]:
    """Read a file of ``size`` bytes: (tensors in ordinary host memory, the ``own`` JSON, SHA-256 of what was read).

    The digest covers exactly the bytes that the tensors were filled from. Raises `CheckpointInvalid` on anything that
    is not such a file; ``where`` names it in messages. ``moved`` is called with each block that has come.
    """
    with Hasher() as hasher:
        entries, extra, _ = _read_header(file, size, hasher, where)
        tensors: dict[str, torch.Tensor] = {}
        for name, (dtype, shape, _) in sorted(entries.items(), key=lambda entry: entry[1][2]):
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                _fill(file, _view(tensor), hasher, where, moved)
            tensors[name] = tensor
        digest = hasher.hexdigest()
    tensors |= {alias: tensors[first] for alias, first in extra["aliases"].items()}
    return {name: tensors[name] for name in extra["order"] or entries}, extra["own"], digest


def check(file: Readable, size: int, where: str) -> tuple[set[str], dict[str, Any], str]:
    """As `read` for the names of the tensors alone, in constant memory."""
    depth = 4
    ring = [memoryview(bytearray(min(CHUNK, size))) for _ in range(depth + 2)]  # waiting, being hashed, being filled
    with Hasher(depth) as hasher:
        entries, extra, left = _read_header(file, size, hasher, where)
        for buffer in itertools.cycle(ring):
            if not left:
                break
            block = buffer[: min(len(buffer), left)]
            _fill(file, block, hasher, where)
            left -= len(block)
        return {*entries, *extra["aliases"]}, extra["own"], hasher.hexdigest()


def _fill(
    file: Readable, into: memoryview, hasher: Hasher, where: str, moved: Callable[[], None] = lambda: None
) -> None:
    """Read exactly ``len(into)`` bytes."""
    done = 0
    while done < len(into):
        got = file.readinto(into[done : done + CHUNK])
        if not got:
            raise CheckpointInvalid(
                f"{where}: ends early, {len(into) - done} bytes of a block of {len(into)} are missing"
            )
        hasher.update(into[done : done + got])
        done += got
        moved()


def _read_header(
    file: Readable, size: int, hasher: Hasher, where: str
) -> tuple[dict[str, _Entry], dict[str, Any], int]:
    """(table, extra, bytes of data that follow)."""
    prefix = bytearray(8)
    _fill(file, memoryview(prefix), hasher, where)
    length = _header_length(bytes(prefix), size, where)
    header = bytearray(length)
    _fill(file, memoryview(header), hasher, where)
    entries, extra = _parse(bytes(header), size - 8 - length, where)
    return entries, extra, size - 8 - length


def _header_length(prefix: bytes, size: int, where: str) -> int:
    if reason := looks_executable(prefix):
        raise CheckpointInvalid(f"{where}: {reason}")
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER, size - 8):
        raise CheckpointInvalid(f"{where}: not a safetensors file (header of {length} bytes in a file of {size})")
    return length


def looks_executable(prefix: bytes) -> str:
    """Why a file that begins like this is refused; empty where it is not of a kind whose loading runs code."""
    if prefix.startswith(b"PK\x03\x04"):
        return "is a zip archive (torch.save writes such), not safetensors: refused, loading a pickle can run code"
    if prefix[:1] == b"\x80" and prefix[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and prefix[2:8] != bytes(6):
        return "is a pickle, not safetensors: refused, loading a pickle can run code"
    return ""


def _parse(header: bytes, room: int, where: str) -> tuple[dict[str, _Entry], dict[str, Any]]:
    """Header to (name -> (dtype, shape, (begin, end)), extra); everything checked against ``room`` bytes of data."""
    try:
        table = json.loads(header)
        extra = json.loads(table.pop("__metadata__")[OWN_KEY])
        raw, aliases = extra["raw"], extra["aliases"]
        entries = {name: _entry(entry, raw.get(name)) for name, entry in table.items()}
        if not all(first in entries for first in aliases.values()) or not isinstance(extra["own"], dict):
            raise ValueError("an alias of a tensor that is not there")
        if extra["order"] and set(extra["order"]) != {*entries, *aliases}:
            raise ValueError("the order names other tensors than the table")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointInvalid(
            f"{where}: not a safetensors file of this package ({error or type(error).__name__})"
        ) from error
    end = 0
    for begin, stop in sorted(offsets for _, _, offsets in entries.values()):
        if begin != end:
            raise CheckpointInvalid(f"{where}: tensors overlap or leave a hole at byte {end} of the data")
        end = stop
    if end != room:
        raise CheckpointInvalid(f"{where}: holds {room} bytes of data where its header says {end}")
    return entries, extra


def _entry(entry: Mapping[str, Any], raw: list[Any] | None) -> _Entry:
    begin, end = entry["data_offsets"]
    name, shape = raw if raw else (_CODES[entry["dtype"]], entry["shape"])
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name} is unknown to torch {torch.__version__}")
    if any(type(number) is not int or number < 0 for number in (begin, end, *shape)):
        raise ValueError("a shape or an offset is not a natural number")
    if math.prod(max(number, 1) for number in shape) >= 1 << 62:
        raise ValueError(f"shape {shape} is too large")
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes for shape {shape} of {name}")
    return dtype, shape, (begin, end)


def shares(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Names divided into ``parts`` lists of nearly equal bytes, the same on every rank: largest first, each to the list
    that holds least. ``sizes`` are bytes by tensor name. The fullest list exceeds an even share by at most one tensor.
    """
    result: list[list[str]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = filled.index(min(filled))
        result[least].append(name)
        filled[least] += sizes[name]
    return result


if sys.byteorder != "little":  # pragma: no cover - no such machine runs Spark executors with torch
    raise ImportError("checkpoints are little endian, this machine is not")
