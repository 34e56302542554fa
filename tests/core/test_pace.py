"""Speed and ownership: uneven workers get uneven shares, even ones keep theirs, and noise moves nothing."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.core.lanes import assign_lanes
from elastic_spark.core.ledger import Report
from elastic_spark.core.pace import ENOUGH, LONGEST_REST_S, MIN_GAIN, REST_S, SETTLE_S, WINDOW, Pace

LANES, ROWS_A_LANE = 64, 4


class Job:
    """A job whose workers take ``fixed_s + rows * row_s[worker]`` seconds of a step, times 1 +- noise; a change of the
    world costs 0.2 s. Time passes by steps."""

    def __init__(self, row_s: dict[str, float], fixed_s: float = 0.0, noise: float = 0.0, lanes: int = LANES) -> None:
        self.row_s, self.fixed_s, self.noise, self.rng = row_s, fixed_s, noise, random.Random(0)
        self.lanes = lanes
        self.held_up_s: float | None = None  # a step takes this long, whatever the workers' own times
        self.a_commit, self.unsaid = 1, []  # so many steps are committed together, as where gradients are accumulated
        self.pace = Pace({"train": lanes})
        self.owned: dict[str, tuple[int, ...]] = {}
        self.now, self.generation, self.step, self.asked = 0.0, 0, 0, []
        self.form()

    def form(self, members: list[str] | None = None) -> None:
        members = members or list(self.row_s)
        self.row_s = {worker: self.row_s[worker] for worker in members}
        self.generation += 1
        self.now += 0.2
        self.owned = assign_lanes(self.lanes, members, self.owned, self.pace.weights(members, self.now))
        self.pace.begin(self.generation, members, {"train": self.owned}, self.now)

    def rows(self, worker: str) -> int:
        return len(self.owned[worker]) * ROWS_A_LANE

    def one_step(self) -> float:
        own = {
            worker: (self.fixed_s + self.rows(worker) * row_s) * (1 + self.rng.uniform(-self.noise, self.noise))
            for worker, row_s in self.row_s.items()
        }
        took = (max(own.values()) if self.held_up_s is None else self.held_up_s) + 1e-4
        self.now, self.step = self.now + took, self.step + 1
        self.unsaid.append((self.generation, self.step, own))
        if self.step % self.a_commit == 0:
            for generation, step, spent in self.unsaid:
                for worker, seconds in spent.items():
                    report = Report(step, self.now, self.rows(worker), {"train": (0, step)}, own_s=seconds)
                    self.pace.report(worker, generation, [report])
            self.unsaid = []
        return took

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.one_step()
            fact = self.pace.unbalanced(self.now)
            if fact is not None:
                self.asked.append(fact)
                self.form()

    def share_of_ideal(self) -> float:
        """Rows per second by the owners of now / the sum of the workers' own rates."""
        took = max(self.fixed_s + self.rows(worker) * row_s for worker, row_s in self.row_s.items())
        return self.lanes * ROWS_A_LANE / took / sum(1 / row_s for row_s in self.row_s.values())


def even(row_s: float = 1e-3, size: int = 4) -> dict[str, float]:
    return {f"w{i}": row_s for i in range(size)}


@pytest.mark.parametrize("a_commit", [1, 4])
def test_one_of_four_twice_as_slow_owns_half_a_share_after_one_change(a_commit) -> None:
    job = Job(even() | {"w2": 2e-3})
    job.a_commit = a_commit
    assert job.share_of_ideal() == pytest.approx(4 / 7)
    job.run(SETTLE_S - 0.5)
    assert job.asked == []
    job.run(2.0)
    assert [len(lanes) for lanes in job.owned.values()] == [19, 18, 9, 18]
    assert job.share_of_ideal() >= 0.95
    job.run(1000.0)
    assert len(job.asked) == 1
    assert job.asked[0].gain == pytest.approx((32 - 19) / 32, rel=0.01)
    assert job.asked[0].rows_per_s["w2"] == pytest.approx(500.0)


