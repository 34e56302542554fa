"""The first 25 schedules of the fuzzer; and every seed that ever failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .schedule import schedule
from .world import run_schedule

#: Seeds that broke an invariant once.
ONCE_FAILED: tuple[int, ...] = ()


@pytest.mark.parametrize("seed", [*range(25), *ONCE_FAILED])
def test_what_goes_wrong_leaves_every_invariant(seed: int, tmp_path: Path) -> None:
    run_schedule(schedule(seed), tmp_path / "world")


def test_a_seed_is_a_schedule() -> None:
    assert schedule(7) == schedule(7)
    assert len({schedule(seed).faults for seed in range(100)}) == 100
