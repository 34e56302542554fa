"""What a start may differ in from the checkpoint that it goes on from."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_spark.core.lanes import LanePlan
from elastic_spark.core.resume import NOTED, differences, noted

PLAN = LanePlan((100, 50), 6, 24, seed=3)
SAVED = {"train": noted(PLAN, "d" * 64)}
INSIDE = {"train": (2, 4)}


def test_the_same_may_go_on() -> None:
    assert differences(SAVED, {"train": noted(PLAN, "d" * 64)}, INSIDE) == []
    assert differences(SAVED, {**SAVED, "more": noted(PLAN, "e" * 64)}, INSIDE) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 4}, "seed 4 now, 3 there"),
        ({"global_batch": 12}, "global_batch 12 now, 24 there"),
        ({"lanes": 12}, "lanes 12 now, 6 there (leave lanes out"),
        ({"shuffle": False}, "shuffle False now, True there"),
    ],
)
def test_each_difference_is_told_with_both_values_and_what_to_do(change: dict[str, object], told: str) -> None:
    now = {"train": noted(dataclasses.replace(PLAN, **change), "d" * 64)}  # type: ignore[arg-type]
    (found,) = differences(SAVED, now, INSIDE)
    assert found.startswith("data set 'train': ")
    assert told in found


def test_other_data_or_none_at_all() -> None:
    (found,) = differences(SAVED, {"train": noted(PLAN, "e" * 64)}, INSIDE)
    assert found.startswith(f"data set 'train': the data {'e' * 16}... now, {'d' * 16}... there (give the same rows")
    (found,) = differences(SAVED, {}, INSIDE)
    assert found == "it is 4 steps into epoch 2 of the data set 'train', which is not given now"


def test_everything_may_change_where_an_epoch_begins_and_for_data_that_was_only_read() -> None:
    now = {"train": noted(LanePlan((7,), 1, 2, seed=9), "e" * 64)}
    assert len(differences(SAVED, now, INSIDE)) == len(NOTED) - 1
    assert differences(SAVED, now, {"train": (3, 0)}) == []
    assert differences(SAVED, now, {}) == []
