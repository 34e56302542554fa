"""A job of real processes under a schedule: the driver's controller in this process, agents and workers beside it."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_spark import closure
from elastic_spark.agent.main import Launch
from elastic_spark.checkpoint import CheckpointStore
from elastic_spark.core import events as ev
from elastic_spark.core import job as core
from elastic_spark.core.lanes import LanePlan
from elastic_spark.core.metrics import summarise
from elastic_spark.driver.controller import Controller
from elastic_spark.driver.datasets import Datasets
from elastic_spark.driver.freeze import freeze
from elastic_spark.driver.journal import Journal
from elastic_spark.testing.counting import assert_agree, assert_exact, read_steps, train_counting

from .schedule import Fault, Schedule

ROWS, BATCH = 480, 24
ROOT = Path(__file__).parents[2]


class Pace:
    """Called after each step: the job lasts as long as the schedule, and half-way it lasts longer. With ``late`` each
    snapshot is copied during the step after it, as that of a large state. ``budget``: what part of the time snapshots
    may take; at 1.0 there is one at each commit, however busy the machine is."""

    def __init__(self, slow: Path, epochs: int, *, late: bool, budget: float | None) -> None:
        self.slow, self.half, self.late, self.budget = str(slow), epochs * ROWS // BATCH // 2, late, budget

    def __call__(self, state: Any) -> None:
        from elastic_spark.worker import state as module

        if self.late:
            module.LATE_FROM_S = -1.0
        if self.budget is not None:
            module.SNAPSHOT_BUDGET = self.budget
        if os.path.exists(self.slow):
            time.sleep(0.02 if state.step < self.half else 0.3)


class World:
    """One job under one schedule; see `run`.

    ``function`` instead of the counting model; ``host``: the driver's address; ``budget``: of snapshots, see `Pace`;
    ``options`` of the core.
    """

    def __init__(
        self,
        schedule: Schedule,
        folder: Path,
        epochs: int = 12,
        function: Callable[..., Any] | None = None,
        host: str = "127.0.0.1",
        budget: float | None = None,
        **options: Any,
    ) -> None:
        self.schedule, self.folder, self.epochs = schedule, folder, epochs
        self._function, self._host, self._budget, self._options = function, host, budget, options
        self.slow, self.steps_dir = folder / "slow", folder / "steps"
        self.steps_dir.mkdir(parents=True)
        self.slow.touch()
        self.events: list[ev.Event] = []
        self.executors: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers = itertools.count()
        self._struck: set[str] = set()  # workers and executors that a fault was aimed at
        self._armed: list[tuple[Fault, type[ev.Event]]] = []
        self._news = threading.Condition()
        self._output = open(folder / "output.txt", "a", buffering=1)  # noqa: SIM115
        self._begin()

    def _begin(self) -> None:
        table = pa.table({"id": np.arange(ROWS)})
        pq.write_table(table, self.folder / "rows.parquet", row_group_size=100)
        manifest = freeze(self.folder / "rows.parquet", self.folder / "data")
        plan = LanePlan(manifest.group_rows, 12, BATCH, self.schedule.seed, True)
        journal = Journal(self.folder / "events.jsonl", [self._hear])
        key, uri = secrets.token_bytes(32), str(self.folder / "checkpoints")
        self.controller = Controller(
            core.Options(
                num_proc=self.schedule.num_proc,
                min_num_proc=self.schedule.min_num_proc,
                max_num_proc=self.schedule.num_proc,
                start_timeout=120.0,
                elastic_timeout=90.0,
                **self._options,
            ),
            host=self._host,
            key=key,
            job_id=f"chaos-{self.schedule.seed}-{os.getpid()}",
            plans={"train": plan},
            seed=self.schedule.seed,
            balance=True,
            journal=journal,
            store=CheckpointStore(uri),
            keep=3,
            noted={},
            resumed=None,
            members_path=self.folder / "members.json",
            worker_output=lambda worker, lines: self._output.writelines(f"[{worker}] {line}\n" for line in lines),
            on_generation=lambda number, cause, size: None,
            on_agent=lambda slot, executor: None,
            on_notice=lambda executor: None,
        )
        address = self.controller.start()
        datasets = Datasets({"train": manifest}, {"train": plan})
        self.controller.record(lambda now: datasets.frozen("train", now))
        keywords = {
            "rows": ROWS,
            "epochs": self.epochs,
            "log_dir": str(self.steps_dir),
            "on_step": Pace(self.slow, self.epochs, late=self.schedule.seed % 2 == 1, budget=self._budget),
        }
        self.launch = Launch(
            job_id=f"chaos-{self.schedule.seed}-{os.getpid()}",
            address=address,
            key=key,
            payload=closure.pack(self._function or train_counting, (), {} if self._function else keywords),
            worker={
                "datasets": datasets.for_workers(),
                "seed": self.schedule.seed,
                "cache_dir": None,
                "checkpoint_uri": uri,
                "rpo_target_s": self.schedule.rpo_target_s,
                "ckpt_budget": 1.0,
                "nics": None,
            },
            env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "60", "OMP_NUM_THREADS": "1"},
        )

    # ------------------------------------------------------------------------------------------------- seeing

    def _hear(self, event: ev.Event) -> None:
        """In the controller's loop."""
        with self._news:
            self.events.append(event)
            due = [fault for fault, kind in self._armed if isinstance(event, kind) and _triggers(fault, event)]
            self._armed = [(fault, kind) for fault, kind in self._armed if fault not in due]
            self._news.notify_all()
        for fault in due:
            threading.Timer(fault.delay, self._strike, (fault, event)).start()

    def seen(self, *kinds: type[ev.Event]) -> list[Any]:
        with self._news:
            return [event for event in self.events if isinstance(event, kinds)]

    def wait(self, condition: Callable[[], Any], limit_s: float, what: str) -> Any:
        deadline = time.monotonic() + limit_s
        while not (value := condition()):
            if self.controller.wait(0.0):
                raise AssertionError(f"the job ended before {what}: {self.seen(ev.JobFinished)}")
            left = deadline - time.monotonic()
            assert left > 0, f"waited {limit_s} s for {what}; the last events: {self.events[-8:]}"
            with self._news:
                self._news.wait(min(left, 0.1))
        return value

    def members(self) -> tuple[str, ...]:
        formed = self.seen(ev.GenerationFormed)
        gone = {event.worker for event in self.seen(ev.WorkerLost, ev.WorkerLeft)}
        return tuple(name for name in formed[-1].members if name not in gone) if formed else ()

    def spawned(self, worker: str) -> ev.WorkerSpawned | None:
        return next((event for event in self.seen(ev.WorkerSpawned) if event.worker == worker), None)

    # ----------------------------------------------------------------------------------------------- breaking

    def add_executor(self, *prefix: str) -> None:
        """``prefix``: a command that runs it, as in a network of its own."""
        number = next(self._numbers)
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.chaos.executor", "--executor-id", str(number)],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            cwd=ROOT,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(cloudpickle.dumps((self.launch, number)))
        self.executors[str(number)] = process

    def living(self) -> list[str]:
        return [number for number, process in self.executors.items() if process.poll() is None]

    def apply(self, fault: Fault) -> None:
        triggers = {"kill_in_reset": ev.GenerationEnding, "kill_newcomer": ev.GenerationFormed}
        if fault.kind in triggers:
            with self._news:
                self._armed.append((fault, triggers[fault.kind]))
            if fault.kind == "kill_in_reset":
                self.kill(self._victim(fault.who + 1))
        else:
            self._strike(fault, None)

    def _strike(self, fault: Fault, event: ev.Event | None) -> None:
        victim = self._victim(fault.who)
        if fault.kind in ("kill_worker", "kill_in_reset"):
            self.kill(victim)
        elif fault.kind == "kill_newcomer":
            assert isinstance(event, ev.GenerationFormed)
            self.kill(event.joined[fault.who % len(event.joined)])
        elif fault.kind == "double_fault":
            self.kill(victim)
            threading.Timer(fault.delay, self.kill, (self._victim(fault.who + 1),)).start()
        elif fault.kind == "kill_all_workers":
            for worker in self.members():
                self.kill(worker)
        elif fault.kind == "kill_executor":
            self._signal_executor(victim, signal.SIGKILL)
        elif fault.kind == "kill_all_executors":
            for worker in self.members():
                self._signal_executor(worker, signal.SIGKILL)
        elif fault.kind == "freeze_worker":
            self.kill(victim, signal.SIGSTOP)
        elif fault.kind == "freeze_executor":
            self._signal_executor(victim, signal.SIGSTOP)
        elif fault.kind == "drain":
            spawned = self.spawned(victim) if victim else None
            if spawned is not None:
                self.controller.post(core.Draining(spawned.executor, "a schedule"))
        elif fault.kind == "add_executor":
            self.add_executor()
        elif fault.kind == "pause_driver":
            self.controller._loop.call_soon_threadsafe(time.sleep, fault.delay)

    def _victim(self, who: int) -> str | None:
        members = self.members()
        return members[who % len(members)] if members else None

    def kill(self, worker: str | None, number: signal.Signals = signal.SIGKILL) -> None:
        spawned = self.spawned(worker) if worker else None
        gone = {event.worker for event in self.seen(ev.WorkerLost, ev.WorkerLeft)}
        if spawned is not None and worker not in gone:
            self._struck.add(spawned.worker)
            with contextlib.suppress(ProcessLookupError):
                os.kill(spawned.pid, number)

    def _signal_executor(self, worker: str | None, number: signal.Signals) -> None:
        spawned = self.spawned(worker) if worker else None
        if spawned is not None:
            self._struck.add(spawned.executor)
            self.executors[spawned.executor].send_signal(number)

    # ------------------------------------------------------------------------------------------ the whole story

    def run(self) -> dict[str, Any]:
        """Begin, break, refill, end; then judge. Returns the summary.

        Raises:
            AssertionError: an invariant is broken; the message says which.
        """
        self.begin()
        self.strike(self.schedule)
        return self.finish()

    def strike(self, schedule: Schedule) -> None:
        """Let its faults happen, refill, and see the job go on."""
        for fault in schedule.faults:
            threading.Event().wait(fault.after)  # the schedule's own time
            if self.controller.wait(0.0):
                return
            self.apply(fault)
        with self._news:
            self._armed.clear()
        before = self.newest()
        self.wait(lambda: self._refill() or self.newest() > before, 60.0, "a step after the last fault")

    def begin(self) -> None:
        """Until the first step."""
        for _ in range(self.schedule.executors):
            self.add_executor()
        self.wait(lambda: self.seen(ev.StepsCommitted), 120.0, "the first step")

    def finish(self) -> dict[str, Any]:
        """Let it end, and judge."""
        self.slow.unlink()
        assert self.controller.wait(120.0), f"the job did not end; the last events: {self.events[-8:]}"
        return self._judge()

    def _refill(self) -> None:
        """New executors for those that are gone, frozen or about to go."""
        workers = {event.worker for event in self.seen(ev.WorkerDraining)}
        drained = {event.executor for event in self.seen(ev.WorkerSpawned) if event.worker in workers}
        useful = [n for n in self.living() if n not in drained and _state(self.executors[n].pid) != "T"]
        for _ in range(len(useful), self.schedule.num_proc):
            self.add_executor()

    def newest(self) -> int:
        return max((e.first_step + len(e.times) - 1 for e in self.seen(ev.StepsCommitted)), default=0)

    def _judge(self) -> dict[str, Any]:
        ended, blobs = self.controller.outcome()
        assert ended.status == "FINISHED", f"{ended.kind}: {ended.error}"
        values = [pickle.loads(blob) for blob in blobs if blob is not None]
        assert values, "no rank has returned anything"
        for value in values:
            assert_exact(value["w"], self.epochs)
        assert_agree(read_steps(self.steps_dir))
        figures = summarise(self.events)
        rows = tuple(figures[name] for name in ("rows_once", "rows_twice", "rows_never", "rows_unexplained"))
        assert rows == (self.epochs * ROWS, 0, 0, 0), f"rows once, twice, never, unexplained: {rows}"
        self._judge_roll_backs()
        self._judge_bystanders()
        self._judge_orphans()
        return figures

    def _judge_roll_backs(self) -> None:
        """Committed steps are lost only where nobody who held them lives. A step that not all ranks have told of, as
        the world broke in it, may be held by one that was lost before it could pass it on."""
        holders: set[str] = set()
        whole = 0
        gone: set[str] = set()
        members: set[str] = set()
        for event in self.events:
            if isinstance(event, ev.GenerationFormed):
                members = set(event.members)
                assert len(members) == len(event.members), f"a worker twice in a world: {event}"
                holders &= members
            elif isinstance(event, ev.StepsCommitted):
                holders = members - gone
                if not event.missing:
                    whole = event.first_step + len(event.times) - 1
            elif isinstance(event, (ev.WorkerLost, ev.WorkerLeft)):
                holders.discard(event.worker)
                gone.add(event.worker)
            elif isinstance(event, ev.StepsRolledBack):
                assert not holders or event.to_step >= whole, f"{event} although {sorted(holders)} held the state"
                whole = min(whole, event.to_step)

    def _judge_bystanders(self) -> None:
        """On a Horovod with the mends no process dies but of a fault that was aimed at it."""
        if not _is_mended():
            return
        struck = self._struck
        spared = {e.worker for e in self.seen(ev.WorkerSpawned) if not {e.worker, e.executor} & struck}
        died = [e for e in self.seen(ev.WorkerLost) if e.worker in spared and e.cause == "process died"]
        assert not died, f"nobody had struck {[(e.worker, e.exit_code, e.detail, e.tail) for e in died]}"

    def _judge_orphans(self) -> None:
        pids = {event.pid for event in self.seen(ev.WorkerSpawned)}
        for process in self.executors.values():
            if _state(process.pid) == "T":
                process.kill()
        deadline = time.monotonic() + 15.0
        for process in self.executors.values():
            process.wait(max(0.1, deadline - time.monotonic()))
        while left := [pid for pid in pids if _state(pid) not in ("", "Z")]:
            assert time.monotonic() < deadline, f"processes outlive the job: {left}"
            threading.Event().wait(0.05)

    def close(self) -> None:
        """Whatever happened: no process of ours is left."""
        if not self.controller.wait(0.0):
            self.controller.post(core.Fault("JobCancelled", "the test ends"))
            self.controller.wait(10.0)
        for process in self.executors.values():
            process.kill()
            process.wait()
        self._output.close()


def _is_mended() -> bool:
    from horovod.torch import mpi_ops

    return hasattr(mpi_ops._basics.MPI_LIB_CTYPES, "horovod_elastic_spark_mends")


def _triggers(fault: Fault, event: ev.Event) -> bool:
    return fault.kind != "kill_newcomer" or bool(getattr(event, "joined", ()))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def run_schedules(schedules: Sequence[Schedule], folder: Path) -> dict[str, Any]:
    """One job under the faults of one schedule after the other, with the first one's numbers of workers.

    The job's summary; AssertionError where an invariant is broken.
    """
    world = World(schedules[0], folder, epochs=6 * len(schedules) + 6)
    try:
        world.begin()
        for schedule in schedules:
            world.strike(schedule)
        return world.finish()
    finally:
        world.close()
