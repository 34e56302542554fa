"""The rows of a data set on this machine, as fixed-size records in one memory-mapped file.

A gather of scattered rows costs one cache miss a row if all columns of a row lie together, and one numpy call a batch
if all row groups lie in one array. So the cache of a data set is one file: record i is the row with global id i,
whatever row group it came from. The file is sparse; a row group takes space only once it was read. Records hold the
columns one after the other, widest items first (so that all are aligned), and nothing else: tensors are views of them.

::

    0        one byte a row group: 0 not here, 1 here      (padded to a page)
    data     rows * record_bytes

Several workers of a machine share the file. A row group is written with pwrite and only then marked; two who write the
same one write the same bytes, so no lock has to be waited for, and a process killed at any moment leaves a row group
that is not marked. A crash of the machine may keep a mark and lose what it stands for: the name of the file holds the
kernel's boot id, so nobody reads it after that (where there is no such id, row groups are synced before the mark).
Nobody ever truncates a file that others may have mapped. The unit of eviction is the file: the one used longest ago
goes first, and never one that is in use (its users hold a shared lock on it). A file counts as what it will be when it
is full, and is given its size while the directory is locked, so that processes that come at the same time do not
promise the same space to two data sets.

A data set that does not fit, alone or beside those in use, is not shared, nor is one whose directory another process
keeps locked, as it was stopped: each worker keeps the row groups of its own
lanes, in an unnamed file that goes with the process, or in memory where no directory is given. A store of that kind is
put by when its reader is closed, and taken up by the next reader of the same data: a resize closes and opens readers.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from elastic_spark.core.manifest import ITEM_BYTES, Column, Manifest
from elastic_spark.core.order import derive_key
from elastic_spark.errors import DataError
from elastic_spark.parquet import READ_ERRORS, read_records
from elastic_spark.worker import stalls

#: How often a row group is tried, and how long to wait before each further try, in seconds.
RETRY_WAITS_S = (0.1, 1.0)

#: Rows that are not shared are kept from one epoch to the next up to this many bytes.
KEEP_BYTES = 1 << 30

#: Data sets of which a process keeps rows that no reader has open.
MOST_PUT_BY = 4

#: How long to wait for the lock on the directory, in seconds. It is held for a few calls.
LOCK_LIMIT_S = 5.0

_PAGE = 4096
_SUFFIX = ".rows"
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def record_type(columns: Iterable[Column]) -> np.dtype[Any]:
    """The structured numpy type of a row: every field aligned, the size a multiple of the largest item."""
    by_size = sorted(columns, key=lambda column: -ITEM_BYTES[column.dtype])
    offsets, size = [], 0
    for column in by_size:
        offsets.append(size)
        size += column.bytes
    largest = ITEM_BYTES[by_size[0].dtype]
    return np.dtype(
        {
            "names": [column.name for column in by_size],
            "formats": [(column.dtype, (column.width,)) if column.width else column.dtype for column in by_size],
            "offsets": offsets,
            "itemsize": -(-size // largest) * largest,
        }
    )


class RowStore:
    """Rows of a data set by global id: ``records[i]`` holds the bytes of row i once its row group was loaded.

    Args:
        manifest: the data set.
        cache_dir: where files are shared and kept, None for the memory of this process.
        limit_bytes: how much shared files may hold in all; None is four fifths of what is free now plus what it holds.

    Attributes:
        records: uint8[rows, record bytes], read-only for all but `load`.
        dtype: what a record holds.
        shared: whether other processes, and later ones, see what is loaded here.
    """

    def __init__(self, manifest: Manifest, cache_dir: str | None, limit_bytes: int | None = None) -> None:
        self.dtype = record_type(manifest.columns)
        self._manifest = manifest
        self._starts = np.concatenate([[0], np.cumsum(manifest.group_rows)]).astype(np.int64)
        self._data_at = -(-max(1, len(manifest.row_groups)) // _PAGE) * _PAGE
        self._bytes = self._data_at + manifest.rows * self.dtype.itemsize
        self._closing = threading.Event()
        self._handle: _Handle | None = None
        self.shared = False
        self._key = manifest.digest, cache_dir, limit_bytes
        self._limit = limit_bytes
        if cache_dir is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            self._map = mmap.mmap(-1, self._bytes, flags=flags)
        else:
            try:
                self._handle = self._open(Path(cache_dir))
                self._map = mmap.mmap(self._handle.fd, self._bytes, access=mmap.ACCESS_READ)
            except OSError as error:
                raise DataError(f"the cache directory {cache_dir} cannot be used: {error}") from error
        self._whole = np.frombuffer(self._map, dtype=np.uint8)
        self._state = self._whole[: len(manifest.row_groups)]
        self.records = self._whole[self._data_at :].reshape(manifest.rows, self.dtype.itemsize)

    def _open(self, folder: Path) -> _Handle:
        """A file of the right size: the shared one of this data set, or an unnamed one where that is too large or the
        directory cannot be locked."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{self._manifest.digest[:40]}-{_boot_id()}{_SUFFIX}"
        if self._limit is None:
            self._limit = shutil.disk_usage(folder).free * 4 // 5 + sum(_size_on_disk(file) for file in _files(folder))
        handle = None
        if self._bytes <= self._limit:
            with _locked(folder) as alone:
                if not alone:
                    print(
                        f"elastic_spark: another process has held the lock of {folder} for {LOCK_LIMIT_S:g} s: this "
                        f"worker keeps rows of data set {self._manifest.name!r} of its own",
                        flush=True,
                    )
                elif _make_room(folder, self._limit - self._bytes, keep=path):
                    handle = _open_shared(path)
                if handle is not None and os.fstat(handle.fd).st_size < self._bytes:
                    os.ftruncate(handle.fd, self._bytes)
        self.shared = handle is not None
        if handle is None:
            fd, name = tempfile.mkstemp(dir=folder)
            os.unlink(name)
            handle = _Handle(fd)
            os.ftruncate(handle.fd, self._bytes)
        return handle

    @property
    def stopped(self) -> bool:
        """Whether `stop` or `close` was called."""
        return self._closing.is_set()

    def has(self, group: int) -> bool:
        """Whether the row group is here."""
        return bool(self._state[group])

    def missing(self, groups: Iterable[int]) -> list[int]:
        """Those of the row groups that are not here."""
        return [group for group in groups if not self._state[group]]

    def make_room(self, groups: Iterable[int]) -> None:
        """Before the row groups of an epoch are loaded: forgets those of the last one where both are too much.

        Only for rows that are not shared, and only while nobody reads. Raises DataError where the row groups alone take
        more than the limit.
        """
        if self.shared:
            return
        wanted = {int(group) for group in groups}
        needed = sum(self._manifest.row_groups[group].rows for group in wanted) * self.dtype.itemsize
        if self._limit is not None and needed > self._limit:
            raise DataError(
                f"the lanes of this worker take {needed:,} bytes of data set {self._manifest.name!r}, and the cache "
                f"may hold {self._limit:,}: raise the cache limit, use a larger disk, or more workers"
            )
        here = {int(group) for group in np.nonzero(self._state)[0]}
        held = sum(self._manifest.row_groups[group].rows for group in here - wanted) * self.dtype.itemsize
        if held and held + needed > (KEEP_BYTES if self._limit is None else self._limit):
            if self._handle is None:
                self._map.madvise(mmap.MADV_DONTNEED)
            else:
                os.ftruncate(self._handle.fd, 0)
                os.ftruncate(self._handle.fd, self._bytes)

    def load(self, group: int) -> None:
        """Reads a row group from its file, unless it is here. Tried again on a read error, up to a limit.

        Raises DataError naming file and row group. Returns early when the store is closed meanwhile.
        """
        if self.has(group) or self.stopped:
            return
        source = self._manifest.row_groups[group]
        where = f"row group {source.index} of {source.path}"
        for wait in (*RETRY_WAITS_S, None):
            try:
                return self._load(group)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
            except READ_ERRORS as error:
                if wait is None:
                    tries = len(RETRY_WAITS_S) + 1
                    raise DataError(f"{where} cannot be read after {tries} tries: {error}") from error
                if self._closing.wait(wait):
                    return None

    def _load(self, group: int) -> None:
        source, handle = self._manifest.row_groups[group], self._handle
        at, rows = int(self._starts[group]), 0
        for part in read_records(source.path, source.index, self._manifest.columns, self.dtype):
            stalls.moved()
            if self._closing.is_set():
                return
            if rows + len(part) <= source.rows:
                self._write(handle, self._data_at + (at + rows) * self.dtype.itemsize, part.view(np.uint8))
            rows += len(part)
        if rows != source.rows:
            raise DataError(f"{rows} rows, where {source.rows} were frozen: the file changed after that")
        if handle is not None and not _boot_id():
            os.fdatasync(handle.fd)
        self._write(handle, group, np.ones(1, dtype=np.uint8))

    def _write(self, handle: _Handle | None, at: int, data: npt.NDArray[np.uint8]) -> None:
        if handle is None:
            self._whole[at : at + data.size] = data
            return
        view = data.data
        while view:
            written = os.pwrite(handle.fd, view, at)
            view, at = view[written:], at + written

    def fill(self) -> None:
        """Loads all that is missing, at low priority, until done or closed. What cannot be read is left for later.

        Each process begins elsewhere, so that those of a machine share the work.
        """
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        groups = len(self._manifest.row_groups)
        first = derive_key(os.getpid()) % max(1, groups)
        for group in (*range(first, groups), *range(first)):
            if self._closing.is_set():
                return
            with contextlib.suppress(DataError, OSError):
                self.load(group)

    def stop(self) -> None:
        """Loads under way end soon, and none begins."""
        self._closing.set()

    def close(self) -> None:
        """Stops, and lets go of the file; the map goes with the last array that shows it."""
        self.stop()
        self._handle = None

    def put_by(self) -> None:
        """Stops, and leaves the rows to the next one to `take` them. Only if nobody reads."""
        self.stop()
        _put_by[self._key] = self
        while len(_put_by) > MOST_PUT_BY:
            _put_by.pop(next(iter(_put_by)))

    @classmethod
    def take(cls, manifest: Manifest, cache_dir: str | None, limit_bytes: int | None = None) -> Self:
        """A store that was put by, if there is one of the same data in the same place; else a new one."""
        store = _put_by.pop((manifest.digest, cache_dir, limit_bytes), None)
        if not isinstance(store, cls):
            return cls(manifest, cache_dir, limit_bytes)
        store._manifest, store._closing = manifest, threading.Event()
        return store


