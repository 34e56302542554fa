"""A finished job goes on from a step, from an MLflow model and from its run; a start that does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

import elastic_spark as es
from elastic_spark.core import events as ev
from elastic_spark.errors import JobCancelled, ResumeRefused
from elastic_spark.testing.counting import assert_agree, assert_exact, read_steps

from .conftest import ROWS, Job

EPOCHS = 3


def test_from_a_step_a_model_and_a_run(job: Job) -> None:
    uri = f"sqlite:///{job.folder}/mlflow.db"
    options: dict[str, Any] = {"tracking": True, "tracking_uri": uri, "experiment": "resume", "keep_checkpoints": 50}
    options |= {"rpo_target_s": 0.5, "ckpt_budget": 1.0}
    job.count(EPOCHS, num_proc=2, **options)
    job.wait(lambda: len(job.events(ev.CheckpointWritten)) >= 3, 100.0, "three checkpoints")
    first = job.done()
    saved = job.events(ev.CheckpointWritten)

    with pytest.raises(ResumeRefused, match=r"'train': seed 1 now, 0 there \(give the checkpoint's\)"):
        again(job, resume=saved[1].step, seed=1, **options)

    result = again(job, resume=saved[1].step, num_proc=3, **options)
    check(result, first, saved[1])
    assert result.summary["world_sizes"][-1][1] == 3
    assert result.summary["steps_lost"] == saved[-1].step - saved[1].step, "of the history that was left"

    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "resume"]
    models = {m.params["uri"]: m.model_id for m in client.search_logged_models([experiment.experiment_id])}
    result = again(job, resume=models[saved[2].uri], job_name=None, num_proc=1, **options)
    check(result, first, saved[2])

    newest = job.events(ev.CheckpointWritten)[-1]
    result = again(job, resume=first.run_id, job_name=None, num_proc=1, **options)
    check(result, first, newest)
    assert_agree(read_steps(job.steps_dir))
    assert len(client.search_runs([experiment.experiment_id])) == 1
    run = client.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["elastic.resumed_from"] == newest.uri


def test_a_corrupt_newest_checkpoint_is_passed_over_with_the_reason(job: Job) -> None:
    options: dict[str, Any] = {"num_proc": 2, "rpo_target_s": 0.5, "ckpt_budget": 1.0, "keep_checkpoints": 50}
    job.count(EPOCHS, **options)
    job.wait(lambda: len(job.events(ev.CheckpointWritten)) >= 2, 100.0, "two checkpoints")
    job.spark.sparkContext.cancelAllJobs()
    job.wait_end()
    assert isinstance(job.error, JobCancelled)
    before, newest = job.events(ev.CheckpointWritten)[-2:]
    state = Path(newest.uri) / "state.safetensors"
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)

    result = again(job, **options)
    rejected = {event.uri: event.reason for event in job.events(ev.CheckpointRejected)}
    # A write that the end of the job cut short may be passed over too.
    assert "state.safetensors" in rejected[newest.uri]
    assert before.uri not in rejected
    assert result.summary["resumed_from"] == before.uri
    assert_exact(result[0]["w"], EPOCHS)


def again(job: Job, **options: Any) -> es.Result:
    job.result = job.error = None
    job.count(EPOCHS, **options)
    return job.done()


def check(result: es.Result, first: es.Result, begun: ev.CheckpointWritten) -> None:
    """It went on from there, in the same run, and each row counts once in the history that is left."""
    assert result.summary["resumed_from"] == begun.uri
    assert result.run_id == first.run_id
    assert_exact(result[0]["w"], EPOCHS)
    figures = result.summary
    assert (figures["rows_once"], figures["rows_twice"], figures["rows_never"]) == (EPOCHS * ROWS, 0, 0)
