"""What will happen to a cluster, and when: a schedule of blows that a seed alone decides. Pure.

A blow is timed by committed steps, not by seconds, so that it lands in training on machines of any speed; and it names
no victim but a place among those that are there when it falls. Two machines are left at any time: as long as a world of
two is hit by one blow at a time, one of its workers survives, and no committed step may be lost, unless that one has
just come and has not received the state yet.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from elastic_spark.errors import ConfigError

#: What may happen, and what it does to the number of machines.
KINDS = {
    "kill worker": 0,  # kill -9 of a Horovod process
    "kill executor": 0,  # kill -9 of its executor; Spark starts another on the same machine
    "remove machine": -1,  # everything on it, at once
    "decommission": -1,  # a spot notice: the worker leaves at its next commit
    "add machine": +1,
}
LEAST_MACHINES = 2


@dataclass(frozen=True)
class Blow:
    """``kind`` falls ``after_steps`` committed steps after the one before, on the victim at ``pick`` (0 .. 1)."""

    kind: str
    after_steps: int
    pick: float


def schedule(seed: int, blows: int, machines: int, most: int, mean_steps: int = 20) -> tuple[Blow, ...]:
    """``blows`` blows on a cluster of ``machines``, which never become fewer than 2 or more than ``most``.

    Of the kinds that the number of machines allows, one that came least often comes next. The gaps are uniform on
    ``mean_steps / 2 .. 3 * mean_steps / 2``, at least 1. The same arguments give the same schedule, everywhere.

    Raises:
        ConfigError: no such schedule.
    """
    if not LEAST_MACHINES <= machines <= most or blows < 0 or mean_steps < 1:
        raise ConfigError(
            f"churn of {blows} blows each {mean_steps} steps on {machines} machines of at most {most}: it needs at "
            f"least {LEAST_MACHINES} machines, no more than the most, and a step between two blows"
        )
    draw = random.Random(seed)
    out: list[Blow] = []
    came: Counter[str] = Counter()
    for _ in range(blows):
        allowed = [kind for kind, change in KINDS.items() if LEAST_MACHINES <= machines + change <= most]
        fewest = min(came[kind] for kind in allowed)
        kind = draw.choice([kind for kind in allowed if came[kind] == fewest])
        came[kind] += 1
        machines += KINDS[kind]
        out.append(Blow(kind, max(1, round(mean_steps * draw.uniform(0.5, 1.5))), draw.random()))
    return tuple(out)
