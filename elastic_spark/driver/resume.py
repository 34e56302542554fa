"""What a job starts from when ``resume`` names it: looked up, read in full, and only then taken.

``latest``: the newest valid checkpoint of the job of this name, whatever its end. A step: that checkpoint of it. A URI:
that checkpoint, of whatever job. An MLflow run or model: what the tracking store knows of it, see `Tracked`.

All but ``latest`` begin a *branch*: the job goes on under a new id, which its record notes together with the checkpoint
it began from. So what was written after that checkpoint stays where it is and is never taken for the newest of the
branch, and a driver that dies before the first new checkpoint begins from the same one again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from elastic_spark.checkpoint import Checkpoint, CheckpointStore, Rejected, commands
from elastic_spark.config import JobConfig
from elastic_spark.driver.jobfile import JobFile, JobRecord
from elastic_spark.errors import CheckpointInvalid, ConfigError

_TRACKED = re.compile(r"(?:m-)?[0-9a-f]{32}")


@dataclass(frozen=True)
class Tracked:
    """What MLflow knows of a run or model: ``uri`` of its checkpoint (of a run: the newest), the job, the run."""

    uri: str
    job_name: str
    job_id: str
    run_id: str
    is_run: bool


@dataclass(frozen=True)
class Start:
    """Where a job begins. ``checkpoint`` None: wherever its record says. ``run_id``: of the run to go on with, if any.
    ``again``: the job is taken up although it has finished."""

    job_name: str | None
    checkpoint: Checkpoint | None = None
    rejected: list[Rejected] = field(default_factory=list)
    run_id: str = ""
    again: bool = False


def store_uri(settings: JobConfig, job_name: str) -> str:
    """Where the checkpoints of a job are."""
    if settings.checkpoint_uri:
        return f"{settings.checkpoint_uri.rstrip('/')}/{job_name}"
    return str(Path(settings.work_dir).absolute() / job_name / "checkpoints")


def find_start(settings: JobConfig, look_up: Callable[[str], Tracked]) -> Start:
    """What ``settings.resume`` means. ``look_up`` asks MLflow about the id of a run or model.

    Raises:
        ConfigError: no such job, run or model, or one without a checkpoint.
        CheckpointInvalid: no such checkpoint, or one that does not verify; the message says what there is.
    """
    which, name = settings.resume, settings.job_name
    if which is None:
        return Start(name)
    which = str(which)
    if _TRACKED.fullmatch(which):
        return _from_tracking(which, look_up(which), name)
    if "/" in which:
        store, only = commands.locate(which)
        if only is None:
            raise ConfigError(f"resume={which!r}: a URI must be that of one checkpoint, .../step-<12 digits>-<token>")
        return Start(name, _verified(store, only))
    if name is None:
        raise ConfigError(f"resume={which!r} is about a job: give its job_name")
    uri = store_uri(settings, name)
    require_job(uri, name)
    if which == "latest":
        return Start(name, again=True)
    if not which.isdecimal():
        raise ConfigError(
            f"resume={which!r}: 'latest', a step, a checkpoint's URI, or the id of an MLflow run or model"
        )
    return Start(name, _verified(CheckpointStore(uri), which), again=True)


def require_job(uri: str, name: str) -> JobRecord:
    """The record of a job; raises ConfigError where there is none."""
    record = JobFile(uri, lambda why: None).read()
    if record is None:
        raise ConfigError(f"there is no job {name!r} at {uri}: is checkpoint_uri, or work_dir, the same?")
    return record


def _verified(store: CheckpointStore, which: str) -> Checkpoint:
    checkpoint = commands.pick(store, which)[0]
    store.verify(checkpoint)
    return checkpoint


def _from_tracking(which: str, tracked: Tracked, name: str | None) -> Start:
    """The newest valid checkpoint of a run, the very one of a model. The same job goes on in the same run."""
    store, only = commands.locate(tracked.uri)
    if only is None:
        raise ConfigError(f"resume={which!r}: {tracked.uri!r} is no checkpoint of elastic_spark")
    checkpoint, rejected = store.newest_valid(tracked.job_id) if tracked.is_run else (None, [])
    if checkpoint is None:  # of a run: it was resumed itself, and ended before it wrote one of its own
        try:
            checkpoint = _verified(store, only)
        except CheckpointInvalid as error:
            reasons = "; ".join([str(error), *(item.reason for item in rejected)])
            raise CheckpointInvalid(f"resume={which!r}: {reasons}; {_there(store)}") from error
    name = name or tracked.job_name
    return Start(name, checkpoint, rejected, tracked.run_id if name == tracked.job_name else "", again=True)


def _there(store: CheckpointStore) -> str:
    steps = ", ".join(str(item.step) for item in store.list()) or "none"
    return f"{store.uri} holds checkpoints of steps: {steps}"


def base_of(record: JobRecord) -> Checkpoint | None:
    """What a branch began from, read in full; None where the job began from nothing."""
    if not record.base:
        return None
    store, only = commands.locate(record.base)
    return _verified(store, only or "latest")
