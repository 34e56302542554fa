"""What is written about a checkpoint: names, the manifest, and the records that travel between worker and driver.

A checkpoint is the directory ``step-<12 digits>-<token>``. Its ``manifest.json`` lists every file with size and SHA-256
and carries its own digest, so one small file vouches for all the others; it is written last and by the driver alone.
The token belongs to one attempt: a writer that was declared dead and writes on can only ever touch its own directory,
which no manifest names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from elastic_spark.errors import CheckpointError, CheckpointInvalid

#: A JSON value. Non-finite floats stay in ``meta.json`` (as Python's json writes them) and become null in a manifest.
JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"

MANIFEST = "manifest.json"
FORMAT = "elastic_spark checkpoint"
VERSION = 1

_FOLDER = re.compile(r"step-(\d{12})-([A-Za-z0-9][A-Za-z0-9_.]*(?:-[A-Za-z0-9_.]+)*)\Z")
_FILE = re.compile(r"(?:state(?:-\d{5}-of-\d{5})?\.safetensors|meta(?:-\d{5}-of-\d{5})?\.json)\Z")
_SHA = re.compile(r"[0-9a-f]{64}\Z")


def folder_name(step: int, token: str) -> str:
    """The directory of an attempt; raises `CheckpointError` where step or token do not fit into a name."""
    name = f"step-{step:012d}-{token}"
    if len(name) > 200 or _FOLDER.match(name) is None:
        raise CheckpointError(
            f"step {step} with token {token!r} makes no checkpoint name: 0 <= step < 10^12, token of [A-Za-z0-9_.-]"
        )
    return name


def parse_folder(name: str) -> tuple[int, str] | None:
    """(step, token) of a directory's name, or None for a stranger."""
    match = _FOLDER.match(name)
    return (int(match[1]), match[2]) if match else None


def state_name(part: int, parts: int) -> str:
    return "state.safetensors" if parts == 1 else f"state-{part:05d}-of-{parts:05d}.safetensors"


