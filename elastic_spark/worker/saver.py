"""A rank's part in checkpoints: when one is due, from what it is written, and how it is told."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median_low
from typing import TYPE_CHECKING, Any

from elastic_spark.checkpoint import BackgroundWriter, CheckpointStore, WriteOutcome, shares
from elastic_spark.core.retention import due
from elastic_spark.errors import ProtocolError
from elastic_spark.transport import Channel
from elastic_spark.worker.late import LateCopy
from elastic_spark.worker.memory import SnapshotMemory

if TYPE_CHECKING:
    from elastic_spark.worker.state import ElasticState

#: Bytes of a state from which on every rank writes its share. Below, one rank is done within a second or so, and a set
#: of parts that a lost rank leaves incomplete is the greater loss.
PARTS_FROM = 256 << 20
#: A checkpoint in parts is announced so many seconds ahead, so that all ranks hear of it before its step.
ANNOUNCE_S = 0.3
#: After a write that failed the next is not tried at once: twice this, then twice as long each time, at most the other.
RETRY_S, MOST_RETRY_S = 0.5, 30.0
#: The end of training is tried so often; nobody trains meanwhile, and the result waits.
END_TRIES = 3


class Saver:
    """Rank 0 alone decides when."""

    def __init__(
        self, channel: Channel, config: Mapping[str, Any], flush: Callable[[], None], memory: SnapshotMemory
    ) -> None:
        self.token = ""
        self.generation = 0
        self.values: Mapping[str, float] = {}
        self._channel, self._flush, self._memory = channel, flush, memory
        self._rpo_target_s, self._budget = config["rpo_target_s"], config["ckpt_budget"]
        self._store = CheckpointStore(config["checkpoint_uri"])
        self._writer = BackgroundWriter(self._store, self._done)
        self._saved_at = self._saved_before = 0.0  # when the state that was saved last was current, and the one before
        self._durable_step = -1
        self._planned = (0, 0)  # generation and step of the last plan
        self._costs = deque([0.0], maxlen=3)  # of the last saves, in seconds of training
        self._cost_s = 0.0  # the middle one
        self._held_up_s = 0.0  # the present save: at its commit
        self._late: LateCopy | None = None  # and after it
        self._write_s = 0.0
        self._step_s = 0.0
        self._committed_at = time.monotonic()
        self._skipped_at = 0.0
        self._failures, self._retry_at = 0, 0.0
        self._fields: dict[str, Any] = {}
        self._written = threading.Event()

    def begin(self, generation: int, token: str, durable_at: float) -> None:
        """A new generation; what is safe in a checkpoint, whoever wrote it, was current at ``durable_at``."""
        self.generation, self.token = generation, token
        self._durable_step = -1  # what was saved may have been undone
        if not self._writer.busy:
            self._saved_at = durable_at

    def consider(self, state: ElasticState, ranks: int, *, asked: bool, late: bool) -> bool:
        """At a commit: whether a save of it was begun. One that was ``asked`` for does not wait until it is due."""
        now = time.monotonic()
        self._step_s = max(now - self._committed_at, 0.9 * self._step_s)  # the next may be as long as any lately
        step_s, self._committed_at = self._step_s, now
        wanted, reason = due(
            now,
            self._saved_at,
            self._cost_s,
            step_s,
            rpo_target_s=self._rpo_target_s,
            budget=self._budget,
            write_s=self._cost_s + self._write_s,
        )
        if not (wanted or asked) or (self.generation, state.step) < self._planned:
            return False
        if now < self._retry_at and not asked:
            return False
        if self._writer.busy:
            if now - self._skipped_at > self._rpo_target_s:
                self._skipped_at = now
                self._channel.send({"type": "checkpoint_skipped", "step": state.step, "reason": "storage is slow"})
            return False
        if ranks > 1 and not asked and _bytes(state) >= PARTS_FROM:
            self._saved_at = now
            step = state.step + 1 + math.ceil(ANNOUNCE_S / max(step_s, 1e-3))
            self._planned = (self.generation, step)
            self._channel.send({"type": "plan_parts", "generation": self.generation, "step": step})
            return False
        self._submit(state, reason or "asked for", late=late and not asked)
        return True

    def write_part(self, state: ElasticState, rank: int, ranks: int, *, late: bool) -> None:
        """This rank's share of the state as it is now."""
        self._committed_at = time.monotonic()
        self._submit(state, "in parts", rank, ranks, late=late)

    def _submit(self, state: ElasticState, reason: str, part: int = 0, parts: int = 1, *, late: bool = False) -> None:
        if self._writer.busy:  # it reads the leased snapshot: that must not be written over
            reason = "the write before is still under way"
            self._channel.send({"type": "checkpoint_skipped", "step": state.step, "reason": reason})
            return
        now = time.monotonic()
        snapshot, extra = state.for_checkpoint(late=late)
        self._memory.lease(snapshot)
        self._late = snapshot.late
        body, tensors = snapshot.body["state"], snapshot.tensors
        if parts > 1:
            mine = shares({name: tensor.nbytes for name, tensor in tensors.items()}, parts)[part]
            tensors = {name: tensors[name] for name in mine}
        self._fields = {"cursors": body["cursors"], "reason": reason, "generation": self.generation}
        bad = [f"{name} is {value}" for name, value in self.values.items() if not math.isfinite(value)]
        if bad:
            self._fields["suspect"] = f"committed with {bad[0]}"
        self._written.clear()
        meta = {"state": body, **extra} if part == 0 else extra
        token = f"{self.token}-{state.step}"
        self._saved_before, self._saved_at = self._saved_at, now
        self._held_up_s = time.monotonic() - now
        self._writer.submit(state.step, tensors, meta, token, part=part, parts=parts, ready=snapshot.late)

    def _done(self, outcome: WriteOutcome) -> None:
        self._costs.append(self._held_up_s + (self._late.seconds if self._late is not None else 0.0))
        self._cost_s = median_low(self._costs)
        self._write_s = max(outcome.seconds, 0.9 * self._write_s)  # storage is not always as fast as it can be
        self._memory.release()
        with contextlib.suppress(ProtocolError):
            self._failures = self._failures + 1 if outcome.part is None else 0
            if outcome.part is None:
                self._saved_at = self._saved_before
                self._retry_at = time.monotonic() + min(RETRY_S * 2**self._failures, MOST_RETRY_S)
                reason = f"{type(outcome.error).__name__}: {outcome.error}"
                self._channel.send({"type": "checkpoint_skipped", "step": outcome.step, "reason": reason})
            else:
                self._flush()  # the driver must have been told of a step before it is told that the step is durable
                if outcome.nan:
                    self._fields["suspect"] = f"tensor {outcome.nan} holds NaN"
                part = json.loads(json.dumps(outcome.part.to_dict()))
                message = {"type": "checkpoint", "part": part, "seconds": outcome.seconds, "fields": self._fields}
                message["age_s"] = time.monotonic() - self._saved_at
                self._channel.send(message)
                if outcome.part.parts == 1:
                    self._durable_step = outcome.step
        self._written.set()

    def last(self, state: ElasticState, limit_s: float = 120.0) -> None:
        """The state at the end, written before the result is handed over; tried again where it fails."""
        deadline = time.monotonic() + limit_s
        while self._writer.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._durable_step == state.step or state.step < 1:
            return
        if state.is_dirty:
            reason = "the function stepped an optimizer after its last commit, so its end is not a state of the job"
            self._channel.send({"type": "checkpoint_skipped", "step": state.step, "reason": reason})
            return
        for tries in range(END_TRIES):
            if tries:
                time.sleep(max(0.0, min(self._retry_at, deadline) - time.monotonic()))
            self.token += "-end"  # of a write that failed, or of a part, the old one is used
            self._submit(state, "the end of training")
            self._written.wait(max(0.0, deadline - time.monotonic()))
            if self._durable_step == state.step or time.monotonic() >= deadline:
                return

    def close(self) -> None:
        self._writer.close(5.0)


def _bytes(state: ElasticState) -> int:
    return sum(tensor.nbytes for tensor in state.capture()[1].values())
