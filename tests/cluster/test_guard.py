"""NaN in the middle of the training: the guard takes the job back to a checkpoint of before; all rows count once."""

from __future__ import annotations

import os
from typing import Any

from elastic_spark.core import events as ev
from elastic_spark.testing.counting import assert_exact

from .conftest import Job

EPOCHS = 4


def poison_once(job: Job) -> Any:
    """Each rank's weights become NaN after the next step, once, as soon as ``armed`` is there."""
    folder = str(job.folder)

    def on_step(state: Any) -> None:
        import horovod.torch as hvd

        struck = f"{folder}/struck-{hvd.rank()}"
        if os.path.exists(f"{folder}/armed") and not os.path.exists(struck):
            open(struck, "w").close()
            state.model["w"].data.fill_(float("nan"))

    return on_step


def test_nan_is_rolled_back_to_the_last_good_checkpoint(job: Job) -> None:
    options: dict[str, Any] = {"num_proc": 2, "rpo_target_s": 1.0, "ckpt_budget": 1.0, "guard": "rollback"}
    job.count(epochs=EPOCHS, on_step=poison_once(job), **options)
    job.wait_world(2)
    job.wait(lambda: job.events(ev.CheckpointWritten), 100.0, "a checkpoint")
    (job.folder / "armed").touch()
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