def meta_name(part: int, parts: int) -> str:
    """The first part's meta is the checkpoint's; other parts have theirs (such as a rank's random state) beside it."""
    return "meta.json" if part == 0 else f"meta-{part:05d}-of-{parts:05d}.json"


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint: its name inside the directory, size in bytes, SHA-256 in hexadecimal."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class WrittenPart:
    """What `CheckpointStore.write_part` wrote: the worker's word to the driver, which commits it."""

    step: int
    token: str
    part: int
    parts: int
    files: tuple[StoredFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> WrittenPart:
        """Raises `CheckpointError` where ``body`` (from the network) is no such record."""
        try:
            part = cls(body["step"], body["token"], body["part"], body["parts"], _files(body["files"]))
            folder_name(part.step, part.token)
            if not (type(part.part) is type(part.parts) is int and 0 <= part.part < part.parts):
                raise ValueError(f"part {part.part} of {part.parts}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not the record of a written part: {error!r}") from error
        return part


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: every file has been written and the manifest that names them is unharmed."""

    uri: str
    step: int
    token: str
    parts: int
    files: tuple[StoredFile, ...]
    fields: Mapping[str, Any]
    digest: str

    @property
    def name(self) -> str:
        return folder_name(self.step, self.token)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def created_unix(self) -> float:
        return float(self.fields.get("created_unix") or 0.0)

    @property
    def job_id(self) -> str | None:
        return self.fields.get("job_id")

    @property
    def score(self) -> float | None:
        """What ``keep_best`` ranks by, lower is better; None where the job gave none or it was not finite."""
        value = self.fields.get("score")
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def suspect(self) -> str:
        """Why this is no state to go back to, though every byte is as it was written; "" where nothing speaks so."""
        return str(self.fields.get("suspect") or "")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"fields": dict(self.fields)}


@dataclass(frozen=True)
class Rejected:
    """An attempt passed over on the way to the newest valid checkpoint. ``finished`` is False where it has no manifest:
    a write that was cut short or is still going on, which is no damage."""

    uri: str
    reason: str
    finished: bool = True


def gist(rejected: Sequence[Rejected]) -> list[Rejected]:
    """For people: of writes that were cut short, of which there may be hundreds, the newest one, with their number."""
    cut = [item for item in rejected if not item.finished]
    if len(cut) < 2:
        return list(rejected)
    newest = replace(cut[0], reason=f"{cut[0].reason}; so are {len(cut) - 1} more")
    return [newest if item is cut[0] else item for item in rejected if item.finished or item is cut[0]]


def compose(step: int, token: str, parts: Sequence[WrittenPart], fields: Mapping[str, JSON]) -> bytes:
    """The manifest's bytes. Raises `CheckpointError` unless ``parts`` are all the parts of this one attempt."""
    found = sorted(part.part for part in parts)
    if not parts or found != list(range(parts[0].parts)):
        raise CheckpointError(
            f"step {step}: of {parts[0].parts if parts else 1} parts, those written are {found}: all are needed, once"
        )
    for part in parts:
        if (part.step, part.token, part.parts) != (step, token, len(parts)):
            raise CheckpointError(
                f"step {step}, attempt {token}: part {part.part} is of step {part.step}, attempt {part.token}"
            )
    files = [dataclasses.asdict(file) for part in sorted(parts, key=lambda part: part.part) for file in part.files]
    body = {"format": FORMAT, "version": VERSION, "step": step, "token": token, "parts": len(parts), "files": files}
    body["fields"] = _finite(dict(fields))
    try:
        return _text(body | {"digest": _digest(body)})
    except TypeError as error:
        raise CheckpointError(f"step {step}: the manifest's fields must be JSON ({error})") from error


def parse(text: bytes, uri: str) -> Checkpoint:
    """The checkpoint in directory ``uri`` that this manifest describes; raises `CheckpointInvalid` with the reason."""
    where = f"{uri}/{MANIFEST}"
    if not text:
        raise CheckpointInvalid(f"{where}: is empty")
    try:
        body = json.loads(text)
        digest = body.pop("digest")
        if (body["format"], body["version"]) != (FORMAT, VERSION):
            raise CheckpointInvalid(
                f"{where}: format {body['format']!r} version {body['version']!r}, this release reads version {VERSION}"
            )
        if _digest(body) != digest or _text(body | {"digest": digest}) != text:
            raise CheckpointInvalid(f"{where}: does not match its own digest, it was changed after it was written")
        checkpoint = Checkpoint(
            uri, body["step"], body["token"], body["parts"], _files(body["files"]), body["fields"], digest
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointInvalid(f"{where}: is malformed or torn ({error!r})") from error
    folder = uri.rstrip("/").rpartition("/")[2]
    if parse_folder(folder) != (checkpoint.step, checkpoint.token):
        raise CheckpointInvalid(
            f"{where}: belongs to step {checkpoint.step}, attempt {checkpoint.token}, not into {folder}"
        )
    names, parts = [file.name for file in checkpoint.files], checkpoint.parts
    wanted = {state_name(part, parts) for part in range(parts)} | {meta_name(0, parts)}
    if missing := sorted(wanted - set(names)):
        raise CheckpointInvalid(f"{where}: does not name {', '.join(missing)}")
    if len(set(names)) != len(names):
        raise CheckpointInvalid(f"{where}: names a file twice")
    return checkpoint


def _files(items: Iterable[Mapping[str, Any]]) -> tuple[StoredFile, ...]:
    files = tuple(StoredFile(item["name"], item["bytes"], item["sha256"]) for item in items)
    for file in files:
        if not isinstance(file.name, str) or _FILE.match(file.name) is None:
            raise ValueError(
                f"file {file.name!r} is none of this format: refused (pickles run code, paths lead elsewhere)"
            )
        if (
            type(file.bytes) is not int
            or file.bytes < 0
            or not isinstance(file.sha256, str)
            or _SHA.match(file.sha256) is None
        ):
            raise ValueError(f"file {file.name!r} without a size and a SHA-256")
    return files


def _text(body: Mapping[str, Any]) -> bytes:
    """The one way to write a manifest: what reads differently, byte for byte, is not as it was written."""
    return json.dumps(body, indent=1, allow_nan=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(body: Mapping[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _finite(value: Any) -> Any:
    """Strict JSON cannot say NaN or infinity: null in their place, so that every reader can open a manifest."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
