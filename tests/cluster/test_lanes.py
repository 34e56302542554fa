"""Lanes on real workers: who owns them, and what was consumed."""

from __future__ import annotations

import os
from typing import Any

from elastic_spark.core import events as ev
from elastic_spark.testing.counting import counting_data, read_steps, train_counting

from .conftest import Job


def test_a_slow_worker_gets_fewer_rows(job: Job) -> None:
    """One of three takes three times as long for a row; every row is trained once all the same."""
    slow, row_s = str(job.folder / "slow-worker"), 0.003

    def seconds(batch: Any) -> float:
        if not os.path.exists(slow):
            with open(slow, "a") as file:  # the first line is the slow one
                file.write(f"{os.getpid()}\n")
        with open(slow) as file:
            is_slow = int(file.readline() or 0) == os.getpid()
        return batch.rows * row_s * (3 if is_slow else 1)

    job.run(
        train_counting,
        kwargs={"rows": 1920, "epochs": 6, "log_dir": str(job.steps_dir), "step_s": seconds},
        data={"train": counting_data(job.spark, 1920)},
        global_batch=96,
    )
    fact = job.wait(lambda: job.events(ev.LanesUnbalanced), 100.0, "the speeds")[0]
    result = job.done()
    job.assert_counted(result, epochs=6)
    assert [(c["cause"], c["from_size"], c["to_size"]) for c in result.summary["changes"]] == [("uneven speed", 3, 3)]
    assert (result.summary["steps_lost"], job.events(ev.WorkerLost)) == (0, [])
    speeds = sorted(fact.rows_per_s.values())
    assert 2.0 <= speeds[1] / speeds[0] <= 4.0
    last = [step for step in read_steps(job.steps_dir) if step.step == result[0]["steps"] - 1]
    with open(slow) as file:
        slow_pid = int(file.readline())
    rows = {step.pid: step.rows for step in last}
    assert 8 <= rows.pop(slow_pid) <= 20
    assert all(38 <= n <= 44 for n in rows.values()), rows
