"""The driver's side of checkpoints: it alone makes a checkpoint of what a worker has written, and it alone chooses one.

What may block (committing, verifying, deleting) runs in threads of its own; facts are appended back in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_spark.checkpoint import Checkpoint, CheckpointStore, WrittenPart, gist
from elastic_spark.core import events as ev
from elastic_spark.driver.lane import Lane
from elastic_spark.errors import CheckpointError, StorageFailed

#: A manifest is tried so often, so many seconds apart; each try may take so long. Training does not wait for it.
COMMIT_TRIES, COMMIT_AGAIN_S, ANSWER_S = 3, 1.0, 60.0


class DriverCheckpoints:
    """Lives in the event loop's thread.

    Args:
        store: of the job's checkpoints.
        job_id: noted in each of them, as ``noted`` is; only those of this job are ever chosen.
        keep: how many stay. only_good: never choose one whose writer found NaN in it.
        resumed: the one that the job's first generation starts from, of this job or of another.
        append: takes a fact. now: unix time.
        require_ours: raises JobHeld where another driver has taken the job, StorageFailed where it cannot tell; called
            before anything is published or deleted; may block.
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
        require_ours: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._keep, self._resumed = store, keep, resumed
        self._only_good, self._undone = only_good, 0
        self._alarmed: int | None = None  # the first step that an alarm since the last roll-back speaks of
        self._refused: int | None = None  # no state of this step or a later one is taken in any more
        self._choosing = asyncio.Lock()
        self._going_back: int | None = None  # a roll-back to before this step is not done yet
        self.best = resumed.step if resumed is not None else -1  # the newest step that is safe
        self._waiting: dict[tuple[int, str], dict[int, tuple[WrittenPart, Mapping[str, Any]]]] = {}
        self._job_id = job_id
        self._identity = {"job_id": job_id, **noted}
        self._append, self._now, self._require_ours = append, now, require_ours
        self._parent: str | None = resumed.name if resumed is not None else None
        self._thread, self._pruner = Lane("checkpoints"), Lane("old checkpoints")
        self._superfluous = False  # there may be some to delete
        self._pruning: asyncio.Task[None] | None = None

    async def commit(self, part: WrittenPart, fields: Mapping[str, Any], *, world_size: int, seconds: float) -> bool:
        """Take in a part that took ``seconds`` to write. With the last one of its set: write the manifest, then delete
        what is not kept any more. A set that stays incomplete, because a rank was lost, never becomes a checkpoint; it
        is said when a later one is complete, and pruned as any write that was cut short.

        What a world has written that was rolled back meanwhile does not count. Storage that fails does not stop
        training: the log says so. Returns whether there is a checkpoint of it now.
        """
        parts, fields = self._gather(part, fields)
        if not parts:
            return False
        whole = {
            **fields,
            **self._identity,
            "world_size": world_size,
            "parent": self._parent,
            "created_unix": self._now(),
        }
        try:
            done = await self._write_manifest(parts, whole)
        except Exception as error:
            self._append(ev.CheckpointSkipped(at=self._now(), step=part.step, reason=str(error)))
            return False
        if done.step >= self.best:
            self._parent, self.best = done.name, done.step
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
        self._superfluous = True
        if self._pruning is None or self._pruning.done():
            self._pruning = asyncio.create_task(self._prune())
        return True

    async def _write_manifest(self, parts: Sequence[WrittenPart], whole: Mapping[str, Any]) -> Checkpoint:
        tries = 0
        while True:
            tries += 1
            if why := self._undone_or_refused(parts[0].step, whole["generation"]):
                raise CheckpointError(why)
            try:
                return await self._thread(lambda: self._commit(parts, whole), ANSWER_S)
            except TimeoutError:
                raise StorageFailed(f"storage has not answered for {ANSWER_S:g} s") from None
            except StorageFailed:
                if tries == COMMIT_TRIES:
                    raise
            await asyncio.sleep(COMMIT_AGAIN_S)

    def _commit(self, parts: Sequence[WrittenPart], whole: Mapping[str, Any]) -> Checkpoint:
        self._require_ours()
        return self._store.commit(parts[0].step, parts[0].token, parts, fields=whole)

    def _undone_or_refused(self, step: int, generation: int) -> str:
        if generation <= self._undone:
            return "its world was rolled back"
        return _untrusted(self._refused) if self._refused is not None and step >= self._refused else ""

    async def _prune(self) -> None:
        """Beside commits, as it reads a checkpoint whole before an older one goes; but never while one is chosen."""
        while self._superfluous:
            self._superfluous = False
            try:
                async with self._choosing:
                    await self._pruner(self._delete_old)
            except Exception as error:
                self._append(ev.Warned(at=self._now(), where="old checkpoints", message=str(error)))

    def _delete_old(self) -> None:
        self._require_ours()
        self._store.prune(self._keep, job_id=self._job_id)

    async def finish(self, limit_s: float) -> None:
        """No commit comes any more. Storage that does not answer within ``limit_s`` seconds is not waited for."""
        pruning, self._pruning = self._pruning, None
        if pruning is not None:
            await asyncio.wait({pruning}, timeout=limit_s)
            pruning.cancel()

    def close(self) -> None:
        """No call comes any more; what is under way is not waited for."""
        self._thread.close()
        self._pruner.close()

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
        if self._going_back is not None:  # all were lost during the roll-back
            return await self.good_before(self._going_back, generation)
        async with self._choosing:
            found = await self._choose(lambda item: item.suspect if self._only_good else "")
            self._parent, self.best = (found.name, found.step) if found is not None else (None, -1)
            return found

    async def good_before(self, step: int, generation: int) -> Checkpoint | None:
        """What ``generation`` goes back to: the newest good one of a step below ``step``. Those after it are of a
        history that is undone with it; they are deleted, so that no later start can take them for the newest."""
        self._undone, self._going_back = generation - 1, step
        async with self._choosing:  # nobody chooses one that is about to go
            found = await self._choose(lambda item: item.suspect or (_untrusted(step) if item.step >= step else ""))
            if found is not None:
                self._parent, self.best, self._alarmed = found.name, found.step, None
                await self._thread(lambda: self._discard_from(found.step + 1))
            self._going_back = None
            return found

    def alarmed(self, step: int) -> None:
        """The guard does not trust the states from ``step`` on."""
        self._alarmed = min(step, self._alarmed if self._alarmed is not None else step)

    async def distrust(self) -> None:
        """The guard has ended the job: no later start may take a state that it does not trust for the newest."""
        step = self._refused = self._alarmed
        if step is None:
            return
        try:
            await self._thread(lambda: self._discard_from(step), ANSWER_S)
        except Exception as error:
            why = str(error) or f"storage has not answered for {ANSWER_S:g} s"
            message = f"those of step {step} and later, which the guard does not trust, are still there: {why}"
            self._append(ev.Warned(at=self._now(), where="checkpoints", message=message))

    async def _choose(self, refuse: Callable[[Checkpoint], str]) -> Checkpoint | None:
        found, rejected = await self._thread(lambda: self._store.newest_valid(self._job_id, refuse=refuse))
        if found is None and self._resumed is not None and self._resumed.job_id != self._job_id:
            reason = refuse(self._resumed)  # the checkpoint of another job, which this one began from
            found = self._resumed if not reason else None
        for item in gist(rejected):
            self._append(ev.CheckpointRejected(at=self._now(), uri=item.uri, reason=item.reason))
        return found

    def _discard_from(self, step: int) -> None:
        self._require_ours()
        for item in self._store.list(self._job_id):
            if item.step >= step:
                self._store.discard(item.step, item.token)


def _untrusted(step: int) -> str:
    return f"the guard trusts no state from step {step} on"
