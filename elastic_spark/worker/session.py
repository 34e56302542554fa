"""The worker's line to the driver, and what this process knows of the job.

One thread (the *link*) reads the channel and sends the heartbeat; it acts at once on what cannot wait (an abort, a
notice, a stop) and keeps the rest for the main thread. The main thread sends for itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import median_low
from typing import TYPE_CHECKING, Any

import torch

from elastic_spark.checkpoint import BackgroundWriter, CheckpointStore, WriteOutcome, shares
from elastic_spark.checkpoint.commands import locate
from elastic_spark.core.ledger import Report
from elastic_spark.core.retention import due
from elastic_spark.errors import ProtocolError
from elastic_spark.transport import Channel, Message
from elastic_spark.worker import collective
from elastic_spark.worker.collective import Assignment, Leave
from elastic_spark.worker.late import LateCopy
from elastic_spark.worker.memory import Snapshot, SnapshotMemory, read_newest

if TYPE_CHECKING:
    from elastic_spark.worker.state import ElasticState

HEARTBEAT_S = 0.5
REPORT_S = 0.1
#: Bytes of a state from which on every rank writes its share. Below, one rank is done within a second or so, and a set
#: of parts that a lost rank leaves incomplete is the greater loss.
PARTS_FROM = 256 << 20
#: A checkpoint in parts is announced so many seconds ahead, so that all ranks hear of it before its step.
ANNOUNCE_S = 0.3
#: After a write that failed the next is not tried at once: twice this, then twice as long each time, at most the other.
RETRY_S, MOST_RETRY_S = 0.5, 30.0
_log = logging.getLogger(__name__)


class WorkerSession:
    """See `elastic_spark.worker.collective.Session` for the part that Horovod's init uses.

    Args:
        channel: to the driver.
        config: what the driver told the agent to hand on: ``checkpoint_uri``, ``rpo_target_s``, ``ckpt_budget``, ...
    """

    def __init__(self, channel: Channel, config: Mapping[str, Any]) -> None:
        self.config = config
        self._channel = channel
        self._assignments: queue.Queue[Message] = queue.Queue()
        self._generation = -1
        self._place: Assignment | None = None
        self._state: ElasticState | None = None
        self._reports: list[Report] = []  # to be sent
        self._unconfirmed: deque[Report] = deque()  # sent; the driver may not have read them
        self._values: Mapping[str, float] = {}
        self._reporting, self._flushing = threading.Lock(), threading.Lock()
        memory = os.environ.pop("ELASTIC_SPARK_MEMORY", None)  # from an agent: for snapshots, and its predecessor's
        own, before = (int(fd) for fd in memory.split(",")) if memory else (None, None)
        self._memory = SnapshotMemory(own)
        self._before = before
        self._found = read_newest(before) if before is not None else None
        self._restored = -1
        self._where = "warm"
        self._stopping = threading.Event()
        self._save_asked = False
        self._planned: Message | None = None
        self._saver: _Saver | None = None
        self._link = threading.Thread(target=self._serve, name="link to the driver", daemon=True)

    def open(self) -> None:
        """Start to listen and to be heard."""
        self._link.start()

    # ------------------------------------------------------------------------------------------------ the link

    def _serve(self) -> None:
        heard_at = 0.0
        try:
            while True:
                now = time.monotonic()
                if now - heard_at >= HEARTBEAT_S:
                    heard_at = now
                    self._channel.send({"type": "heartbeat", "where": self.where(), "waits": collective.waits_s()})
                self._flush()
                frame = self._channel.receive(REPORT_S)
                if frame is not None:
                    self._obey(frame[0])
        except ProtocolError as error:
            if not self._stopping.is_set():
                print(f"elastic_spark: {error}; this worker ends", flush=True)
                os._exit(1)

    def _obey(self, message: Message) -> None:
        kind = message["type"]
        if kind == "abort":
            collective.abort(message["generation"], [(ip, port) for ip, port in message["addresses"]])
        elif kind == "notify":
            collective.notify_hosts_updated()
        elif kind in ("assignment", "leave"):
            self._assignments.put(message)
        elif kind == "taken":
            self._confirmed(message["generation"], message["count"])
        elif kind == "save":
            self._save_asked = True
        elif kind == "parts":
            self._planned = message
        elif kind == "stop":
            os._exit(0)

    def where(self) -> str:
        """What this worker is doing, in words for the watchdog."""
        if collective.in_native_init():
            return "in Horovod's init"
        if (waits_s := collective.waits_s()) > 1.0:
            return f"in a collective for {waits_s:.0f} s"
        step = f", step {self._state.step}" if self._state is not None else ""
        return self._where + step

    def ready(self) -> None:
        """The process is warm, and may have found what its predecessor left."""
        body, step = {"worker": "", "generation": 0, "reports": []}, -1
        if self._found is not None:
            body, step = self._found.body, self._found.step
        told = {"of": body["worker"], "generation": body["generation"], "reports": body["reports"]}
        self._channel.send({"type": "ready", "step": step, **told})

    # -------------------------------------------------------------------- collective.Session: Horovod's init

    def next_assignment(self, reason: str) -> Assignment:
        """Ask for the next place in a world and wait for it. The driver bounds this wait; its loss ends the process."""
        if reason != "start":
            self._flush()
            self._channel.send(
                {
                    "type": "asked",
                    "generation": self._generation,
                    "step": self.held_step(),
                    "reason": reason,
                    "error": collective.last_collective_error() or "",
                }
            )
        self._where = "waiting for the next world"
        message = self._assignments.get()
        if message["type"] == "leave":
            raise Leave(message["reason"])
        with self._reporting:  # what was reported in the world before is settled by the step that this one begins with
            self._generation = message["generation"]
            self._unconfirmed.clear()
        self._place = Assignment(
            message["generation"], message["rank"], message["size"], message["env"], message["body"]
        )
        if self._state is not None and self._place.body.get("restore"):
            self._state.let_go()
        return self._place

    def initialised(self, assignment: Assignment, seconds: float) -> None:
        self._where = "in the training function"
        self._channel.send({"type": "initialised", "generation": assignment.generation, "seconds": seconds})

    def init_failed(self, assignment: Assignment, error: str) -> None:
        print(f"elastic_spark: init of generation {assignment.generation} failed: {error}", flush=True)

    def held_step(self) -> int:
        """The newest step that this process holds; -1 where it holds none, or its function tells none."""
        return self._state.step if self._state is not None and self._state.holds else -1

    # ---------------------------------------------------------------------------------- for ElasticState and ctx

    def attach(self, state: ElasticState) -> None:
        self._state = state

    def assignment(self) -> Assignment:
        """The place in the present world."""
        assert self._place is not None
        return self._place

    def take_restore(self, generation: int) -> bool:
        """True the first time that it is asked for a generation: its checkpoint is to be loaded once."""
        first = self._restored != generation
        self._restored = generation
        return first

    def committed(self, reports: Iterable[Report]) -> None:
        with self._reporting:
            self._reports.extend(reports)
            self._values = self._reports[-1].values

    def _flush(self) -> None:
        with self._flushing:
            with self._reporting:
                sending, self._reports = self._reports, []
                self._unconfirmed.extend(sending)
            if sending:
                items = [_as_items(report) for report in sending]
                self._channel.send({"type": "progress", "generation": self._generation, "reports": items})

    def _confirmed(self, generation: int, count: int) -> None:
        """The driver has taken down so many of the reports that were sent first."""
        with self._reporting:
            if generation == self._generation:
                for _ in range(min(count, len(self._unconfirmed))):
                    self._unconfirmed.popleft()

    # ------------------------------------------------------------------------------------------------ snapshots

    def keep(self, step: int, body: Any, tensors: Mapping[str, torch.Tensor], late: Collection[str] = ()) -> Snapshot:
        """A snapshot in memory that outlives this process, with what the driver has not confirmed yet; of the tensors
        named in ``late`` it is made later. What was found there from before is given up: this worker is in a world,
        and its state is newer."""
        with self._reporting:
            reports = [_as_items(report) for report in (*self._unconfirmed, *self._reports)]
        origin = {"worker": self.config["worker"], "generation": self._generation}
        whole = {"state": body, "reports": reports, **origin}
        snapshot = self._memory.write(step, whole, tensors, late)
        if self._before is not None and snapshot.late is None:
            self._found = None
            os.ftruncate(self._before, 0)
            os.close(self._before)
            self._before = None
        return snapshot

    @property
    def memory_is_there(self) -> bool:
        """Whether a snapshot would not wait for its memory."""
        return self._memory.is_there

    def load_found(self) -> Snapshot:
        """What the predecessor of this process left in memory; the driver has chosen it."""
        assert self._found is not None
        return self._found

    # --------------------------------------------------------------------------------------------- checkpoints

    def load_checkpoint(self, uri: str) -> tuple[Any, dict[str, torch.Tensor], Any]:
        """``(state's skeleton, tensors, the rest of the meta)`` of a checkpoint that the driver chose."""
        store, _ = locate(uri)
        tensors, meta = store.load(store.open(uri))
        return meta["state"], tensors, meta

    def consider_checkpoint(self, state: ElasticState) -> None:
        """At each commit: rank 0 saves when it is due; of a large state every rank writes a part, when it was planned.

        A rank that hears of the plan too late writes a later step, which no other part belongs to: no harm is done.
        """
        place, planned = self.assignment(), self._planned
        if not self.config.get("checkpoint_uri"):
            return
        if planned is not None and state.step >= planned["step"]:
            self._planned = None
            if planned["generation"] == self._generation:
                self._ensure_saver().write_part(state, place.rank, place.size)
        elif place.rank == 0:
            self._ensure_saver().consider(state, place.size, asked=self._save_asked)
            self._save_asked = False

    def _ensure_saver(self) -> _Saver:
        if self._saver is None:
            self._saver = _Saver(self._channel, self.config, self._flush, self._memory)
        self._saver.token = f"{self.config.get('attempt', 'a')}-g{self._generation}"
        self._saver.generation, self._saver.values = self._generation, self._values
        return self._saver

    # ------------------------------------------------------------------------------------------------ the end

    def finish(self, payload: bytes) -> None:
        """Hand over what the function returned; then wait to be told to go, so that no peer sees this one vanish."""
        state = self._state
        if state is not None:
            state.settle()
        if state is not None and self.config.get("checkpoint_uri") and self.assignment().rank == 0:
            self._ensure_saver().last(state)
        self._flush()
        self._where = "finished"
        self._channel.send({"type": "result", "generation": self._generation}, payload)

    def fail(self, error: str, traceback_text: str, at: float) -> None:
        """The user's function raised."""
        self._flush()
        step = self.held_step()
        self._channel.send({"type": "user_error", "step": step, "at": at, "error": error, "traceback": traceback_text})

    def collective_failed(self, error: str) -> None:
        """A collective failed outside ``@hvd.elastic.run``: nobody can go on from there in this process."""
        self._channel.send({"type": "collective_failed", "error": error})

    def close(self) -> None:
        """The process is about to end on purpose."""
        self._stopping.set()
        if self._state is not None:
            self._state.settle()
        if self._saver is not None:
            self._saver.close()
        with contextlib.suppress(ProtocolError):
            self._channel.send({"type": "bye"})

    def wait_to_go(self) -> None:
        """Until the driver says stop or leave, or is gone."""
        self._assignments.get()


class _Saver:
    """A rank's part in checkpoints: when (rank 0 alone decides), from what, and how they are told."""

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
        self._saved_at: float | None = None
        self._saved_step = -1
        self._planned = (0, 0)  # generation and step of the last plan
        self._costs = deque[tuple[float, LateCopy | None]]([(0.0, None)], maxlen=3)  # seconds at a commit, and after it
        self._late: LateCopy | None = None
        self._write_s = 0.0
        self._step_s = 0.0
        self._committed_at = time.monotonic()
        self._skipped_at = 0.0
        self._failures, self._retry_at = 0, 0.0
        self._fields: dict[str, Any] = {}
        self._written = threading.Event()

    def consider(self, state: ElasticState, ranks: int, *, asked: bool) -> None:
        now = time.monotonic()
        self._step_s = max(now - self._committed_at, 0.9 * self._step_s)  # the next may be as long as any lately
        step_s, self._committed_at = self._step_s, now
        if self._saved_at is None and not asked:
            self._saved_at = now  # what this generation started from is durable, or is not worth a checkpoint
            return
        cost_s = median_low(at_commit + (late.seconds if late else 0.0) for at_commit, late in self._costs)
        wanted, reason = due(
            now,
            self._saved_at,
            cost_s,
            step_s,
            rpo_target_s=self._rpo_target_s,
            budget=self._budget,
            write_s=cost_s + self._write_s,
        )
        if not (wanted or asked) or (self.generation, state.step) < self._planned:
            return
        if now < self._retry_at and not asked:
            return
        if self._writer.busy:
            if now - self._skipped_at > self._rpo_target_s:
                self._skipped_at = now
                self._channel.send({"type": "checkpoint_skipped", "step": state.step, "reason": "storage is slow"})
            return
        if ranks > 1 and not asked and _bytes(state) >= PARTS_FROM:
            self._saved_at = now
            step = state.step + 1 + math.ceil(ANNOUNCE_S / max(step_s, 1e-3))
            self._planned = (self.generation, step)
            self._channel.send({"type": "plan_parts", "generation": self.generation, "step": step})
            return
        self._submit(state, reason, late=not asked)
        self._saved_at = now
        self._costs.append((time.monotonic() - now, self._late))

    def write_part(self, state: ElasticState, rank: int, ranks: int) -> None:
        """This rank's share of the state as it is now."""
        now = time.monotonic()
        self._submit(state, "in parts", rank, ranks, late=True)
        self._saved_at = self._committed_at = now
        self._costs.append((time.monotonic() - now, self._late))

    def _submit(self, state: ElasticState, reason: str, part: int = 0, parts: int = 1, *, late: bool = False) -> None:
        if self._writer.busy:  # it reads the leased snapshot: that must not be written over
            reason = "the write before is still under way"
            self._channel.send({"type": "checkpoint_skipped", "step": state.step, "reason": reason})
            return
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
        self._saved_step = state.step
        self._written.clear()
        meta = {"state": body, **extra} if part == 0 else extra
        token = f"{self.token}-{state.step}"
        self._writer.submit(state.step, tensors, meta, token, part=part, parts=parts, ready=snapshot.late)

    def _done(self, outcome: WriteOutcome) -> None:
        self._write_s = max(outcome.seconds, 0.9 * self._write_s)  # storage is not always as fast as it can be
        self._memory.release()
        with contextlib.suppress(ProtocolError):
            self._failures = self._failures + 1 if outcome.part is None else 0
            if outcome.part is None:
                self._retry_at = time.monotonic() + min(RETRY_S * 2**self._failures, MOST_RETRY_S)
                reason = f"{type(outcome.error).__name__}: {outcome.error}"
                self._channel.send({"type": "checkpoint_skipped", "step": outcome.step, "reason": reason})
            else:
                self._flush()  # the driver must have been told of a step before it is told that the step is durable
                if outcome.nan:
                    self._fields["suspect"] = f"tensor {outcome.nan} holds NaN"
                part = json.loads(json.dumps(outcome.part.to_dict()))
                message = {"type": "checkpoint", "part": part, "seconds": outcome.seconds, "fields": self._fields}
                self._channel.send(message)
        self._written.set()

    def last(self, state: ElasticState, limit_s: float = 120.0) -> None:
        """The state at the end, written before the result is handed over."""
        if self._saved_step == state.step or state.step < 1:
            return
        deadline = time.monotonic() + limit_s
        while self._writer.busy and time.monotonic() < deadline:
            self._written.wait(0.05)
        self._submit(state, "the end of training")
        self._written.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        self._writer.close(5.0)


def _as_items(report: Report) -> dict[str, Any]:
    return dict(vars(report))


def _bytes(state: ElasticState) -> int:
    return sum(tensor.nbytes for tensor in state.capture()[1].values())


_session: WorkerSession | None = None


def bind(new: WorkerSession) -> None:
    """Make ``new`` the session of this process."""
    global _session
    _session = new


def session() -> WorkerSession:
    """The session of this process.

    Raises:
        RuntimeError: not in a worker of elastic_spark.
    """
    if _session is None:
        raise RuntimeError(
            "ElasticState and ctx live in the workers that es.run starts: use them in the function that it runs"
        )
    return _session
