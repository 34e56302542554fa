"""The one vocabulary: every fact of a job, as a dataclass.

Facts are appended by the controller to one JSONL log (``result.events_path``). Metrics, tracking, progress and the
report read that log and nothing else, so every figure can be recomputed from it by anyone.

A line of the log is ``{"event": "<class name>", "at": <unix seconds, driver's clock>, ...fields}``. Unknown names and
fields are ignored on reading, so an older reader survives a newer log.

Words:

* *slot*: one single-task Spark job that wants to host a worker. *agent*: that task while it runs, ``a<n>``.
* *worker*: one Horovod process, ``w<n>``; ids are never used twice.
* *generation*: one Horovod world; ``members[r]`` is the worker with rank r.
* *step*: the job's count of committed optimizer steps, from 1. A roll-back sets it back.
* *offset*: a data set's count of global batches consumed within its epoch, from 0. Step s of an epoch takes offset s.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """A fact. ``at`` is unix seconds by the driver's clock."""

    at: float
    _classes: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Event._classes[cls.__name__] = cls


@dataclass(frozen=True, kw_only=True)
class JobStarted(Event):
    """A driver took up the job. ``resumed_from`` is the checkpoint it goes on from, ``config`` the resolved options.

    ``resumed_cursors[dataset] = (epoch, offset)`` is the next global batch after ``resumed_step``.
    """

    job_name: str
    job_id: str
    run_id: str
    num_proc: int
    min_num_proc: int
    max_num_proc: int
    resumed_from: str | None = None
    resumed_step: int = 0
    resumed_cursors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DatasetFrozen(Event):
    """A data set in its frozen order: ``steps_per_epoch`` batches of ``global_batch`` rows, the last of the rest.

    With the rows of each row group, from the manifest of that ``digest``, this is all that a `LanePlan` is made of.
    """

    dataset: str
    rows: int
    digest: str
    lanes: int
    seed: int
    global_batch: int
    steps_per_epoch: int
    row_groups: int
    shuffle: bool = True


@dataclass(frozen=True, kw_only=True)
class SlotEnded(Event):
    slot: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class AgentRegistered(Event):
    agent: str
    slot: int
    host: str
    executor: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class AgentLost(Event):
    agent: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class WorkerSpawned(Event):
    worker: str
    agent: str
    host: str
    executor: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class WorkerReady(Event):
    """The worker's process is warm: imports done, user function loaded."""

    worker: str
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """``cause`` is one of `LOSS_CAUSES`; ``detail`` says what was seen, ``tail`` holds the last lines of its output."""

    worker: str
    cause: str
    detail: str = ""
    exit_code: int | None = None
    tail: str = ""


#: Why a worker was lost.
LOSS_CAUSES = (
    "executor lost",
    "process died",
    "exited without returning",
    "frozen",
    "collective failed",
    "checkpoint unreadable",
    "did not reset",
    "did not start",
    "user error",
)


@dataclass(frozen=True, kw_only=True)
class WorkerDraining(Event):
    """The worker's host will go away: it leaves at its next commit. Not a failure."""

    worker: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerLeft(Event):
    """The worker left in good order: ``reason`` is ``draining``, ``done`` or ``not needed``."""

    worker: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LanesUnbalanced(Event):
    """Ownership of lanes does not fit the workers' speeds, ``rows_per_s``: a change of the world is asked for, after
    which it does. ``gain``: share of a step's time that this is expected to save."""

    generation: int
    rows_per_s: Mapping[str, float]
    gain: float


