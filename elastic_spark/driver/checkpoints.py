"""The driver's side of checkpoints: it alone makes a checkpoint of what a worker has written, and it alone chooses one.

What may block, committing and verifying, runs in one thread of its own; facts are appended back in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from elastic_spark.checkpoint import Checkpoint, CheckpointStore, WrittenPart
from elastic_spark.core import events as ev

T = TypeVar("T")


class DriverCheckpoints:
    """Lives in the event loop's thread.

    Args:
        store: of the job's checkpoints.
        job_id: noted in each of them, as ``noted`` is; only those of this job are ever chosen.
        keep: how many stay. only_good: never choose one whose writer found NaN in it.
        resumed: the one that the job's first generation starts from, of this job or of another.
        append: takes a fact. now: unix time.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        job_id: str,
        noted: Mapping[str, Any],
        keep: int,
        only_good: bool,
        resumed: Checkpoint | None,
        append: Callable[[ev.Event], None],
        now: Callable[[], float],
    ) -> None:
        self._store, self._keep, self._resumed = store, keep, resumed
        self._only_good, self._undone = only_good, 0
        self._suspect: int | None = None
        self._waiting: dict[tuple[int, str], dict[int, tuple[WrittenPart, Mapping[str, Any]]]] = {}
        self._job_id = job_id
        self._identity = {"job_id": job_id, **noted}
        self._append, self._now = append, now
        self._parent: str | None = resumed.name if resumed is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")

    async def commit(self, part: WrittenPart, fields: Mapping[str, Any], *, world_size: int, seconds: float) -> bool:
        """Take in a part that took ``seconds`` to write. With the last one of its set: write the manifest, then delete
        what is not kept any more. A set that stays incomplete, because a rank was lost, never becomes a checkpoint; it
        is said when a later one is complete, and pruned as any write that was cut short.

        What a world has written that was rolled back meanwhile does not count. Storage that fails does not stop
        training: the log says so. Returns whether there is a checkpoint of it now.
        """
        if fields["generation"] <= self._undone:
            self._append(ev.CheckpointSkipped(at=self._now(), step=part.step, reason="its world was rolled back"))
            return False
        parts, fields = self._gather(part, fields)
        if not parts:
            return False
        if self._suspect is not None and part.step >= self._suspect:
            self._append(ev.CheckpointSkipped(at=self._now(), step=part.step, reason=_untrusted(self._suspect)))
            return False
        whole = {
            **fields,
            **self._identity,
            "world_size": world_size,
            "parent": self._parent,
            "created_unix": self._now(),
        }
        try:
            done = await self._in_thread(lambda: self._store.commit(part.step, part.token, parts, fields=whole))
        except Exception as error:
            self._append(ev.CheckpointSkipped(at=self._now(), step=part.step, reason=str(error)))
            return False
        self._parent = done.name
        self._append(
            ev.CheckpointWritten(
                at=self._now(),
                step=done.step,
                uri=done.uri,
                digest=done.digest,
                bytes=done.bytes,
                seconds=seconds,
                world_size=world_size,
            )
        )
        try:
            await self._in_thread(lambda: self._store.prune(self._keep, job_id=self._job_id))
        except Exception as error:
            self._append(ev.Warned(at=self._now(), where="old checkpoints", message=str(error)))
        return True

    def _gather(self, part: WrittenPart, fields: Mapping[str, Any]) -> tuple[list[WrittenPart], dict[str, Any]]:
        """The set that ``part`` completes, by number, and its fields; nothing while parts of it are missing."""
        key = (part.step, part.token)
        found = self._waiting.setdefault(key, {})
        found[part.part] = (part, fields)
        if len(found) < part.parts:
            return [], {}
        del self._waiting[key]
        for step, token in [other for other in self._waiting if other[0] < part.step]:
            came = self._waiting.pop((step, token))
            count = next(iter(came.values()))[0].parts
            reason = f"of {count} parts only {sorted(came)} came"
            self._append(ev.CheckpointSkipped(at=self._now(), step=step, reason=reason))
        suspect = [item["suspect"] for _, item in found.values() if "suspect" in item]
        merged = {**found[0][1], **({"suspect": suspect[0]} if suspect else {})}
        return [found[number][0] for number in range(part.parts)], merged

    async def newest(self, generation: int) -> Checkpoint | None:
        """What ``generation`` starts from, where nobody alive holds any state."""
        if generation == 1:
            return self._resumed  # verified already, before anything started
        return await self._choose(lambda item: item.suspect if self._only_good else "")

    async def good_before(self, step: int, generation: int) -> Checkpoint | None:
        """What ``generation`` goes back to: the newest good one of a step below ``step``. Those after it are of a
        history that is undone with it; they are deleted, so that no later start can take them for the newest."""
        self._undone = generation - 1
        found = await self._choose(lambda item: item.suspect or (_untrusted(step) if item.step >= step else ""))
        if found is not None:
            self._parent = found.name
            await self._in_thread(lambda: self._discard_from(found.step + 1))
        return found

    async def distrust(self, step: int) -> None:
        """The guard has ended the job: no later start may take a state of ``step`` or later for the newest."""
        self._suspect = step
        await self._in_thread(lambda: self._discard_from(step))

    async def _choose(self, refuse: Callable[[Checkpoint], str]) -> Checkpoint | None:
        found, rejected = await self._in_thread(lambda: self._store.newest_valid(self._job_id, refuse=refuse))
        if found is None and self._resumed is not None and self._resumed.job_id != self._job_id:
            reason = refuse(self._resumed)  # the checkpoint of another job, which this one began from
            found = self._resumed if not reason else None
        for item in rejected:
            self._append(ev.CheckpointRejected(at=self._now(), uri=item.uri, reason=item.reason))
        return found

    def _discard_from(self, step: int) -> None:
        for item in self._store.list(self._job_id):
            if item.step >= step:
                self._store.discard(item.step, item.token)

    def close(self) -> None:
        """No more work is taken; what is under way is not waited for."""
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _untrusted(step: int) -> str:
    return f"the guard trusts no state from step {step} on"
