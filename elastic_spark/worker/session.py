"""The worker's line to the driver, and what this process knows of the job.

One thread (the *link*) reads the channel and sends the heartbeat; it acts at once on what cannot wait (an abort, a
notice, a stop) and keeps the rest for the main thread. The main thread sends for itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from elastic_spark.checkpoint.commands import locate
from elastic_spark.core.ledger import Report
from elastic_spark.errors import CheckpointInvalid, ProtocolError, StorageFailed
from elastic_spark.transport import UNACKNOWLEDGED_LIMIT_MS, Channel, Message
from elastic_spark.worker import collective, stalls
from elastic_spark.worker.collective import Assignment, Leave
from elastic_spark.worker.commits import Commit
from elastic_spark.worker.memory import Snapshot, SnapshotMemory, read_newest
from elastic_spark.worker.saver import Saver

if TYPE_CHECKING:
    from elastic_spark.worker.state import ElasticState

HEARTBEAT_S = 0.5
REPORT_S = 0.1
#: So many reports that the driver has not taken down: it stands still, and must not be sent more than the kernel holds
#: for it, or the connection counts as dead.
MOST_UNREAD = 200
#: A driver that has read nothing for so long will not come back.
UNREAD_LIMIT_S = UNACKNOWLEDGED_LIMIT_MS / 1000
#: Reports in one message: all that were made while the driver stood still may be too much for one.
MOST_IN_MESSAGE = 5_000
#: Storage may be away for so many seconds while a checkpoint is loaded; the other ranks wait in a collective.
LOAD_RETRY_S = 30.0


class CannotLoad(Exception):
    """A checkpoint that the driver has verified cannot be read here: another worker may."""


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
        self._begun_at = 0.0
        self._place: Assignment | None = None
        self._state: ElasticState | None = None
        self._commits: list[Commit] = []  # to be sent
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
        self._saver: Saver | None = None
        self._link = threading.Thread(target=self._serve, name="link to the driver", daemon=True)

    def open(self) -> None:
        """Start to listen and to be heard."""
        self._link.start()

    # ------------------------------------------------------------------------------------------------ the link

    def _serve(self) -> None:
        heard_at, read_at = 0.0, time.monotonic()
        try:
            while True:
                now = time.monotonic()
                is_read = len(self._unconfirmed) < MOST_UNREAD
                read_at = now if is_read else read_at
                if now - read_at > UNREAD_LIMIT_S:
                    raise ProtocolError(f"the driver has read nothing for {UNREAD_LIMIT_S:.0f} s")
                if is_read and now - heard_at >= HEARTBEAT_S:
                    heard_at = now
                    told = {"where": self.where(), "waits": collective.waits_s(), "stalled": stalls.stalled()[1]}
                    self._channel.send({"type": "heartbeat", **told})
                if is_read:
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
        what, stalled_s = stalls.stalled()
        if stalled_s > 1.0:
            return f"nothing has come of {what} for {stalled_s:.0f} s"
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
            self._generation, self._begun_at = message["generation"], time.monotonic()
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

    def committed(self, commit: Commit) -> None:
        with self._reporting:
            self._commits.append(commit)
        self._values = commit.values

    def _flush(self) -> None:
        with self._flushing:
            with self._reporting:
                sending = [report for commit in self._commits for report in commit.reports()]
                self._commits = []
                self._unconfirmed.extend(sending)
            for first in range(0, len(sending), MOST_IN_MESSAGE):
                items = [_as_items(report) for report in sending[first : first + MOST_IN_MESSAGE]]
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
            waiting = [report for commit in self._commits for report in commit.reports()]
            reports = [_as_items(report) for report in (*self._unconfirmed, *waiting)]
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
        """``(state's skeleton, tensors, the rest of the meta)`` of a checkpoint that the driver chose.

        Raises:
            CannotLoad: this process cannot, though the driver could.
        """
        store, _ = locate(uri)
        deadline = time.monotonic() + LOAD_RETRY_S
        while True:
            try:
                with stalls.waiting_for("the checkpoint"):
                    tensors, meta = store.load(store.open(uri), moved=stalls.moved)
                return meta["state"], tensors, meta
            except CheckpointInvalid as error:
                raise CannotLoad(str(error)) from error
            except StorageFailed as error:
                if time.monotonic() > deadline:
                    raise CannotLoad(str(error)) from error
            time.sleep(1.0)

    def consider_checkpoint(self, state: ElasticState, *, late: bool) -> None:
        """At each commit: rank 0 saves when it is due; of a large state every rank writes a part, when it was planned.
        ``late``: the loop is about to ask for a batch, and what is saved may be copied from then on.

        A rank that hears of the plan too late writes a later step, which no other part belongs to: no harm is done.
        """
        place, planned = self.assignment(), self._planned
        if not self.config.get("checkpoint_uri"):
            return
        if planned is not None and state.step >= planned["step"]:
            self._planned = None
            if planned["generation"] == self._generation:
                self._ensure_saver().write_part(state, place.rank, place.size, late=late)
        elif place.rank == 0:
            asked = self._save_asked
            if self._ensure_saver().consider(state, place.size, asked=asked, late=late) and asked:
                self._save_asked = False

    def _ensure_saver(self) -> Saver:
        if self._saver is None:
            self._saver = Saver(self._channel, self.config, self._flush, self._memory)
        if self._saver.generation != self._generation:
            token = f"{self.config.get('attempt', 'a')}-g{self._generation}"
            self._saver.begin(self._generation, token, self._begun_at - self.assignment().body.get("durable_s", 0.0))
        self._saver.values = self._values
        return self._saver

    # ------------------------------------------------------------------------------------------------ the end

    def finish(self, payload: bytes) -> None:
        """Hand over what the function returned; then wait to be told to go, so that no peer sees this one vanish."""
        state = self._state
        if state is not None:
            state.keep()
        if state is not None and self.config.get("checkpoint_uri") and self.assignment().rank == 0:
            self._ensure_saver().last(state)
        self._flush()
        self._where = "finished"
        self._channel.send({"type": "result", "generation": self._generation}, payload)

    def fail(self, kind: str, error: str, traceback_text: str, at: float) -> None:
        """The user's function raised. ``kind``: of the error that the driver is to raise."""
        self._flush()
        said = {"kind": kind, "error": error, "traceback": traceback_text}
        self._channel.send({"type": "user_error", "step": self.held_step(), "at": at, **said})

    def gives_up(self, cause: str, error: str) -> None:
        """Nobody can go on from here in this process, and the training function is not to blame."""
        self._channel.send({"type": "gives_up", "cause": cause, "error": error})

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


def _as_items(report: Report) -> dict[str, Any]:
    return dict(vars(report))


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
