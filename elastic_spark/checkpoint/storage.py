"""Where checkpoints live: three kinds of storage behind one small seam.

====================  ================================  ==========================================================
kind                  addresses                         a file appears
====================  ================================  ==========================================================
`LocalStorage`        paths, ``file://``                written beside its place, fsync, rename, fsync of the directory
`SequentialStorage`   ``/Volumes/...``, ``/dbfs/...``   written and synced in local scratch, then copied in one go from
                                                        front to back: no rename, no random writes there
`ObjectStorage`       other fsspec URIs (``s3://``)     streamed, appears when closed, aborted on failure
====================  ================================  ==========================================================

None of them promises that a *set* of files appears at once: the manifest, written last, does. Errors of the storage
become `StorageFailed`; a file that is not there stays `FileNotFoundError`, which the store judges.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from elastic_spark.checkpoint.tensorfile import CHUNK, Readable
from elastic_spark.errors import ConfigError, StorageFailed

#: Mounts that take a file only as one sequential stream.
SEQUENTIAL_MOUNTS = ("/Volumes/", "/dbfs/")


class Sink(Protocol):
    def write(self, data: memoryview, /) -> object: ...


class Storage(Protocol):
    """Paths are relative to the root: ``folder/file``."""

    root: str

    def create(self, path: str) -> contextlib.AbstractContextManager[Sink]:
        """Write a file; it is there, whole and durable, when the block ends well, and as before when it raises. Only a
        sequential mount cannot keep what was there before: write under a name once, or be ready to read half of it."""

    def open(self, path: str) -> contextlib.AbstractContextManager[Readable]:
        """Read a file from its start."""

    def files(self, folder: str) -> dict[str, int]:
        """Sizes in bytes by file name, as seen now; empty where there is no such folder."""

    def folders(self) -> list[str]: ...

    def changed_unix(self, folder: str) -> float | None:
        """When the newest file of ``folder`` was changed; None where the storage does not say."""

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all its files. What is not there is no error."""


def open_storage(uri: str, scratch: str | None) -> Storage:
    """The storage behind ``uri``; raises `ConfigError` where no known kind fits."""
    path = uri.removeprefix("file://") if uri.startswith("file:///") else uri
    if "://" not in path:
        path = os.path.abspath(os.path.expanduser(path))
        return SequentialStorage(path, scratch) if path.startswith(SEQUENTIAL_MOUNTS) else LocalStorage(path)
    return ObjectStorage(path.rstrip("/"))


class LocalStorage:
    """A directory of a POSIX file system."""

    def __init__(self, root: str) -> None:
        self.root = root

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Sink]:
        target = os.path.join(self.root, path)
        folder, name = os.path.split(target)
        partial = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:12]}.partial")
        with self._failing("write", target):
            os.makedirs(folder, exist_ok=True)
            try:
                with open(partial, "xb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise
            for directory in (folder, self.root):
                _sync_directory(directory)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[Readable]:
        target = os.path.join(self.root, path)
        with self._failing("read", target), open(target, "rb", buffering=0) as file:
            yield file

    def files(self, folder: str) -> dict[str, int]:
        with self._failing("list", os.path.join(self.root, folder)):
            sizes = {}
            for entry in self._entries(folder):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
            return sizes

    def folders(self) -> list[str]:
        with self._failing("list", self.root):
            return [entry.name for entry in self._entries("") if entry.is_dir()]

    def changed_unix(self, folder: str) -> float | None:
        times = []
        with self._failing("list", target := os.path.join(self.root, folder)), contextlib.suppress(FileNotFoundError):
            times.append(os.stat(target).st_mtime)
            times += [entry.stat().st_mtime for entry in self._entries(folder)]
        return max(times, default=None)

    def remove(self, path: str) -> None:
        target = os.path.join(self.root, path)
        with self._failing("remove", target), contextlib.suppress(FileNotFoundError):
            if os.path.isdir(target):
                shutil.rmtree(target)
            else:
                os.unlink(target)

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                return list(entries)
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def _failing(self, verb: str, target: str) -> Iterator[None]:
        try:
            yield
        except StorageFailed:
            raise
        except OSError as error:
            if isinstance(error, FileNotFoundError) and verb != "write":
                raise
            raise _storage_failed(verb, target, error) from error


class SequentialStorage(LocalStorage):
    """A mount without rename and random writes. ``scratch``: a local directory, by default the system's temporary."""

    def __init__(self, root: str, scratch: str | None = None) -> None:
        super().__init__(root)
        self.scratch = scratch

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Sink]:
        target = os.path.join(self.root, path)
        with self._failing("write", target):
            if self.scratch:
                os.makedirs(self.scratch, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.scratch) as staged:  # without a name: it ends with this process
                yield staged
                staged.flush()
                os.fsync(staged.fileno())
                staged.seek(0)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                try:
                    with open(target, "wb") as file:
                        shutil.copyfileobj(staged, file, CHUNK)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(target)
                    raise


