"""The first 25 schedules of the fuzzer; and every seed that ever failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_spark.core import events as ev

from .schedule import Fault, Schedule, schedule
from .world import World, run_schedule

#: Seeds that broke an invariant once.
ONCE_FAILED: tuple[int, ...] = ()


@pytest.mark.parametrize("seed", [*range(25), *ONCE_FAILED])
def test_what_goes_wrong_leaves_every_invariant(seed: int, tmp_path: Path) -> None:
    run_schedule(schedule(seed), tmp_path / "world")


def test_all_workers_die_at_once_and_no_committed_step_is_lost(tmp_path: Path) -> None:
    """Nobody is left who holds the state; their successors find it in the executors' memory."""
    world = World(Schedule(0, 3, 3, 1, 60.0, (Fault(1.0, "kill_all_workers", 0, 0.0),)), tmp_path / "world")
    try:
        figures = world.run()
        restored = [event.restored_from for event in world.seen(ev.GenerationFormed) if event.restored_from]
        assert len(restored) == 1
        assert restored[0].startswith("memory:")
        assert figures["steps_lost"] == 0
        assert world.seen(ev.StepsRolledBack, ev.Warned, ev.CheckpointRejected) == []
    finally:
        world.close()


def test_a_seed_is_a_schedule() -> None:
    assert schedule(7) == schedule(7)
    assert len({schedule(seed).faults for seed in range(100)}) == 100
