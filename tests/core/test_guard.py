"""The guard: what is an alarm and what is not, by example and at random."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.core import events as ev
from elastic_spark.core.guard import AFTER, BEFORE, LEAST, RUN, Guard, told, usual


def formed(generation, step, **fields):
    fields = {"members": ("w0",), "joined": (), "lost": (), "left": (), "cause": "joined", "source": "w0"} | fields
    return ev.GenerationFormed(at=0.0, generation=generation, step=step, **fields)


def reported(step, **values):
    return ev.MetricsReported(at=float(step), step=step, values=values)


def feed(guard, first, values, key="loss"):
    """All alarms of ``values`` at the steps from ``first`` on."""
    return [a for step, value in enumerate(values, first) for a in guard.add(reported(step, **{key: value}))]


def after_a_change(before, after, key="loss"):
    guard = Guard()
    guard.add(formed(1, 0))
    assert feed(guard, 1, before, key) == []
    guard.add(formed(2, len(before)))
    return feed(guard, len(before) + 1, after, key)


def wavy(count, level=1.0, spread=0.1):
    """Values around ``level`` that lie within ``spread`` of it."""
    return [level + spread * math.sin(7.0 * i) for i in range(count)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_told_once_until_it_is_finite_again(value):
    guard = Guard()
    guard.add(formed(1, 0))
    (alarm,) = feed(guard, 1, [1.0, value, value, value], "anything")
    assert (alarm.kind, alarm.key, alarm.step, alarm.suspect_from) == ("not finite", "anything", 2, 2)
    assert (alarm.generation, alarm.median, alarm.mad, alarm.limit) == (1, None, None, None)
    assert told(alarm) == f"anything is {value} at step 2"
    assert [a.step for a in feed(guard, 5, [1.0, value], "anything")] == [6]
    assert [a.key for a in guard.add(reported(7, loss=value, anything=value))] == ["loss"]


def test_the_numbers_of_a_jump():
    before = [1.0, 2.0, 3.0, 4.0, 5.0] * 6
    (alarm,) = after_a_change(before, [3.0] * 5 + [40.0] * 10)
    assert (alarm.kind, alarm.generation, alarm.step, alarm.suspect_from) == ("jump", 2, 37, 31)
    assert (alarm.median, alarm.mad, alarm.value) == (3.0, 1.0, 40.0)
    assert alarm.limit == pytest.approx(3.0 + 6 * 1.4826)
    assert told(alarm) == (
        "loss jumped to 40 at step 37, after the change of the world at step 30; before: median 3, MAD 1, limit 11.9"
    )


@pytest.mark.parametrize("key", ["loss", "val_loss", "train/loss", "grad_norm", "gradient_norm", "GradNorm"])
def test_values_that_are_watched(key):
    assert len(after_a_change(wavy(30), wavy(30, 3.0), key)) == 1


@pytest.mark.parametrize("key", ["lr", "accuracy", "loss_scale", "rows", "glossy"])
def test_values_that_are_not(key):
    assert after_a_change(wavy(30), wavy(30, 3.0), key) == []


def test_what_is_no_jump():
    assert after_a_change(wavy(30), wavy(30)) == []
    assert after_a_change(wavy(30), wavy(30, 0.01)) == [], "down"
    assert after_a_change(wavy(30), [*wavy(5), 9.0, *wavy(5), 9.0, *wavy(5)]) == [], "hard batches, one by one"
    assert after_a_change(wavy(LEAST - 1), wavy(30, 3.0)) == [], "too few to say what is usual"
    assert after_a_change(wavy(30), wavy(AFTER) + wavy(30, 3.0)) == [], "long after the change"
    assert after_a_change([1.0] * 30, [1.04] * 30) == [], "values that hardly vary"
    guard = Guard()
    guard.add(formed(1, 0))
    assert feed(guard, 1, wavy(30) + wavy(30, 3.0)) == [], "without a change"


def test_noise_with_heavy_tails_is_rarely_called_a_jump_and_a_doubled_loss_always():
    random = np.random.default_rng(0)
    false = missed = 0
    for _ in range(400):
        noise = random.lognormal(0.0, 0.5, BEFORE + AFTER)
        false += bool(after_a_change(list(noise[:BEFORE]), list(noise[BEFORE:])))
        steady = 1.0 + 0.1 * random.standard_normal(BEFORE + AFTER)
        missed += not after_a_change(list(steady[:BEFORE]), list(2.0 * steady[BEFORE:]))
    assert missed == 0
    assert false <= 4, "of 400"


def test_after_a_roll_back_the_measure_stays_though_the_values_are_undone():
    guard = Guard()
    guard.add(formed(1, 0))
    feed(guard, 1, wavy(40))
    guard.add(formed(2, 40))
    assert len(feed(guard, 41, wavy(40, 3.0))) == 1
    guard.add(ev.StepsRolledBack(at=0.0, from_step=80, to_step=5, cause="guard"))
    guard.add(formed(3, 5))
    (again,) = feed(guard, 6, wavy(10, 3.0))
    assert (again.generation, again.step, again.suspect_from) == (3, 5 + RUN, 6)


@settings(max_examples=200)
@given(st.lists(st.floats(-1e6, 1e6), min_size=LEAST, max_size=BEFORE), st.floats(0.1, 10.0), st.floats(-1e3, 1e3))
def test_the_limit_is_above_all_that_was_seen_and_scales_with_it(values, scale, shift):
    found = usual(values)
    assert found.limit >= max(values)
    assert min(values) <= found.median <= max(values)
    scaled = usual([scale * value for value in values])
    assert scaled.limit == pytest.approx(scale * found.limit, rel=1e-6, abs=1e-6)
    moved = usual([value + shift for value in values])
    assert moved.mad == pytest.approx(found.mad, rel=1e-6, abs=1e-6)


def test_other_facts_change_nothing():
    guard = Guard()
    assert guard.add(ev.Warned(at=0.0, message="slow")) == []
    assert [alarm.step for alarm in feed(guard, 1, [1.0, math.nan], "loss")] == [2]