def test_who_is_fast_again_owns_a_full_share_again() -> None:
    job = Job(even() | {"w2": 2e-3})
    job.run(20.0)
    job.row_s["w2"] = 1e-3
    job.run(REST_S + WINDOW)
    assert [len(lanes) for lanes in job.owned.values()] == [16, 16, 16, 16]
    assert len(job.asked) == 2


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.floats(1.0, 4.0), min_size=2, max_size=8),
    st.floats(0, 0.02),
    st.floats(0, 0.08),
)
def test_whatever_the_speeds_the_step_ends_up_within_the_threshold_of_what_lanes_allow(slow, fixed_s, noise) -> None:
    """Also where a part of the time does not depend on the rows, which the prediction leaves out of account."""
    job = Job({f"w{i}": factor * 1e-3 for i, factor in enumerate(slow)}, fixed_s, noise, lanes=16 * len(slow))
    job.run(5 * REST_S)
    took = max(fixed_s + job.rows(worker) * row_s for worker, row_s in job.row_s.items())
    shares = assign_lanes(job.lanes, list(job.row_s), {}, {worker: 1 / row_s for worker, row_s in job.row_s.items()})
    best = max(fixed_s + len(shares[worker]) * ROWS_A_LANE * row_s for worker, row_s in job.row_s.items())
    assert took <= best / (1 - MIN_GAIN - 0.06)
    assert sum(map(len, job.owned.values())) == job.lanes
    assert len(job.asked) <= 4


@settings(deadline=None, max_examples=10)
@given(st.integers(2, 8), st.floats(0, 0.3), st.floats(0, 0.05))
def test_noise_among_equals_moves_no_lane(size, noise, fixed_s) -> None:
    job = Job(even(size=size), fixed_s, noise)
    before = job.owned
    job.run(60.0)
    assert job.asked == []
    assert job.owned == before


@settings(deadline=None, max_examples=4)
@given(st.integers(0, 1000))
def test_speeds_that_never_rest_cause_ever_fewer_changes(seed) -> None:
    job, rng = Job(even()), random.Random(seed)
    for _ in range(60):
        job.row_s = {worker: rng.choice((1e-3, 5e-3)) for worker in job.row_s}
        job.run(30.0)
    times = [fact.at for fact in job.asked]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert all(a >= REST_S or b >= LONGEST_REST_S - 1 for a, b in itertools.pairwise(gaps)), "a trial, and its undoing"
    assert len(times) <= 8


def test_a_change_for_another_reason_uses_what_is_known_and_begins_to_count_anew() -> None:
    job = Job(even() | {"w2": 2e-3})
    job.run(2.0)
    job.form(["w0", "w2", "w3"])
    assert [len(lanes) for lanes in job.owned.values()] == [26, 13, 25]
    job.run(60.0)
    assert job.asked == []
    job.row_s["w9"] = 1e-3
    job.form(["w0", "w2", "w3", "w9"])
    assert len(job.owned["w9"]) == 16, "a newcomer counts as an average worker"
    job.run(60.0)
    assert len(job.owned["w9"]) >= 16
    job.form(["w0", "w3", "w9"])
    assert sorted(len(lanes) for lanes in job.owned.values()) == [21, 21, 22]


def test_a_change_that_made_no_step_shorter_is_undone_and_not_tried_again_for_long() -> None:
    """As where workers look slow in turns because they share cores: the step takes its time whoever has the rows."""
    job = Job(even() | {"w2": 2e-3})
    job.held_up_s = 0.14
    job.run(3 * SETTLE_S)
    assert [len(lanes) for lanes in job.owned.values()] == [16, 16, 16, 16]
    assert len(job.asked) == 2
    assert job.asked[0].gain > MIN_GAIN > job.asked[1].gain >= 0
    job.run(LONGEST_REST_S - 20.0)
    assert len(job.asked) == 2
    job.held_up_s = None
    job.run(40.0)
    assert len(job.asked) == 3
    assert len(job.owned["w2"]) == 9
    job.run(LONGEST_REST_S)
    assert len(job.asked) == 3, "this time it helped"


