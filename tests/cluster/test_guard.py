"""NaN in the middle of the training: the guard takes the job back to a checkpoint of before; all rows count once."""

from __future__ import annotations

import os
from typing import Any

import pytest

from elastic_spark.core import events as ev
from elastic_spark.errors import GuardStopped
from elastic_spark.testing.counting import assert_exact

from .conftest import Job

EPOCHS = 4


def poison(job: Job, *, often: bool) -> Any:
    """Each rank's weights become NaN after the next step, once or again and again, as soon as ``armed`` is there."""
    folder = str(job.folder)

    def on_step(state: Any) -> None:
        import horovod.torch as hvd

        struck = f"{folder}/struck-{hvd.rank()}"
        if os.path.exists(f"{folder}/armed") and (often or not os.path.exists(struck)):
            open(struck, "w").close()
            state.model["w"].data.fill_(float("nan"))

    return on_step


def start(job: Job, *, often: bool, **options: Any) -> ev.CheckpointWritten:
    """A job that is poisoned once its first checkpoint is there."""
    job.count(epochs=EPOCHS, on_step=poison(job, often=often), num_proc=2, rpo_target_s=1.0, ckpt_budget=1.0, **options)
    job.wait_world(2)
    written: ev.CheckpointWritten = job.wait(lambda: job.events(ev.CheckpointWritten), 100.0, "a checkpoint")[0]
    (job.folder / "armed").touch()
    return written


def test_nan_is_rolled_back_to_the_last_good_checkpoint(job: Job) -> None:
    start(job, often=False, guard="rollback")
    job.wait(lambda: any(e.cause.startswith("guard") for e in job.events(ev.GenerationFormed)), 60.0, "the way back")
    result = job.done()
    (alarm,) = job.events(ev.GuardAlarm)
    assert (alarm.kind, alarm.key, str(alarm.value)) == ("not finite", "loss", "nan")
    (formed,) = [e for e in job.events(ev.GenerationFormed) if e.restored_from]
    assert formed.cause == f"guard: loss is nan at step {alarm.step}"
    assert formed.joined == formed.lost == ()
    good = {e.uri: e.step for e in job.events(ev.CheckpointWritten)}
    assert good[formed.restored_from] == formed.step < alarm.step
    for value in result:
        assert_exact(value["w"], EPOCHS)
    figures = result.summary
    assert (figures["rows_once"], figures["rows_twice"], figures["rows_never"]) == (EPOCHS * 1200, 0, 0)
    assert figures["guard_alarms"] == [f"loss is nan at step {alarm.step}"]
    assert figures["steps_lost"] > 0
    job.assert_no_orphans()


def test_nan_that_comes_again_stops_the_job_after_so_many_roll_backs(job: Job) -> None:
    start(job, often=True, guard="rollback", guard_rollbacks=1)
    with pytest.raises(GuardStopped, match=r"loss is nan at step \d+; the job has been rolled back 1 times already"):
        job.done()
    assert len([e for e in job.events(ev.GenerationFormed) if e.restored_from]) == 1
    assert job.events(ev.JobFinished)[-1].status == "FAILED"