_put_by: dict[tuple[str, str | None, int | None], RowStore] = {}


class _Handle:
    """An open file that is closed when nobody refers to it any more: a number could by then be another file's."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def _open_shared(path: Path) -> _Handle | None:
    """The file at ``path``, made where there is none, marked as in use. None where others keep evicting it."""
    for _ in range(100):
        handle = _Handle(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(handle.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle.fd), os.stat(path)):
                os.utime(path)
                return handle
    return None


@functools.cache
def _boot_id() -> str:
    """What this machine's kernel calls its present run; empty where it does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    return ""


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.suffix == _SUFFIX]


def _size_on_disk(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_blocks * 512
    return 0


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Alone in the directory; False where it is not so within `LOCK_LIMIT_S`. Held for a few calls; a process that ends
    lets go of it, one that is stopped does not."""
    handle = _Handle(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    deadline = time.monotonic() + LOCK_LIMIT_S
    while not (alone := _lock(handle)) and time.monotonic() < deadline:
        time.sleep(0.01)
    yield alone
    del handle


def _lock(handle: _Handle) -> bool:
    try:
        fcntl.flock(handle.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_room(folder: Path, room: int, keep: Path) -> bool:
    """Deletes files not in use, the one used longest ago first, until the others, when full, take at most ``room``
    bytes; whether they do."""
    others = []
    for file in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            if file != keep:
                others.append((file.stat().st_mtime_ns, file.stat().st_size, file))
    taken = sum(size for _, size, _ in others)
    for _, size, file in sorted(others):
        if taken <= room:
            break
        with contextlib.suppress(OSError), file.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()
            taken -= size
    return taken <= room
