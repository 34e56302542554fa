"""Slots on a real Spark: what becomes of those whose tasks fail before an agent comes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from elastic_spark.agent.main import Launch
from elastic_spark.driver import spark as spark_module
from elastic_spark.driver.spark import HOPELESS_FAILURES, SparkSlots


@pytest.fixture(scope="module")
def context():
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    yield session.sparkContext
    session.stop()


class Slots:
    """Two of them: the first one's task runs until the test ends if it is a ``good`` one, all others fail."""

    def __init__(self, context, folder: Path, monkeypatch, good: bool):
        def task(_launch, number):
            def run(_rows):
                with open(folder / f"slot-{number}", "a") as file:
                    file.write("x")
                while good and number == 0 and not (folder / "stop").exists():
                    time.sleep(0.05)
                raise OSError("this machine cannot host an agent")

            return run

        monkeypatch.setattr(spark_module, "SlotTask", task)
        monkeypatch.setattr(spark_module, "POLL_S", 0.05)
        self.folder, self.ended, self.faults = folder, [], []
        self.slots = SparkSlots(
            context,
            Launch(f"job-{good}", ("127.0.0.1", 1), b"", b""),
            2,
            on_draining=lambda executor, why: None,
            on_ended=lambda slot, why: self.ended.append((slot, why)),
            on_fault=lambda kind, why: self.faults.append((kind, why)),
        )
        self.slots.start()

    def wait_until(self, condition, limit_s=60.0):
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, (self.ended, self.faults)
            time.sleep(0.02)

    def stop(self):
        (self.folder / "stop").touch()
        self.slots.stop()


def test_a_machine_that_cannot_host_an_agent_does_not_end_a_job_that_runs_elsewhere(context, tmp_path, monkeypatch):
    run = Slots(context, tmp_path, monkeypatch, good=True)
    try:
        run.wait_until((tmp_path / "slot-0").exists)
        run.slots.agent_seen(0, "driver")
        run.wait_until(lambda: len(run.ended) > HOPELESS_FAILURES)
        assert run.faults == []
        assert {slot for slot, _ in run.ended} == {1}
        assert "this machine cannot host an agent" in run.ended[0][1]
    finally:
        run.stop()
    assert (tmp_path / "slot-0").read_text() == "x"


def test_it_is_tried_again_later_and_later():
    assert [spark_module._pause_s(failures) for failures in (1, 2, 3, 6, 7, 99)] == [0.5, 1.0, 2.0, 16.0, 30.0, 30.0]


def test_where_no_slot_gets_an_agent_the_job_ends(context, tmp_path, monkeypatch):
    run = Slots(context, tmp_path, monkeypatch, good=False)
    try:
        run.wait_until(lambda: run.faults)
    finally:
        run.stop()
    kind, why = run.faults[0]
    assert kind == "EnvironmentUnfit"
    assert f"every slot failed {HOPELESS_FAILURES} times" in why
    assert "this machine cannot host an agent" in why
