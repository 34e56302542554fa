"""What ``elastic-spark checkpoints ls | verify | export | prune`` does. Each gives plain data; the command prints it.

``uri`` is a store, or one checkpoint in it. ``which`` picks: ``"latest"`` (newest that verifies), a step as digits, a
checkpoint's name, or (verify only) ``"all"``.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

from elastic_spark.checkpoint import manifest
from elastic_spark.checkpoint.manifest import Checkpoint, Rejected
from elastic_spark.checkpoint.store import CheckpointStore
from elastic_spark.errors import CheckpointInvalid

T = TypeVar("T")

NONE_THERE = (
    "no checkpoint under {uri}: those of a job are in CHECKPOINT_URI/JOB_NAME, or WORK_DIR/JOB_NAME/checkpoints"
)


def locate(uri: str) -> tuple[CheckpointStore, str | None]:
    """The store of ``uri``, and the checkpoint's name where ``uri`` is that of one."""
    above, _, name = uri.rstrip("/").rpartition("/")
    if manifest.parse_folder(name):
        return CheckpointStore(above or "."), name
    return CheckpointStore(uri), None


def ls(uri: str, *, job_id: str | None = None) -> list[dict[str, Any]]:
    """One row for each attempt, newest first: name, step, status (``complete``, ``unfinished``, ``invalid``), reason
    (why it is none, or why it is suspect), uri, created_unix, bytes, parts, world_size, job_id, run_id, score, digest.
    Reads manifests only."""
    store, only = locate(uri)
    rows = [_row(item) for item in store.attempts(job_id)]
    return _some([row for row in rows if only in (None, row["name"])], uri)


def verify(uri: str, which: str = "all", *, job_id: str | None = None) -> list[dict[str, Any]]:
    """Read every byte of the checkpoints picked: rows as of `ls`, with status ``valid`` or ``invalid``, and seconds.

    Unfinished attempts are no checkpoints and left out.
    """
    store, only = locate(uri)
    which = only or which
    items: list[Checkpoint | Rejected] = store.attempts(job_id) if which == "all" else [pick(store, which, job_id)[0]]
    rows = []
    for item in items:
        row, started = _row(item), time.monotonic()
        if isinstance(item, Checkpoint):
            try:
                store.verify(item)
                row["status"] = "valid"
            except CheckpointInvalid as error:
                row |= {"status": "invalid", "reason": str(error)}
        rows.append(row | {"seconds": round(time.monotonic() - started, 3)})
    return _some([row for row in rows if row["status"] != "unfinished"], uri)


def _some(rows: list[T], uri: str) -> list[T]:
    if not rows:
        raise CheckpointInvalid(NONE_THERE.format(uri=uri))
    return rows


def export(
    uri: str, path: str, which: str = "latest", *, object_name: str = "model", job_id: str | None = None
) -> dict[str, Any]:
    """Write an object's plain ``state_dict`` to the local file ``path``: its row, with path, tensors, and ``skipped``,
    why newer checkpoints were passed over."""
    store, only = locate(uri)
    checkpoint, skipped = pick(store, only or which, job_id)
    count = store.export(checkpoint, path, object_name=object_name)
    return _row(checkpoint) | {"path": path, "object": object_name, "tensors": count, "skipped": skipped}


def prune(uri: str, keep: int, *, keep_best: int = 0, job_id: str | None = None) -> list[str]:
    """Delete all but the newest ``keep``, never the newest valid one: the URIs that went."""
    store, only = locate(uri)
    if only:
        raise CheckpointInvalid(f"{uri} is one checkpoint: prune the store that holds it, {store.uri}")
    _some(store.attempts(job_id), uri)
    return store.prune(keep, keep_best=keep_best, job_id=job_id)


def pick(store: CheckpointStore, which: str, job_id: str | None = None) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that ``which`` means, and why newer ones than "latest" were passed over; raises
    `CheckpointInvalid` that says what there is."""
    if which == "latest":
        checkpoint, rejected = store.newest_valid(job_id)
        if checkpoint:
            return checkpoint, [f"{item.uri}: {item.reason}" for item in rejected]
        raise CheckpointInvalid(
            "; ".join([f"{store.uri} holds no valid checkpoint", *(item.reason for item in rejected)])
        )
    if manifest.parse_folder(which):
        return store.open(which), []
    there = store.list(job_id)
    found = next((item for item in there if which.isdecimal() and item.step == int(which)), None)
    if found is None:
        steps = ", ".join(str(item.step) for item in there) or "none"
        raise CheckpointInvalid(f"{store.uri} has no checkpoint {which!r}; steps there: {steps}")
    return found, []


def _row(item: Checkpoint | Rejected) -> dict[str, Any]:
    name = item.uri.rpartition("/")[2]
    step, _ = manifest.parse_folder(name) or (0, "")
    row: dict[str, Any] = {"name": name, "step": step, "status": "complete", "reason": "", "uri": item.uri}
    if isinstance(item, Rejected):
        return row | {"status": "invalid" if item.finished else "unfinished", "reason": item.reason}
    fields = {key: item.fields.get(key) for key in ("created_unix", "world_size", "job_id", "run_id", "score")}
    return row | fields | {"reason": item.suspect, "bytes": item.bytes, "parts": item.parts, "digest": item.digest}
