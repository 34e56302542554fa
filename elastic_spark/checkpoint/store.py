"""The store: checkpoints as verified directories under one URI.

Workers write parts, each into the directory of its attempt; the driver commits by writing the manifest last. Whatever
is cut short at any moment leaves a directory without a manifest, which does not exist for any reader. Reading walks
from newest to oldest and takes the first checkpoint of which every byte is as it was written.

Nothing is ever written in place, nothing maps a file, nothing unpickles. Reading hashes the very bytes it returns, so
there is no moment between check and use.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from elastic_spark.checkpoint import manifest, tensorfile
from elastic_spark.checkpoint.manifest import JSON, MANIFEST, Checkpoint, Rejected, StoredFile, WrittenPart
from elastic_spark.checkpoint.storage import open_storage
from elastic_spark.core import retention
from elastic_spark.errors import CheckpointError, CheckpointInvalid, StorageFailed

#: A directory without a manifest is left alone for this long: its writer may be alive.
UNFINISHED_AGE_S = 3600.0


T = TypeVar("T")
S = TypeVar("S", bound=Collection[str])
S_co = TypeVar("S_co", bound=Collection[str], covariant=True)


class _Reader(Protocol[S_co]):
    def __call__(self, file: tensorfile.Readable, size: int, where: str, /) -> tuple[S_co, dict[str, Any], str]: ...


class Unread(Rejected):
    """Passed over because the storage failed, not because the checkpoint is bad."""


class CheckpointStore:
    """Checkpoints under ``uri``: a local path, ``file://``, a ``/Volumes`` path or any fsspec URI.

    ``scratch`` is a local directory for staging where the target takes only sequential copies. Holds no open handle and
    may be built anew wherever it is needed. Every method raises `StorageFailed` where the storage fails.
    """

    def __init__(self, uri: str, *, scratch: str | None = None) -> None:
        self._storage = open_storage(uri, scratch)
        self.uri = self._storage.root

    def __repr__(self) -> str:
        return f"CheckpointStore({self.uri!r})"

    # Workers

    def write_part(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        meta: Mapping[str, JSON],
        *,
        token: str,
        part: int = 0,
        parts: int = 1,
    ) -> WrittenPart:
        """Write one part of an attempt, durably, and say what was written. Without `commit` it does not exist.

        Tensor names are ``<object>/<key>`` (``model/0.weight``); the parts of one attempt hold different names.
        ``token`` is the attempt's own, never used twice. After a failure nothing of this part is left.
        """
        folder = manifest.folder_name(step, token)
        if not 0 <= part < parts:
            raise CheckpointError(f"part {part} of {parts}")
        try:
            text = json.dumps(dict(meta)).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"step {step}: meta must be JSON ({error})") from error
        layout = tensorfile.plan(tensors, {"step": step, "token": token, "part": part, "parts": parts})
        state = f"{folder}/{manifest.state_name(part, parts)}"
        if manifest.state_name(part, parts) in self._storage.files(folder):
            raise CheckpointError(f"{self.uri}/{state} is there already: a token is for one attempt, written once")
        files = []
        try:
            files.append(self._write(state, layout.chunks()))
            if meta or part == 0:
                files.append(self._write(f"{folder}/{manifest.meta_name(part, parts)}", iter([memoryview(text)])))
        except BaseException:
            with contextlib.suppress(StorageFailed):
                self._storage.remove(state)
                if not self._storage.files(folder):  # no other rank's part is there
                    self._storage.remove(folder)
            raise
        return WrittenPart(step, token, part, parts, tuple(files))

    def _write(self, path: str, chunks: Iterator[memoryview]) -> StoredFile:
        size = 0
        with tensorfile.Hasher() as hasher:
            with self._storage.create(path) as sink:
                for chunk in chunks:
                    hasher.update(chunk)
                    sink.write(chunk)
                    size += len(chunk)
            return StoredFile(path.rpartition("/")[2], size, hasher.hexdigest())

    # Driver: writing

    def commit(
        self,
        step: int,
        token: str,
        parts: Sequence[WrittenPart],
        *,
        fields: Mapping[str, JSON],
        visible_timeout_s: float = 5.0,
    ) -> Checkpoint:
        """Make the attempt a checkpoint: check that its files are here with their sizes, then write the manifest.

        ``fields``: cursor, world_size, generation, run_id, job_id, parent, created_unix (set where missing), score and
        whatever else is to be found again. Waits at most ``visible_timeout_s`` for storage that shows files late, then
        raises `StorageFailed`. Committing the same attempt again gives the same checkpoint.
        """
        folder = manifest.folder_name(step, token)
        fields = {"created_unix": round(time.time(), 3)} | dict(fields)
        text = manifest.compose(step, token, parts, fields)
        checkpoint = manifest.parse(text, f"{self.uri}/{folder}")
        if MANIFEST in self._storage.files(folder):
            there = self.open(checkpoint.name)
            if there.files == checkpoint.files:
                return there
            raise CheckpointError(f"{there.uri} is committed already, with other files")
        self._wait_visible(checkpoint, visible_timeout_s)
        self._write(f"{folder}/{MANIFEST}", iter([memoryview(text)]))
        return checkpoint

    def _wait_visible(self, checkpoint: Checkpoint, timeout_s: float) -> None:
        deadline, pause = time.monotonic() + timeout_s, 0.01
        while True:
            sizes = self._storage.files(checkpoint.name)
            wrong = [file for file in checkpoint.files if sizes.get(file.name) != file.bytes]
            if not wrong:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(pause * 2, 0.5)
        file, size = wrong[0], sizes.get(wrong[0].name)
        seen = "is not there" if size is None else f"has {size} bytes"
        raise StorageFailed(
            f"{checkpoint.uri}/{file.name} {seen} as the driver sees it; a worker wrote {file.bytes} bytes there. "
            "Likely cause: this path is not shared between the driver and the executors. "
            "Set checkpoint_uri to storage that all of them see (a volume, an NFS mount, s3://...)"
        )

    def discard(self, step: int, token: str) -> None:
        """Remove an attempt or a checkpoint, manifest first, so that it ceases to exist before it is taken apart."""
        folder = manifest.folder_name(step, token)
        self._storage.remove(f"{folder}/{MANIFEST}")
        self._storage.remove(folder)

    # Reading

    def list(self, job_id: str | None = None) -> builtins.list[Checkpoint]:
        """All checkpoints with an unharmed manifest, newest (step, then created) first. Their files are not read."""
        return [item for item in self._walk(job_id) if isinstance(item, Checkpoint)]

    def attempts(self, job_id: str | None = None) -> builtins.list[Checkpoint | Rejected]:
        """Every attempt, newest first: as `list`, and as `Rejected` what has no usable manifest (of whatever job)."""
        return list(self._walk(job_id))

    def open(self, name: str) -> Checkpoint:
        """The checkpoint of this name, or of a URI that ends in it; raises `CheckpointInvalid` where there is none."""
        folder = name.rstrip("/").rpartition("/")[2]
        uri = f"{self.uri}/{folder}"
        if manifest.parse_folder(folder) is None:
            raise CheckpointInvalid(f"{uri}: no name of a checkpoint (step-<12 digits>-<token>)")
        try:
            with self._storage.open(f"{folder}/{MANIFEST}") as file:
                text = file.read()
        except FileNotFoundError:
            raise CheckpointInvalid(f"{uri}: has no {MANIFEST}: its write was cut short, or still goes on") from None
        return manifest.parse(text, uri)

    def verify(self, checkpoint: Checkpoint) -> None:
        """Read every byte, in constant memory; raises `CheckpointInvalid` that says which file and why."""
        self._read(checkpoint, tensorfile.check)

    def load(
        self, checkpoint: Checkpoint, *, moved: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors by name, in ordinary host memory; meta), verified as they are read. ``moved``: called as bytes come.

        Of a checkpoint in parts: the tensors of all parts, the meta of part 0, and where other parts have meta of their
        own it is under ``"parts"`` by number. Raises `CheckpointInvalid`.
        """
        states, metas = self._read(checkpoint, partial(tensorfile.read, moved=moved))
        tensors = {name: tensor for state in states for name, tensor in state.items()}
        meta = metas.pop(0)
        return tensors, meta | ({"parts": {str(part): body for part, body in metas.items()}} if metas else {})

    def newest_valid(
        self, job_id: str | None = None, *, refuse: Callable[[Checkpoint], str] = lambda checkpoint: ""
    ) -> tuple[Checkpoint | None, builtins.list[Rejected]]:
        """The newest checkpoint that verifies, and those passed over on the way with the reason; never raises for a bad
        one. With ``job_id``, of that job only. ``refuse`` may give a reason why one does not serve.

        Raises `StorageFailed` where the storage cannot be listed, or where nothing valid was found and something could
        not be read: "there is nothing" must be known before a job starts afresh.
        """

        def read(checkpoint: Checkpoint) -> None:
            if reason := refuse(checkpoint):
                raise CheckpointInvalid(reason)
            self.verify(checkpoint)

        checkpoint, _, rejected = self._newest(job_id, read)
        return checkpoint, rejected

    def load_newest(
        self, job_id: str | None = None
    ) -> tuple[Checkpoint | None, dict[str, torch.Tensor], dict[str, Any], builtins.list[Rejected]]:
        """As `newest_valid` and `load` in one pass over the bytes: (checkpoint, tensors, meta, rejected)."""
        checkpoint, content, rejected = self._newest(job_id, self.load)
        tensors, meta = content or ({}, {})
        return checkpoint, tensors, meta, rejected

    # Driver: retention, export

    def prune(
        self, keep: int, *, keep_best: int = 0, job_id: str | None = None, unfinished_age_s: float = UNFINISHED_AGE_S
    ) -> builtins.list[str]:
        """Delete old checkpoints and leftovers of writes cut short; gives the URIs that went.

        Kept: the newest ``keep``, the ``keep_best`` with the lowest ``score`` field, and always the newest valid one:
        nothing goes before a kept one has been read back and verified. Leftovers go when nothing in them has changed
        for ``unfinished_age_s``, seconds by this machine's clock. With ``job_id``, only that job's checkpoints go.
        """
        walk = list(self._walk(job_id))
        complete = [item for item in walk if isinstance(item, Checkpoint)]
        going: list[str] = []
        if len(complete) > max(keep, 1):
            going = [item.name for item in self._superfluous(complete, keep, keep_best)]
        for item in walk:
            if isinstance(item, Rejected) and not item.finished:
                changed = self._storage.changed_unix(name := item.uri.rpartition("/")[2])
                if changed is not None and time.time() - changed >= unfinished_age_s:
                    going.append(name)
        for name in going:
            self._storage.remove(f"{name}/{MANIFEST}")
            self._storage.remove(name)
        return [f"{self.uri}/{name}" for name in going]

    def _superfluous(
        self, complete: Sequence[Checkpoint], keep: int, keep_best: int
    ) -> builtins.list[retention.Stored]:
        """Verifies from the newest down to the first valid and good one, and those a score would keep; no others."""
        stored, found = [], False
        for item in complete:
            good = not item.suspect
            valid = (not found or (keep_best > 0 and item.score is not None)) and self._is_valid(item)
            found = found or (valid and good)
            stored.append(retention.Stored(item.name, item.step, item.created_unix, valid, item.score, good))
        return retention.to_delete(stored, keep, keep_best=keep_best)

    def _is_valid(self, checkpoint: Checkpoint) -> bool:
        try:
            self.verify(checkpoint)
        except CheckpointInvalid:
            return False
        return True

    def export(self, checkpoint: Checkpoint, path: str, *, object_name: str = "model") -> int:
        """Write one object's tensors as a plain ``state_dict`` to the local file ``path``: `torch.load` with its
        defaults opens it, without this package. Keys lose the object's name, and ``module.`` where all begin so.

        Returns the number of tensors; raises `CheckpointError` where the checkpoint has no such object.
        """
        tensors, _ = self.load(checkpoint)
        prefix = f"{object_name}/"
        found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if not found:
            names = sorted({name.partition("/")[0] for name in tensors})
            raise CheckpointError(
                f"{checkpoint.uri} has no object {object_name!r}; it has {', '.join(names) or 'no tensors'}"
            )
        if all(name.startswith("module.") for name in found):
            found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
        path = os.path.abspath(path)
        partial = f"{path}.partial"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(partial, "wb") as file:
                torch.save(found, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise StorageFailed(f"cannot write {path}: {error}") from error
        return len(found)

    # Inside

    def _walk(self, job_id: str | None) -> Iterator[Checkpoint | Rejected]:
        """Every attempt, newest first; what has no usable manifest is a `Rejected`, before the others of its step."""
        items: list[tuple[tuple[int, float, str], Checkpoint | Rejected]] = []
        for folder in self._storage.folders():
            if (parsed := manifest.parse_folder(folder)) is None:
                continue
            uri = f"{self.uri}/{folder}"
            try:
                checkpoint = self.open(folder)
            except CheckpointInvalid as error:
                finished = MANIFEST in self._storage.files(folder)
                items.append(((parsed[0], float("inf"), folder), Rejected(uri, str(error), finished)))
                continue
            except StorageFailed as error:
                items.append(((parsed[0], float("inf"), folder), Unread(uri, str(error))))
                continue
            if job_id is None or checkpoint.job_id == job_id:
                items.append(((checkpoint.step, checkpoint.created_unix, folder), checkpoint))
        return (item for _, item in sorted(items, key=lambda pair: pair[0], reverse=True))

    def _newest(
        self, job_id: str | None, read: Callable[[Checkpoint], T]
    ) -> tuple[Checkpoint | None, T | None, builtins.list[Rejected]]:
        """A checkpoint pruned while it is read is no damage: where the walk finds nothing and the store has changed
        meanwhile, it begins again, at most twice."""
        for _ in range(3):
            before, rejected = self._attempts(), []
            for item in self._walk(job_id):
                if isinstance(item, Rejected):
                    rejected.append(item)
                    continue
                try:
                    return item, read(item), rejected
                except CheckpointInvalid as error:
                    rejected.append(Rejected(item.uri, str(error)))
                except StorageFailed as error:
                    rejected.append(Unread(item.uri, str(error)))
            if self._attempts() == before:
                break
        if unread := next((item for item in rejected if isinstance(item, Unread)), None):
            raise StorageFailed(
                f"no valid checkpoint under {self.uri}, and {unread.uri} could not be read: {unread.reason}"
            )
        return None, None, rejected

    def _attempts(self) -> set[str]:
        return {folder for folder in self._storage.folders() if manifest.parse_folder(folder)}

    @contextlib.contextmanager
    def _opened(self, checkpoint: Checkpoint, file: StoredFile) -> Iterator[tensorfile.Readable]:
        """``file`` open for reading, its size checked."""
        where = f"{checkpoint.uri}/{file.name}"
        try:
            size = self._storage.files(checkpoint.name).get(file.name)
            if size is None:
                raise CheckpointInvalid(f"{where}: is missing")
            if size != file.bytes:
                raise CheckpointInvalid(f"{where}: has {size} bytes, the manifest says {file.bytes}")
            with self._storage.open(f"{checkpoint.name}/{file.name}") as stream:
                yield stream
        except FileNotFoundError:
            raise CheckpointInvalid(f"{where}: is missing") from None

    def _read(self, checkpoint: Checkpoint, reader: _Reader[S]) -> tuple[builtins.list[S], dict[int, dict[str, Any]]]:
        """The states of all parts and the metas by part, every byte checked."""
        files = {file.name: file for file in checkpoint.files}
        states: list[S] = []
        metas: dict[int, dict[str, Any]] = {}
        names: set[str] = set()
        for part in range(checkpoint.parts):
            file = files.pop(manifest.state_name(part, checkpoint.parts))
            where = f"{checkpoint.uri}/{file.name}"
            with self._opened(checkpoint, file) as stream:
                state, own, digest = reader(stream, file.bytes, where)
            mine = {"step": checkpoint.step, "token": checkpoint.token, "part": part, "parts": checkpoint.parts}
            if own != mine:
                raise CheckpointInvalid(f"{where}: is of another attempt: it says {own}, the manifest {mine}")
            _check_digest(where, digest, file)
            if twice := names.intersection(state):
                raise CheckpointInvalid(f"{checkpoint.uri}: tensor {min(twice)!r} is in two parts")
            names.update(state)
            states.append(state)
            if meta := files.pop(manifest.meta_name(part, checkpoint.parts), None):
                metas[part] = self._read_meta(checkpoint, meta)
        if files:
            raise CheckpointInvalid(f"{checkpoint.uri}/{MANIFEST}: names {min(files)}, which belongs to no part")
        return states, metas

    def _read_meta(self, checkpoint: Checkpoint, file: StoredFile) -> dict[str, Any]:
        where = f"{checkpoint.uri}/{file.name}"
        with self._opened(checkpoint, file) as stream:
            text = stream.read()
        _check_digest(where, manifest.sha256(text), file)
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointInvalid(
                f"{where}: {tensorfile.looks_executable(text[:8]) or 'is not JSON'} ({error})"
            ) from error
        if not isinstance(body, dict):
            raise CheckpointInvalid(f"{where}: is not a JSON object")
        return body


def _check_digest(where: str, digest: str, file: StoredFile) -> None:
    if digest != file.sha256:
        raise CheckpointInvalid(
            f"{where}: SHA-256 is {digest[:12]}..., the manifest says {file.sha256[:12]}...: its bytes were changed"
        )
