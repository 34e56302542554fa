"""The driver dies, or is told to go; a second submit goes on in the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from pyspark import SparkContext

from elastic_spark.checkpoint import CheckpointStore
from elastic_spark.core import events as ev
from elastic_spark.testing import StandaloneCluster
from elastic_spark.testing.counting import assert_agree, assert_exact, read_steps
from elastic_spark.testing.session import bounded

SCRIPT = Path(__file__).parent / "counting_job.py"
ROWS, EPOCHS = 1200, 6


class Submitted:
    """A driver of its own, by spark-submit."""

    def __init__(self, cluster: StandaloneCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.events_path = folder / "runs" / "job" / "events.jsonl"
        self.process: subprocess.Popen[Any] | None = None
        (folder / "steps").mkdir()
        (folder / "slow").touch()

    def submit(self) -> None:
        self.process = self.cluster.spark_submit(
            SCRIPT,
            *(str(self.folder), str(ROWS), str(EPOCHS)),
            conf={"spark.cores.max": "2"},
            stdout=open(self.folder / "driver.txt", "a"),  # noqa: SIM115
            stderr=subprocess.STDOUT,
        )

    def events(self, *kinds: type[ev.Event]) -> list[Any]:
        if not self.events_path.exists():
            return []
        with self.events_path.open(encoding="utf-8") as lines:
            return [event for event in ev.read_log(lines) if isinstance(event, kinds)]

    def wait_checkpoint(self, after: int = 0) -> None:
        def there() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"the driver ended: {(self.folder / 'driver.txt').read_text()[-3000:]}"
            return len(self.events(ev.CheckpointWritten)) > after

        self.cluster.wait_for(there, 200.0, "a checkpoint")

    def driver_pid(self) -> int:
        """The Python driver: the child of spark-submit's JVM that runs the script."""
        for process in self.cluster.processes():
            if str(SCRIPT) in process.command and "python" in process.command.split()[0]:
                return process.pid
        raise AssertionError("no driver")

    def worker_pids(self) -> set[int]:
        return {event.pid for event in self.events(ev.WorkerSpawned)}

    def assert_gone(self, pids: set[int]) -> None:
        self.cluster.wait_for(lambda: not [p for p in pids if os.path.exists(f"/proc/{p}")], 10.0, "the workers to end")

    def run(self) -> Any:
        client = MlflowClient(f"sqlite:///{self.folder}/mlflow.db")
        experiment = client.get_experiment_by_name("counting")
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id])
        assert len(runs) == 1
        return runs[0]


@pytest.fixture(scope="module")
def free_cluster(cluster: StandaloneCluster) -> StandaloneCluster:
    """Without the session that holds its cores: each submit brings an application of its own."""
    context = SparkContext._active_spark_context
    if context is not None:
        bounded(context.stop, 20.0)
    return cluster


@pytest.fixture
def submitted(free_cluster: StandaloneCluster, tmp_path: Path) -> Iterator[Submitted]:
    job = Submitted(free_cluster, tmp_path)
    yield job
    if job.process is not None and job.process.poll() is None:
        job.process.kill()
        job.process.wait()


def test_a_driver_that_is_terminated_twice_and_killed_is_resumed_each_time(submitted: Submitted) -> None:
    """By SIGTERM with its JVM and alone, then by kill -9: all of it is one run."""
    terminate(submitted, with_its_jvm=True)
    terminate(submitted, with_its_jvm=False)
    run = submitted.run()

    submitted.submit()
    submitted.wait_checkpoint(after=len(submitted.events(ev.CheckpointWritten)))
    workers, driver = submitted.worker_pids(), submitted.driver_pid()
    os.kill(driver, signal.SIGKILL)
    submitted.assert_gone(workers)
    assert submitted.run().info.status == "RUNNING"
    assert submitted.process is not None
    submitted.process.wait(timeout=90)

    (submitted.folder / "slow").unlink()
    submitted.submit()
    assert submitted.process.wait(timeout=200) == 0
    story = json.loads((submitted.folder / "result.json").read_text())
    assert_exact(story["w"], EPOCHS)
    assert_agree(read_steps(submitted.folder / "steps"))
    assert story["run_id"] == run.info.run_id == submitted.run().info.run_id
    assert submitted.run().info.status == "FINISHED"
    summary = story["summary"]
    assert summary["resumed_from"] in {event.uri for event in submitted.events(ev.CheckpointWritten)}
    assert (summary["rows_twice"], summary["rows_never"]) == (0, 0)
    # A killed driver may take the log lines of its last step along; the checkpoint holds the step all the same.
    assert summary["rows_once"] + summary["rows_inherited"] == ROWS * EPOCHS
    assert summary["rows_inherited"] <= 10 * 24
    history = MlflowClient(f"sqlite:///{submitted.folder}/mlflow.db").get_metric_history(story["run_id"], "loss")
    assert len({point.step for point in history}) >= summary["steps"] - summary["rows_inherited"] // 24


def terminate(submitted: Submitted, *, with_its_jvm: bool) -> None:
    """Submit, and end it in good order once it has written a checkpoint: nothing is left, and it says so."""
    submitted.submit()
    submitted.wait_checkpoint(after=len(submitted.events(ev.CheckpointWritten)))
    workers = submitted.worker_pids()
    assert submitted.process is not None
    if with_its_jvm:
        os.killpg(submitted.process.pid, signal.SIGTERM)
    else:
        os.kill(submitted.driver_pid(), signal.SIGTERM)
    submitted.assert_gone(workers)
    assert submitted.process.wait(timeout=120) != 0
    # where its JVM was told, too, that has ended before the driver, which has the rest of its 30 s
    submitted.cluster.wait_for(lambda: submitted.run().info.status == "KILLED", 20.0, "the driver's last word")
    assert submitted.events(ev.JobFinished)[-1].status == "KILLED"


def test_a_driver_that_was_stopped_for_longer_than_its_lease_harms_nothing_when_it_wakes_up(
    submitted: Submitted,
) -> None:
    """Another one has taken the job meanwhile, on the same machine; the first one's workers had gone on without it."""
    added = submitted.cluster.add_worker()  # the stopped application keeps its own two
    submitted.submit()
    submitted.wait_checkpoint()
    first, driver = submitted.process, submitted.driver_pid()
    assert first is not None
    os.kill(driver, signal.SIGSTOP)
    try:
        submitted.submit()
        submitted.wait_checkpoint(after=len(submitted.events(ev.CheckpointWritten)))
    finally:
        os.kill(driver, signal.SIGCONT)
    assert first.wait(timeout=60) != 0
    (submitted.folder / "slow").unlink()
    assert submitted.process is not None
    assert submitted.process.wait(timeout=200) == 0
    submitted.cluster.remove_worker(added)
    story = json.loads((submitted.folder / "result.json").read_text())
    assert_exact(story["w"], EPOCHS)
    summary = story["summary"]
    assert (summary["rows_twice"], summary["rows_never"]) == (0, 0)
    assert (len(submitted.events(ev.JobStarted)), len(submitted.events(ev.JobFinished))) == (2, 1)
    assert submitted.events(ev.WorkerLost) == []
    (unpublished,) = submitted.events(ev.CheckpointRejected)
    assert "more" in unpublished.reason, "one line for all of them"
    assert submitted.run().info.status == "FINISHED"
    store = CheckpointStore(str(Path(summary["checkpoints"][-1]["uri"]).parent))
    told = {event.uri for event in submitted.events(ev.CheckpointWritten)}
    assert {item.uri for item in store.list()} <= told, "what the first one's workers wrote is no checkpoint"