@dataclass(frozen=True, kw_only=True)
class GenerationEnding(Event):
    """The members of this generation are being gathered for the next one."""

    generation: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class GenerationFormed(Event):
    """A new world was decided. ``source`` (rank 0) holds the newest state, at ``step``; ``restored_from`` is set where
    nobody alive held state: the checkpoint that is loaded instead, or ``memory:WORKER`` where that worker has found a
    newer snapshot in the memory of its dead predecessor. ``lanes[dataset][r]`` are the lanes that rank r owns."""

    generation: int
    members: tuple[str, ...]
    joined: tuple[str, ...]
    lost: tuple[str, ...]
    left: tuple[str, ...]
    cause: str
    source: str
    step: int
    restored_from: str | None = None
    lanes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GenerationRunning(Event):
    """All members have initialised Horovod. ``seconds`` from formed to running."""

    generation: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepsCommitted(Event):
    """Steps ``first_step`` .. ``first_step + len(times) - 1``, committed in ``generation``.

    ``times[i]`` is the unix time of the commit of step ``first_step + i``; ``cursors[dataset] = (epoch, first_offset)``
    says that it consumed global batch ``first_offset + i`` of that epoch (one event never spans two epochs).
    ``rows`` is the number of rows that the workers report to have trained in these steps, over all ranks whose
    reports came in; ``missing`` ranks were lost before theirs did.

    ``wait_s`` is the time that these steps waited for data: of each step, that of the rank that waited longest.
    ``hashes[dataset]`` are 16 hexadecimal digits for each step: the hash (`core.order.row_hash`) of the ids of the rows
    that it trained, summed over the ranks; by plan where ranks are ``missing``.
    """

    generation: int
    first_step: int
    times: tuple[float, ...]
    cursors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rows: int = 0
    missing: int = 0
    wait_s: float = 0.0
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepsRolledBack(Event):
    """Committed steps after ``to_step`` up to ``from_step`` are undone: their rows will be trained again."""

    from_step: int
    to_step: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class MetricsReported(Event):
    """Numbers given to ``state.commit`` at ``step``: the mean over the ranks that reported."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class GuardAlarm(Event):
    """A committed value that is not finite, or that jumped after a change of the world; see `core.guard`.

    ``kind`` is ``not finite`` or ``jump``; ``suspect_from`` the first step whose state cannot be trusted; ``median``,
    ``mad`` and ``limit`` what the value (of a jump: the median of the last few) was held against.
    """

    generation: int
    step: int
    key: str
    kind: str
    value: float
    suspect_from: int
    median: float | None = None
    mad: float | None = None
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Event):
    step: int
    uri: str
    digest: str
    bytes: int
    seconds: float
    world_size: int


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """A save that was due and did not happen (slow or failing storage)."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRejected(Event):
    """A stored checkpoint that did not verify; the next older one is tried."""

    uri: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerOutput(Event):
    worker: str
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    message: str
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class UserFailed(Event):
    """The user's function raised on ``worker`` (rank ``rank``) at ``step``."""

    worker: str
    rank: int
    step: int
    error: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class JobFinished(Event):
    """``status`` is ``FINISHED``, ``FAILED`` or ``KILLED``."""

    status: str
    error: str = ""


def to_json(event: Event) -> str:
    """One line of the log, without the line feed; strict JSON: NaN and infinities are written as strings."""
    body: dict[str, Any] = {"event": type(event).__name__}
    for item in dataclasses.fields(event):
        body[item.name] = _plain(getattr(event, item.name))
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def from_json(line: str) -> Event | None:
    """The event of one line, or None where the line is torn or of a kind that this version does not know."""
    try:
        body = json.loads(line)
    except ValueError:
        return None
    cls = Event._classes.get(body.pop("event", "")) if isinstance(body, dict) else None
    if cls is None:
        return None
    known = {item.name for item in dataclasses.fields(cls)}
    try:
        return cls(**{name: _frozen(value) for name, value in body.items() if name in known})
    except TypeError:
        return None


def read_log(lines: Iterable[str]) -> Iterator[Event]:
    """The events of a log; torn and unknown lines are passed over."""
    for line in lines:
        event = from_json(line)
        if event is not None:
            yield event


def is_damaged(line: str) -> bool:
    """Whether a line of a log is torn, or none of a log at all; one of a newer version is not."""
    try:
        return not isinstance(json.loads(line), dict)
    except ValueError:
        return bool(line.strip())


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value
