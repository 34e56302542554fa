"""What can be asked of the controller."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_spark.core import events as ev
from elastic_spark.core.job.state import Ended


@dataclass(frozen=True)
class Effect:
    """Something to do."""


@dataclass(frozen=True)
class Record(Effect):
    event: ev.Event


@dataclass(frozen=True)
class Spawn(Effect):
    agent: str
    worker: str


@dataclass(frozen=True)
class Kill(Effect):
    """Make sure that this worker's process is gone: it may be frozen, or cut off."""

    worker: str
    agent: str


@dataclass(frozen=True)
class Release(Effect):
    """End the agent's task; its slot is asked for again elsewhere."""

    agent: str
    reason: str


@dataclass(frozen=True)
class Dismiss(Effect):
    """The worker is told to leave in good order."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Notify(Effect):
    """Announce a change: members leave their world at the next commit."""

    workers: tuple[str, ...]


@dataclass(frozen=True)
class BreakGeneration(Effect):
    """Cancel the generation's rendezvous and break the stuck collectives of ``workers``."""

    generation: int
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Form(Effect):
    """Open the next generation. ``step`` is what rank 0 holds; with ``restore`` nobody holds anything that counts: rank
    0 can bring step ``found`` back from memory (-1: nobody can), or it starts from a checkpoint, with ``before`` from a
    good one of a step below that. ``sole_holder``: rank 0 is the only one that holds what the others are to receive."""

    generation: int
    members: tuple[str, ...]
    joined: tuple[str, ...]
    lost: tuple[str, ...]
    left: tuple[str, ...]
    cause: str
    step: int
    restore: bool
    found: int = -1
    before: int | None = None
    sole_holder: bool = False


@dataclass(frozen=True)
class SaveNow(Effect):
    """All members will go away, or the job ends: write a checkpoint at once."""

    worker: str


@dataclass(frozen=True)
class End(Effect):
    ended: Ended
