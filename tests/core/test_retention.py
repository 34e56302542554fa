"""When to save and what may go: pure policies, so properties over random histories."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.core.retention import Stored, due, to_delete


def test_rpo_binds_where_a_save_is_cheap():
    assert not due(109.1, 100.0, 0.01, 0.5)[0]
    is_due, reason = due(109.3, 100.0, 0.01, 0.5)
    assert is_due
    assert reason == "rpo_target_s = 10 binds: one save in 9.2 s"


def test_time_until_durable_counts_into_the_rpo():
    assert not due(106.6, 100.0, 0.0, 1.0, write_s=2.0)[0]
    assert due(106.8, 100.0, 0.0, 1.0, write_s=2.0)[0]


def test_budget_binds_where_a_save_is_dear_and_says_what_rpo_remains():
    assert not due(149.0, 100.0, 0.5, 1.0, write_s=2.0)[0]
    is_due, reason = due(150.0, 100.0, 0.5, 1.0, write_s=2.0)
    assert is_due
    assert "ckpt_budget binds" in reason
    assert "RPO is 53 s, over rpo_target_s = 10" in reason


def test_no_budget_at_all_means_never_unless_saving_is_free():
    assert not due(1e9, 0.0, 0.1, 1.0, budget=0.0)[0]
    assert due(1e9, 0.0, 0.0, 1.0, budget=0.0)[0]


seconds = st.floats(0.001, 1000)


@settings(deadline=None)  # a busy machine is no failure
@given(seconds, seconds, st.floats(0.001, 100), st.floats(0.001, 1.0), st.floats(0.0, 5.0))
def test_saves_keep_one_of_the_two_bounds_for_ever(cost, step, rpo, budget, write):
    """A job saving whenever it is due never loses more than the target, or else never pays more than the budget."""
    now, saves = 0.0, [0.0]
    for _ in range(200):
        now += step
        if due(now, saves[-1], cost, step, rpo_target_s=rpo, budget=budget, write_s=write)[0]:
            saves.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(saves)]
    slack = 1e-6 * now
    for gap in gaps:
        within_rpo = gap + write <= max(rpo, step + write) + slack
        within_budget = cost <= budget * gap + slack
        assert within_budget
        assert within_rpo or gap <= max(cost / budget + step, step) + slack


scores = st.none() | st.floats(-10, 10) | st.sampled_from([float("nan"), float("inf")])
stored = st.lists(
    st.builds(Stored, st.uuids().map(str), st.integers(0, 20), st.floats(0, 100), st.booleans(), scores, st.booleans()),
    unique_by=lambda item: item.name,
    max_size=12,
)


@settings(deadline=None)  # a busy machine is no failure
@given(stored, st.integers(-1, 5), st.integers(-1, 3))
def test_never_the_newest_valid_one(items, keep, keep_best):
    gone = to_delete(items, keep, keep_best=keep_best)
    newest_first = sorted(items, key=lambda item: (item.step, item.created_unix, item.name), reverse=True)
    left = [item for item in newest_first if item not in gone]
    valid = [item for item in newest_first if item.valid]
    if not valid:
        assert gone == []
        return
    assert valid[0] in left
    assert all(item in left for item in newest_first[: max(keep, 0)])
    assert any(item in left for item in valid if item.good) or not any(item.good for item in valid)
    assert len(left) <= max(keep, 0) + max(keep_best, 0) + 2
    assert gone == [item for item in reversed(newest_first) if item in gone], "oldest first"


def test_best_ones_stay_and_nan_is_never_best():
    items = [Stored(str(step), step, score=score) for step, score in enumerate([0.5, float("nan"), 0.1, None, 0.3])]
    gone = to_delete(items, keep=1, keep_best=2)
    assert [item.step for item in gone] == [0, 1, 3]


def test_an_invalid_one_is_never_best():
    items = [Stored("a", 1, score=0.0, valid=False), Stored("b", 2, score=1.0), Stored("c", 3, score=2.0)]
    assert [item.name for item in to_delete(items, keep=1, keep_best=1)] == ["a"]


def test_the_newest_good_one_stays_and_a_suspect_one_is_never_best():
    items = [Stored("a", 1, score=0.5), Stored("b", 2, score=0.1, good=False), Stored("c", 3, good=False)]
    assert [item.name for item in to_delete(items, keep=1, keep_best=1)] == ["b"]
    assert [item.name for item in to_delete(items, keep=1)] == ["b"]
