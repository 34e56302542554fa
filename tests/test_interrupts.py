"""Ctrl-C and SIGTERM at awkward moments: MLflow, the event log and the job file tell the same end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from elastic_spark.interrupts import Interrupts, Terminated

DRIVER = """
    import sys, time
    import elastic_spark as es
    from elastic_spark.runner import session

    def train(ctx):
        import horovod.torch as hvd
        import torch
        state = es.ElasticState(model=torch.nn.Linear(1, 1))

        @hvd.elastic.run
        def loop(state):
            while state.step < 3000:
                time.sleep(0.02)
                state.commit(loss=1.0)
        loop(state)

    session("local[1]", "interrupted", {})
    es.run(train, num_proc=1, work_dir="runs", job_name="job", tracking_uri="sqlite:///mlflow.db", experiment="e")
"""


FREEZES = """
    import pathlib, time
    import elastic_spark as es
    from elastic_spark.runner import session

    def slow(rows):
        pathlib.Path("freezing").touch()
        time.sleep(600)
        yield from rows

    spark = session("local[1]", "interrupted", {})
    data = {"train": spark.range(9).mapInPandas(slow, "id long")}
    try:
        es.run(lambda: 1, num_proc=1, data=data, work_dir="runs", job_name="job", tracking=False)
    finally:
        print("cores:", spark.sparkContext.parallelize([1]).getNumPartitions())
        spark.stop()
"""

LEFT = """
    import os
    import elastic_spark as es
    from elastic_spark import conduct
    from elastic_spark.runner import session

    def train():
        import time
        time.sleep(600)

    session("local[1]", "left", {})
    conduct.HANGS_S = 1.0
    options = {"tracking_uri": "sqlite:///mlflow.db", "experiment": "e", "elastic_timeout": 1.0}
    try:
        es.run(train, num_proc=1, work_dir="runs", job_name="job", **options)
    except es.errors.NotEnoughWorkers as error:
        print("NotEnoughWorkers:", error, flush=True)
        os._exit(3)
"""


class Driver:
    """A job in a process of its own, in ``folder``."""

    def __init__(self, folder: Path, code: str = DRIVER) -> None:
        self.folder, self.log = folder, folder / "runs" / "job" / "events.jsonl"
        self._out = open(folder / "out.txt", "w")  # noqa: SIM115
        env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        command = [sys.executable, "-c", textwrap.dedent(code)]
        self.process = subprocess.Popen(command, cwd=folder, stdout=self._out, stderr=self._out, env=env)

    def wait_for(self, event: str) -> None:
        self.wait_until(lambda: self.log.exists() and f'"event":"{event}"' in self.log.read_text().replace(" ", ""))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, (self.folder / "out.txt").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def fact(self, event: str) -> dict[str, Any]:
        return next(item for item in map(json.loads, self.log.read_text().splitlines()) if item["event"] == event)

    def newest(self, event: str) -> dict[str, Any]:
        """The newest event of a kind."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["event"] == event][-1]

    def told(self) -> tuple[str, str, str]:
        """The status by the event log, by MLflow and by the job file; the process has ended."""
        self.process.wait(60)
        last = json.loads(self.log.read_text().splitlines()[-1])
        client = MlflowClient(f"sqlite:///{self.folder}/mlflow.db")
        (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
        assert run.info.end_time is not None
        assert last["event"] == "JobFinished"
        return last["status"], run.info.status, self.job_file()["status"]

    def job_file(self) -> dict[str, Any]:
        (path,) = (self.folder / "runs").rglob("job-*.json")
        content: dict[str, Any] = json.loads(path.read_text())
        return content


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    running = Driver(tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


def test_sigterm_as_soon_as_the_run_is_there(driver: Driver) -> None:
    driver.wait_for("JobStarted")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.told() == ("KILLED", "KILLED", "KILLED")
    assert "JobCancelled: terminated by SIGTERM" in (driver.folder / "out.txt").read_text()


def test_sigterm_while_spark_freezes_the_data(tmp_path: Path) -> None:
    """py4j waits for Spark's answer in the main thread."""
    driver = Driver(tmp_path, FREEZES)
    try:
        driver.wait_until((tmp_path / "freezing").exists)
        driver.process.send_signal(signal.SIGTERM)
        driver.process.wait(60)
    finally:
        driver.process.kill()
        driver.process.wait()
    output = (tmp_path / "out.txt").read_text()
    assert "JobCancelled: terminated by SIGTERM" in output
    assert "cores: 1" in output, "Spark's next answer is that to the next question"
    assert driver.job_file()["status"] == "KILLED"


def test_a_jvm_that_stands_still_does_not_keep_the_job_from_its_end(tmp_path: Path) -> None:
    driver = Driver(tmp_path, LEFT)
    jvm: psutil.Process | None = None
    try:
        driver.wait_for("GenerationRunning")
        (jvm,) = (child for child in psutil.Process(driver.process.pid).children() if child.name() == "java")
        jvm.suspend()
        psutil.Process(driver.fact("AgentRegistered")["pid"]).kill()
        assert driver.told() == ("FAILED", "FAILED", "FAILED")
    finally:
        driver.process.kill()
        driver.process.wait()
        if jvm is not None:
            jvm.kill()
    output = (tmp_path / "out.txt").read_text()
    assert "NotEnoughWorkers:" in output
    assert "Spark does not say how many cores there are (no answer within" in output


def test_ctrl_c_three_times(driver: Driver) -> None:
    driver.wait_for("StepsCommitted")
    for _ in range(3):
        driver.process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # a person's fingers
    assert driver.told() == ("KILLED", "KILLED", "KILLED")
    assert (driver.folder / "out.txt").read_text().rstrip().endswith("KeyboardInterrupt")


def test_what_was_committed_before_sigterm_is_in_a_checkpoint(driver: Driver) -> None:
    """Its newest one would be of some step of the last ten seconds, or there would be none yet."""
    driver.wait_for("StepsCommitted")
    deadline = time.monotonic() + 60.0
    while (before := driver.newest("StepsCommitted"))["first_step"] < 30:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.told() == ("KILLED", "KILLED", "KILLED")
    saved, last = driver.newest("CheckpointWritten")["step"], driver.newest("StepsCommitted")
    assert before["first_step"] + len(before["times"]) - 1 <= saved <= last["first_step"] + len(last["times"]) - 1


def test_first_it_raises_then_it_cancels_then_it_waits() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    whys: list[str] = []
    with Interrupts() as interrupts:
        interrupts.check()
        with pytest.raises(Terminated, match="terminated by SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Terminated):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.cancel_by(whys.append)
        assert whys == ["interrupted by Ctrl-C"], "it had come before"
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        interrupts.hold()
        signal.raise_signal(signal.SIGTERM)
    assert whys[1:] == ["terminated by SIGTERM", "interrupted by Ctrl-C"]
    assert interrupts.interrupted
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_foreign_code_does_not_take_a_signal_for_an_error_of_its_own() -> None:
    with pytest.raises(Terminated, match="by SIGTERM"), Interrupts(), contextlib.suppress(Exception):
        signal.raise_signal(signal.SIGTERM)


def test_in_another_thread_signals_are_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), list[Any]()

    def body() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]