def test_a_trial_of_which_one_long_commit_is_known_is_not_judged() -> None:
    job = Job(even() | {"w2": 2e-3})
    job.run(SETTLE_S + 1.0)
    assert len(job.asked) == 1
    job.a_commit = 2 * WINDOW
    job.run(REST_S)
    assert len(job.asked) == 1


def test_equal_shares_after_a_trial_last_until_the_workers_are_others() -> None:
    job = Job(even() | {"w2": 2e-3})
    job.held_up_s = 0.14
    job.run(3 * SETTLE_S)
    job.form()
    assert [len(lanes) for lanes in job.owned.values()] == [16, 16, 16, 16]
    job.run(2.0)
    job.form(["w0", "w2", "w3"])
    assert [len(lanes) for lanes in job.owned.values()] == [26, 13, 25]


def test_lanes_too_coarse_for_a_gain_are_left_alone() -> None:
    job = Job(even() | {"w2": 1.5e-3}, lanes=4)
    job.run(200.0)
    assert job.asked == []


def test_a_step_that_others_make_long_is_not_worth_a_change() -> None:
    """Own times are a small part of the step here: the rest is the collective."""
    job = Job(even(1e-5) | {"w2": 2e-5})
    job.pace.begin(2, list(job.row_s), {"train": job.owned}, job.now)
    job.generation = 2
    for _ in range(2 * WINDOW):
        job.one_step()
        job.now += 0.2
        assert job.pace.unbalanced(job.now) is None


def test_nothing_is_decided_on_little_or_on_what_strangers_say() -> None:
    pace = Pace({"train": 8})
    assert pace.unbalanced(100.0) is None
    assert pace.weights(["w0"], 0.0) == {}
    owned = {"train": assign_lanes(8, ["w0", "w1"], {})}
    pace.begin(1, ["w0", "w1"], owned, 0.0)

    def report(worker: str, seconds: float, generation: int = 1, count: int = ENOUGH, **fields: object) -> None:
        kept = {"rows": 8, "cursors": {"train": (0, 0)}, "own_s": seconds, **fields}
        pace.report(worker, generation, [Report(i, float(i), **kept) for i in range(count)])  # type: ignore[arg-type]

    report("w0", 0.5)
    report("w1", 1.0, count=ENOUGH - 1)
    report("w1", 1.0, generation=2)
    report("w7", 9.0)
    report("w1", 0.0)
    report("w1", 1.0, rows=0)
    assert pace.unbalanced(100.0) is None
    report("w1", 1.0, count=1)
    assert pace.weights(["w0", "w1"], 0.0) == {"w0": 16.0, "w1": 8.0}
    assert pace.unbalanced(SETTLE_S - 0.1) is None
    fact = pace.unbalanced(100.0)
    assert fact is not None
    assert (fact.generation, fact.rows_per_s) == (1, {"w0": 16.0, "w1": 8.0})
    assert pace.unbalanced(200.0) is None, "said once"
    pace.begin(1, ["w0"], {"train": {"w0": range(8)}}, 0.0)
    pace.begin(2, ["w0", "w1"], owned, 0.0)
    report("w0", 0.5, generation=2, cursors={"other": (0, 0)})
    report("w1", 1.0, generation=2, cursors={"other": (0, 0)})
    assert pace.unbalanced(1000.0) is None, "the lanes of what was trained are not known"
    pace.begin(3, ["w0"], {"train": {"w0": range(8)}}, 0.0)
    report("w0", 0.5, generation=3)
    assert pace.unbalanced(1000.0) is None, "alone"
    pace.begin(4, ["w0", "w1"], owned, 0.0)
    for worker, seconds in (("w0", 0.5), ("w1", 1.0)):
        pace.report(worker, 4, [Report(i, 7.0, 8, {"train": (0, i)}, own_s=seconds) for i in range(ENOUGH)])
    assert pace.unbalanced(1000.0) is None, "the clock stood still"