class _ObjectSink:
    """What is written goes up as one request where it is small, else as a stream of parts (a multipart upload)."""

    def __init__(self, fs: Any, target: str, guard: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._fs, self._target, self._guard = fs, target, guard
        self._small = bytearray()
        self._file: Any = None

    def write(self, data: memoryview, /) -> None:
        if self._file is None and len(self._small) + len(data) <= CHUNK:
            self._small += data
            return
        with self._guard():
            if self._file is None:
                self._file = self._fs.open(self._target, "wb")
                self._file.write(self._small)
            self._file.write(data)

    def finish(self) -> None:
        with self._guard():
            if self._file is None:
                self._fs.pipe_file(self._target, bytes(self._small))
            else:
                self._file.close()

    def abort(self) -> None:
        """Closing would publish half a file: drop the parts, and what the storage may have made visible of them."""
        if self._file is not None:
            with contextlib.suppress(Exception):
                self._file.discard()
            with contextlib.suppress(Exception):
                self._file.closed = True
            with contextlib.suppress(Exception):
                self._fs.rm(self._target)


class _GuardedSource:
    """A file whose errors are told as `StorageFailed`."""

    def __init__(self, file: Any, guard: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._file = file
        self._guard = guard

    def readinto(self, buffer: memoryview, /) -> int | None:
        with self._guard():
            count: int | None = self._file.readinto(buffer)
            return count

    def read(self) -> bytes:
        with self._guard():
            data: bytes = self._file.read()
            return data


#: Stores that have no folders. Asking for one would make the bucket instead, where its name is mistyped.
_WITHOUT_FOLDERS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


class ObjectStorage:
    """Anything fsspec has a file system for. Credentials come from that library's own settings."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._opened: tuple[Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "_opened": None}

    @property
    def _fs(self) -> Any:
        return self._connect()[0]

    def _connect(self) -> tuple[Any, str]:
        if self._opened is None:
            import fsspec

            try:
                self._opened = fsspec.core.url_to_fs(self.root)
            except (ValueError, ImportError) as error:
                raise ConfigError(f"checkpoint_uri {self.root!r}: {error}") from error
        return self._opened

    def _at(self, path: str) -> str:
        return f"{self._connect()[1].rstrip('/')}/{path}".rstrip("/")

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Sink]:
        target = self._at(path)
        with self._failing("write", path):
            if not _WITHOUT_FOLDERS.intersection(_protocols(self._fs)):
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        sink = _ObjectSink(self._fs, target, functools.partial(self._failing, "write", path))
        try:
            yield sink
            sink.finish()
        except BaseException:
            sink.abort()
            raise

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[Readable]:
        with self._failing("read", path):
            file = self._fs.open(self._at(path), "rb", block_size=CHUNK)
        with file:
            yield _GuardedSource(file, functools.partial(self._failing, "read", path))

    def files(self, folder: str) -> dict[str, int]:
        return {
            name: int(entry["size"] or 0) for name, entry in self._entries(folder).items() if entry["type"] == "file"
        }

    def folders(self) -> list[str]:
        return [name for name, entry in self._entries("").items() if entry["type"] == "directory"]

    def changed_unix(self, folder: str) -> float | None:
        times = []
        for name in self.files(folder):
            with self._failing("list", f"{folder}/{name}"):
                try:
                    times.append(self._fs.modified(self._at(f"{folder}/{name}")).timestamp())
                except (NotImplementedError, KeyError):
                    return None
        return max(times, default=None)

    def remove(self, path: str) -> None:
        with self._failing("remove", path), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(path), recursive=True)

    def _entries(self, folder: str) -> dict[str, Any]:
        with self._failing("list", folder):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._at(folder), detail=True)
            except FileNotFoundError:
                return {}
            return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in found}

    @contextlib.contextmanager
    def _failing(self, verb: str, path: str) -> Iterator[None]:
        """Clients of object stores raise whatever their vendor's library raises: all of it is the storage's failure."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and verb != "write":
                raise
            raise _storage_failed(verb, f"{self.root}/{path}".rstrip("/"), error) from error


_FULL = "Older checkpoints are intact. Free space, keep fewer checkpoints or point checkpoint_uri elsewhere"


def _storage_failed(verb: str, target: str, error: Exception) -> StorageFailed:
    code = error.errno if isinstance(error, OSError) else None
    hint = {
        errno.ENOSPC: f": no space left on device. {_FULL}",
        errno.EDQUOT: f": disk quota reached. {_FULL}",
        errno.EFBIG: f": the file would exceed the limit of file sizes (ulimit -f). {_FULL}",
        errno.EACCES: ": permission denied. The user of driver and executors needs access to it",
        errno.EROFS: ": the file system is mounted read-only",
    }.get(code or 0, "")
    return StorageFailed(f"cannot {verb} {target}{hint or f' ({type(error).__name__}: {error})'}")


def _sync_directory(path: str) -> None:
    """Make names in a directory durable; file systems that cannot say so (EINVAL) are let be."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
