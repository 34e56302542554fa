"""One real standalone cluster for all tests here, and a job that runs beside the test."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

import elastic_spark as es
from elastic_spark.core import events as ev
from elastic_spark.testing import StandaloneCluster
from elastic_spark.testing.counting import assert_agree, assert_exact, counting_data, read_steps, train_counting
from elastic_spark.testing.session import bounded

ROWS, BATCH = 1200, 24


@pytest.fixture(scope="package")
def cluster() -> Iterator[StandaloneCluster]:
    with StandaloneCluster(workers=3, pythonpath=[Path(__file__).parent]) as running:
        yield running


@pytest.fixture
def job(cluster: StandaloneCluster, tmp_path: Path) -> Iterator[Job]:
    """On one application for all, as in a notebook: a job comes after others, on executors that have seen some."""
    context = SparkContext._active_spark_context
    shared = context is not None and context.master == cluster.master_url
    running = Job(cluster, SparkSession.builder.getOrCreate() if shared else cluster.session("tests"), tmp_path)
    yield running
    try:
        running.finish()
    except AssertionError:
        bounded(running.spark.stop, 20.0)  # what still runs there would be in the way of the tests to come
        raise


class Job:
    """``es.run`` in a thread, followed through its event log."""

    def __init__(self, cluster: StandaloneCluster, spark: SparkSession, folder: Path) -> None:
        self.cluster, self.spark, self.folder = cluster, spark, folder
        self.steps_dir, self.slow = folder / "steps", folder / "slow"
        self.steps_dir.mkdir()
        self.slow.touch()
        self.events_path = folder / "runs" / "job" / "events.jsonl"
        self.result: es.Result | None = None
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def run(self, fn: Any, **options: Any) -> None:
        """Start; options as of es.run, with quiet defaults."""
        options = {
            "num_proc": 3,
            "min_num_proc": 1,
            "global_batch": BATCH,
            "balance": False,  # how fast a worker of a busy machine is must not decide how often the world changes
            "tracking": False,
            "verbose": 0,
            "work_dir": str(self.folder / "runs"),
            "job_name": "job",
            "stdout": open(self.folder / "workers.txt", "a", buffering=1),  # noqa: SIM115
            **options,
        }

        def body() -> None:
            try:
                self.result = es.run(fn, **options)
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=body, daemon=True)
        self._thread.start()

    def count(
        self, epochs: int, rows: int = ROWS, on_step: Callable[[Any], None] | None = None, **options: Any
    ) -> None:
        """Start the counting model. While the file ``slow`` is there it takes its time, and half-way it takes more, so
        that it does not end before the test has done what it wants to do, on however slow a machine."""
        slow, half = str(self.slow), epochs * rows // BATCH // 2

        def each_step(state: Any) -> None:
            if os.path.exists(slow):
                time.sleep(0.04 if state.step < half else 0.4)
            if on_step is not None:
                on_step(state)

        self.run(
            train_counting,
            kwargs={"rows": rows, "epochs": epochs, "log_dir": str(self.steps_dir), "on_step": each_step},
            data={"train": counting_data(self.spark, rows)},
            **options,
        )

    def hurry(self) -> None:
        self.slow.unlink(missing_ok=True)

    def finish(self, limit_s: float = 200.0) -> None:
        """Let it end; called after each test in any case."""
        self.hurry()
        self.wait_end(limit_s)

    def wait_end(self, limit_s: float = 200.0) -> None:
        """Until the call has returned or raised."""
        if self._thread is not None:
            self._thread.join(limit_s)
            assert not self._thread.is_alive(), f"the job did not end; the last events: {self.events()[-5:]}"

    def done(self, limit_s: float = 200.0) -> es.Result:
        self.finish(limit_s)
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    # ------------------------------------------------------------------------------------------------- seeing

    def events(self, *kinds: type[ev.Event]) -> list[Any]:
        if not self.events_path.exists():
            return []
        with self.events_path.open(encoding="utf-8") as lines:
            return [event for event in ev.read_log(lines) if not kinds or isinstance(event, kinds)]

    def wait(self, condition: Callable[[], Any], limit_s: float, what: str) -> Any:
        deadline = time.monotonic() + limit_s
        while not (value := condition()):
            if self._thread is not None and not self._thread.is_alive():
                raise AssertionError(f"the job ended before {what}: {self.error!r} {self.result!r}") from self.error
            assert time.monotonic() < deadline, f"waited {limit_s} s for {what}; events: {self.events()[-8:]}"
            time.sleep(0.05)
        return value

    def world(self) -> tuple[str, ...]:
        """Members of the generation that runs, or ()."""
        formed, running = self.events(ev.GenerationFormed), self.events(ev.GenerationRunning)
        ending = self.events(ev.GenerationEnding)
        if not running or formed[-1].generation != running[-1].generation:
            return ()
        if ending and ending[-1].generation == formed[-1].generation:
            return ()
        return tuple(formed[-1].members)

    def wait_world(self, size: int, limit_s: float = 150.0, steps: int = 5) -> tuple[str, ...]:
        """Until a world of ``size`` has committed some steps."""

        def ready() -> Any:
            world = self.world()
            if len(world) != size:
                return None
            generation = self.events(ev.GenerationRunning)[-1].generation
            done = [e for e in self.events(ev.StepsCommitted) if e.generation == generation]
            return world if sum(len(e.times) for e in done) >= steps else None

        return self.wait(ready, limit_s, f"a world of {size}")

    def wait_formed(self, size: int, limit_s: float = 150.0, since: float = 0.0) -> tuple[str, ...]:
        """Until a world of ``size`` has been formed after a loss or a leave (after the time ``since``), however short
        it lasts; its members."""

        def formed() -> Any:
            losses = (e.at for e in self.events(ev.WorkerLost, ev.WorkerLeft) if e.at >= since)
            gone = next(losses, float("inf"))
            worlds = [e for e in self.events(ev.GenerationFormed) if e.at >= gone and len(e.members) == size]
            return tuple(worlds[0].members) if worlds else None

        return self.wait(formed, limit_s, f"a world of {size} after a loss")

    def spawned(self, worker: str) -> ev.WorkerSpawned:
        return next(e for e in self.events(ev.WorkerSpawned) if e.worker == worker)

    # ------------------------------------------------------------------------------------------------- breaking

    def kill_worker(self, worker: str) -> None:
        os.kill(self.spawned(worker).pid, signal.SIGKILL)

    def kill_executor(self, worker: str) -> None:
        self.cluster.kill_executor(self.spawned(worker).executor)

    # ------------------------------------------------------------------------------------------------- checking

    def assert_counted(self, result: es.Result, epochs: int) -> None:
        """Each row once an epoch, by the weights and by the audit; equal parameters on all ranks at each step."""
        for value in result:
            if value is not None:
                assert_exact(value["w"], epochs)
        assert_agree(read_steps(self.steps_dir))
        figures = result.summary
        total = epochs * len(result[0]["w"])
        assert (figures["rows_once"], figures["rows_twice"], figures["rows_never"]) == (total, 0, 0)
        assert figures["rows_unexplained"] == 0

    def assert_no_orphans(self) -> None:
        """Within 10 s none of the processes that the job started lives."""
        pids = {event.pid for event in self.events(ev.WorkerSpawned)}

        def gone() -> bool:
            return not [pid for pid in pids if os.path.exists(f"/proc/{pid}") and not _is_zombie(pid)]

        self.cluster.wait_for(gone, 10.0, "the job's processes to end")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
