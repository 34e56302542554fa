"""Blame: scores that decay, probation that ends, and errors that are deterministic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_spark.core.job import Failure
from elastic_spark.core.policy import (
    FIRST_WAIT_S,
    HALF_LIFE_S,
    LONGEST_WAIT_S,
    MARGIN,
    SUSPECT_SCORE,
    Probation,
    is_repeated,
)


def failures(host: str, count: int, at: float = 0.0, every: float = 0.0, before: Probation | None = None) -> Probation:
    probation = before or Probation()
    for number in range(count):
        probation = probation.failed(host, at + number * every)
    return probation


def test_a_score_grows_by_one_a_failure_and_halves_every_half_life() -> None:
    probation = failures("h", 2)
    assert probation.score("h", 0.0) == 2.0
    assert probation.score("h", HALF_LIFE_S) == 1.0
    assert probation.failed("h", HALF_LIFE_S).score("h", HALF_LIFE_S) == 2.0
    assert probation.score("other", 0.0) == 0.0


def test_a_single_failure_is_nobodys_fault() -> None:
    assert failures("h", 1).wait_s("h", 0.0) == 0.0
    assert not failures("h", 1).is_on("h", ["h", "other"], 0.0)


def test_the_wait_doubles_with_each_failure_up_to_the_longest() -> None:
    waits = [failures("h", count).wait_s("h", 0.0) for count in range(2, 12)]
    assert waits[0] == 0.0
    assert waits[1] == pytest.approx(FIRST_WAIT_S * 2.0 ** (3 - SUSPECT_SCORE))
    assert waits[2] == pytest.approx(2 * waits[1])
    assert waits[-1] == LONGEST_WAIT_S


def test_a_suspect_host_waits_and_returns() -> None:
    probation = failures("h", 4, at=5000.0)
    assert probation.is_on("h", ["h", "other"], 5001.0)
    assert not probation.is_on("h", ["h", "other"], 5000.0 + probation.wait_s("h", 5000.0))
    assert not probation.is_on("other", ["h", "other"], 5001.0)


def test_on_a_single_host_nobody_waits() -> None:
    assert not failures("h", 9).is_on("h", ["h"], 0.0)
    assert not failures("h", 9).is_on("h", [], 0.0)


def test_when_all_hosts_fail_alike_no_host_is_the_cause() -> None:
    probation = failures("other", 4, before=failures("h", 5))
    assert not probation.is_on("h", ["h", "other"], 0.0), f"one more is less than {MARGIN}"
    assert probation.is_on("h", ["h", "other", "good"], 0.0)


HISTORY = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 600.0)), max_size=30)


@given(history=HISTORY, later=st.floats(0.0, 1e6))
def test_probation_is_never_for_ever_and_never_for_all(history: list[tuple[str, float]], later: float) -> None:
    probation, now = Probation(), 0.0
    for host, dt in history:
        now += dt
        probation = probation.failed(host, now)
    assert not all(probation.is_on(host, "abc", now) for host in "abc")
    for host in "abc":
        assert 0.0 <= probation.score(host, now + later) <= len(history)
        assert not probation.is_on(host, "abc", now + LONGEST_WAIT_S)
        if probation.is_on(host, "abc", now + later):
            assert probation.score(host, now) >= SUSPECT_SCORE


def test_a_time_before_the_last_failure_does_not_raise_the_score() -> None:
    assert failures("h", 2, at=100.0).score("h", 0.0) == 2.0


def test_an_error_is_repeated_when_it_is_the_same_at_the_same_step() -> None:
    seen = [Failure("w1", 1, 3, 0.0, "ValueError: boom", "Traceback")]
    assert is_repeated("ValueError: boom", 3, seen)
    assert not is_repeated("ValueError: boom", 4, seen)
    assert not is_repeated("ValueError: bang", 3, seen)
    assert not is_repeated("ValueError: boom", 3, [])
