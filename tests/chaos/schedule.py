"""Churn schedules: what goes wrong, and when. Pure and seeded: the same seed is the same schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: How often each kind of fault is drawn.
WEIGHTS = {
    "kill_worker": 5,
    "kill_executor": 3,
    "double_fault": 3,
    "kill_in_reset": 3,
    "kill_newcomer": 3,
    "kill_all_workers": 1,
    "kill_all_executors": 1,
    "freeze_worker": 1,
    "freeze_executor": 1,
    "drain": 2,
    "add_executor": 4,
    "pause_driver": 1,
}


@dataclass(frozen=True)
class Fault:
    """``after`` seconds after the one before it, ``kind`` happens to member number ``who`` (modulo the world's size).

    ``delay`` seconds: from the first to the second of a double fault, from the event that triggers it to a triggered
    one, or how long the driver stands still.
    """

    after: float
    kind: str
    who: int
    delay: float


@dataclass(frozen=True)
class Schedule:
    """``executors`` at the start, of which ``num_proc`` are in the world; the others are spares."""

    seed: int
    executors: int
    num_proc: int
    min_num_proc: int
    rpo_target_s: float
    faults: tuple[Fault, ...]


def schedule(seed: int) -> Schedule:
    """Three to eight faults, some in bursts of several within a second."""
    rng = random.Random(seed)
    num_proc = rng.choice((2, 3, 3, 3))
    faults = []
    burst = False
    for _ in range(rng.randint(3, 8)):
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        after = rng.uniform(0.0, 0.3) if burst else rng.uniform(0.3, 2.0)
        delay = rng.uniform(0.3, 6.0) if kind == "pause_driver" else rng.uniform(0.0, 0.3)
        faults.append(Fault(round(after, 3), kind, rng.randrange(6), round(delay, 3)))
        burst = rng.random() < 0.35
    return Schedule(
        seed=seed,
        executors=num_proc + rng.choice((0, 0, 1)),
        num_proc=num_proc,
        min_num_proc=rng.choice((1, 1, 2)),
        rpo_target_s=rng.choice((0.5, 10.0)),
        faults=tuple(faults),
    )
