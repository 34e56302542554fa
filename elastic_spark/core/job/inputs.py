"""What can happen to a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Input:
    """Something that happened."""


@dataclass(frozen=True)
class AgentUp(Input):
    agent: str
    slot: int
    host: str
    executor: str


@dataclass(frozen=True)
class AgentDown(Input):
    agent: str
    cause: str


@dataclass(frozen=True)
class AgentHeard(Input):
    agent: str


@dataclass(frozen=True)
class WorkerUp(Input):
    """The worker's process has connected."""

    worker: str


#: `WorkerDown.cause` of a rank 0 that could not load the checkpoint that its world was to start from.
UNREADABLE = "checkpoint unreadable"
#: Cause of the loss of a worker that waits for storage, of which nothing comes.
STALLED = "storage stalled"


@dataclass(frozen=True)
class WorkerDown(Input):
    worker: str
    cause: str
    detail: str = ""
    exit_code: int | None = None
    tail: str = ""


@dataclass(frozen=True)
class Ready(Input):
    """``step``: that of the snapshot which its predecessor on the executor left in memory, -1 where there is none;
    ``generation``: the one in which that was made."""

    worker: str
    step: int = -1
    generation: int = 0


@dataclass(frozen=True)
class Heard(Input):
    """A sign of life. ``where`` says what the worker is doing, for the watchdog; ``waits``: seconds since it has been
    waiting in the collective that it waits in now; ``stalled``: seconds since anything came of what it waits for
    elsewhere, as data; None where that is not told."""

    worker: str
    where: str = ""
    waits: float | None = None
    stalled: float | None = None


@dataclass(frozen=True)
class Initialised(Input):
    worker: str
    generation: int


#: `Asked.reason` of a member that was notified, and leaves its world on purpose.
ASKED_ON_PURPOSE = "reset"


@dataclass(frozen=True)
class Asked(Input):
    """A member wants its next assignment.

    ``step``: the newest committed step it holds (consistently), -1 where it holds or tells none. ``reason``: "reset",
    "collective failed" or "init failed".
    """

    worker: str
    generation: int
    step: int
    reason: str
    error: str = ""


@dataclass(frozen=True)
class Finished(Input):
    """The user's function has returned."""

    worker: str


@dataclass(frozen=True)
class UserError(Input):
    """The user's function has raised, ``at`` unix seconds by the worker's clock. ``kind``: the name of the exception
    class that the job ends with."""

    worker: str
    step: int
    at: float
    error: str
    traceback: str
    kind: str = "UserCodeFailed"


@dataclass(frozen=True)
class Draining(Input):
    """The executor will go away; its workers leave at their next commit."""

    executor: str
    reason: str


@dataclass(frozen=True)
class Unbalanced(Input):
    """The workers' speeds call for other owners of lanes: the same world is to be formed anew."""

    generation: int


@dataclass(frozen=True)
class Reading(Input):
    """The checkpoint that ``generation`` starts from is still being read: nobody has a place in it yet."""

    generation: int


@dataclass(frozen=True)
class Alarmed(Input):
    """The guard does not trust the state from step ``suspect_from`` on, in a world of ``generation``."""

    generation: int
    suspect_from: int
    why: str


@dataclass(frozen=True)
class Fault(Input):
    """Something that ends the job: ``kind`` is the name of the exception class."""

    kind: str
    error: str


@dataclass(frozen=True)
class Cancel(Input):
    """The job is to end, as soon as what it holds is safe; asked for again: at once."""

    error: str
    kind: str = "JobCancelled"


@dataclass(frozen=True)
class Tick(Input):
    """Time has passed. ``committed``: the newest committed step; ``durable``: the newest one that a checkpoint holds;
    None: as it was."""

    committed: int | None = None
    durable: int | None = None
