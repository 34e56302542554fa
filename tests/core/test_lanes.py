"""Lanes: every row once, the same batches at any world, ownership balanced and with least movement."""

from __future__ import annotations

import itertools
import pickle
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_spark.core.lanes import LANES_PER_WORKER, LanePlan, assign_lanes, choose_lanes
from elastic_spark.core.order import row_hash
from elastic_spark.errors import ConfigError, DataError

groups_of = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)
plans = st.builds(
    LanePlan,
    groups=st.one_of(groups_of, st.lists(st.just(1), min_size=1, max_size=60), st.just([500])).map(tuple),
    lanes=st.integers(1, 24),
    global_batch=st.integers(1, 64),
    seed=st.integers(-(2**63), 2**63),
    shuffle=st.booleans(),
).filter(lambda plan: plan.steps_per_epoch <= 100)
relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])


def epoch_of(plan, epoch):
    return [
        [plan.row_ids(epoch, lane, offset).tolist() for lane in range(plan.lanes)]
        for offset in range(plan.steps_per_epoch)
    ]


@relaxed
@given(plans, st.integers(0, 3))
def test_an_epoch_holds_every_row_once_and_its_steps_have_the_promised_sizes(plan, epoch):
    steps = epoch_of(plan, epoch)
    assert sorted(itertools.chain(*itertools.chain(*steps))) == list(range(plan.rows))
    for offset, step in enumerate(steps):
        assert [len(part) for part in step] == [plan.lane_rows_in_step(lane, offset) for lane in range(plan.lanes)]
        assert sum(map(len, step)) == plan.rows_in_step(offset)
        parts = [row_hash(np.array(part, dtype=np.int64)) for part in step]
        assert sum(parts) % 2**64 == plan.row_hash(epoch, offset)
    assert all(plan.rows_in_step(offset) == plan.global_batch for offset in range(plan.steps_per_epoch - 1))
    assert 0 < plan.rows_in_step(plan.steps_per_epoch - 1) <= plan.global_batch
    assert plan.rows_in_step(plan.steps_per_epoch) == 0
    assert not any(plan.row_ids(epoch, lane, plan.steps_per_epoch).size for lane in range(plan.lanes))


@relaxed
@given(plans)
def test_lanes_are_capped_proportional_and_end_within_one_step(plan):
    assert plan.lanes <= min(plan.global_batch, plan.rows)
    assert int(plan.lane_batches.sum()) == plan.global_batch
    assert int(plan.lane_batches.max()) - int(plan.lane_batches.min()) <= 1
    ends = {-(-int(n) // int(b)) for n, b in zip(plan.lane_sizes, plan.lane_batches, strict=True)}
    assert ends <= {plan.rows // plan.global_batch, plan.steps_per_epoch}


@relaxed
@given(plans, st.integers(0, 5), st.data())
def test_a_share_is_its_lanes_step_by_step(plan, epoch, data):
    lanes = data.draw(st.lists(st.integers(0, plan.lanes - 1), unique=True))
    offset = data.draw(st.integers(0, plan.steps_per_epoch))
    steps = data.draw(st.integers(1, 5))
    share = plan.share(epoch, lanes)
    expected = [
        int(id_) for step in range(offset, offset + steps) for lane in lanes for id_ in plan.row_ids(epoch, lane, step)
    ]
    assert share.row_ids(offset, steps).tolist() == expected
    sizes = [sum(plan.lane_rows_in_step(lane, step) for lane in lanes) for step in range(offset, offset + steps)]
    assert [share.rows_in(step) for step in range(offset, offset + steps)] == sizes
    assert share.rows_in(offset, steps) == sum(sizes)
    ends = np.cumsum(plan.groups)
    touched = {
        int(np.searchsorted(ends, id_, side="right"))
        for step in range(plan.steps_per_epoch)
        for lane in lanes
        for id_ in plan.row_ids(epoch, lane, step)
    }
    row_groups = share.row_groups().tolist()
    assert len(row_groups) == len(set(row_groups))
    assert set(row_groups) == touched or (plan.shuffle is False and touched <= set(row_groups))


def test_wide_row_groups_and_narrow_ones_are_placed_alike():
    """The three ways to find the row group of a position: one group, buckets, and search where sizes differ much."""
    for groups in ((1000,), (250,) * 4, (1, 1, 1, 1, 990, 1, 1, 1, 1, 3), (100, 1, 1, 1, 897)):
        plan = LanePlan(groups, lanes=3, global_batch=7, seed=5)
        layout = plan.layout(0)
        positions = np.arange(plan.rows)
        expected = np.searchsorted(layout.bounds, positions, side="right") - 1
        assert layout.place(positions).tolist() == expected.tolist()
        ids = positions.copy()
        layout.to_row_ids(ids)
        assert sorted(ids.tolist()) == positions.tolist()


def test_epochs_and_seeds_differ_and_repeat():
    first = LanePlan((64, 64, 64), lanes=4, global_batch=16, seed=1)
    again = LanePlan((64, 64, 64), lanes=4, global_batch=16, seed=1)
    other = LanePlan((64, 64, 64), lanes=4, global_batch=16, seed=2)
    assert epoch_of(first, 0) == epoch_of(again, 0)
    assert epoch_of(first, 2) == epoch_of(pickle.loads(pickle.dumps(first)), 2)
    assert epoch_of(first, 0) != epoch_of(first, 1)
    assert epoch_of(first, 0) != epoch_of(other, 0)
    assert first == again
    assert len({first, again, other}) == 2


def test_no_shuffle_keeps_manifest_order():
    plan = LanePlan((3, 5, 2), lanes=1, global_batch=4, seed=9, shuffle=False)
    assert [id_ for step in epoch_of(plan, 3) for id_ in step[0]] == list(range(10))
    two = LanePlan((3, 5, 2), lanes=2, global_batch=4, seed=9, shuffle=False)
    assert epoch_of(two, 0) == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]]


def test_a_lane_is_shuffled_as_a_whole():
    """Rows of the first step of a lane come from all over the lane, not from its first row group."""
    plan = LanePlan((1000,) * 32, lanes=2, global_batch=200, seed=3)
    layout = plan.layout(0)
    seen = {int(id_) // 1000 for id_ in plan.row_ids(0, 0, 0)}
    assert len(seen) > 12
    assert seen <= set(layout.order[:16].tolist())


def test_an_epoch_of_many_rows_needs_little_memory_to_plan():
    plan = LanePlan((65_536,) * 1526, lanes=128, global_batch=1024, seed=1)
    share = plan.share(7, range(0, 128, 4))
    ids = share.row_ids(50_000, 400)  # more than is computed at once
    assert ids.size == 400 * 256
    assert ids[-256:].tolist() == share.row_ids(50_399).tolist()
    assert np.unique(ids).size == ids.size
    assert int(ids.max()) < plan.rows


def test_bad_plans_are_refused():
    with pytest.raises(DataError, match="no rows"):
        LanePlan((0, 0), lanes=2, global_batch=4, seed=0)
    with pytest.raises(DataError, match="negative"):
        LanePlan((3, -1), lanes=2, global_batch=4, seed=0)
    with pytest.raises(ConfigError, match="at least 1"):
        LanePlan((3,), lanes=0, global_batch=4, seed=0)
    with pytest.raises(ConfigError, match="at least 1"):
        LanePlan((3,), lanes=1, global_batch=0, seed=0)
    with pytest.raises(ConfigError, match="use at least 3 lanes"):
        LanePlan((2**32 + 1,), lanes=1, global_batch=4, seed=0)
    plan = LanePlan((30,), lanes=3, global_batch=6, seed=0)
    for lanes in ((0, 0), (3,), (-1,)):
        with pytest.raises(ValueError, match=r"lanes 0 \.\. 2"):
            plan.share(0, lanes)


@relaxed
@given(st.integers(1, 200), st.integers(1, 5000), st.integers(1, 10**9))
def test_chosen_lanes_are_a_multiple_of_the_largest_world_where_possible(world, batch, rows):
    lanes = choose_lanes(world, batch, rows)
    assert 1 <= lanes <= min(batch, rows)
    if min(batch, rows) >= world:
        assert lanes % world == 0
        assert lanes == LANES_PER_WORKER * world or lanes + world > min(batch, rows)
    else:
        assert lanes == min(batch, rows)


def test_a_world_without_workers_has_no_lanes():
    with pytest.raises(ConfigError, match="max_world=0"):
        choose_lanes(0, 8, 100)


# ---- ownership

workers_of = st.lists(st.sampled_from([f"w{i}" for i in range(9)]), min_size=1, max_size=9, unique=True)


def owners(assignment):
    return {lane: worker for worker, lanes in assignment.items() for lane in lanes}


@relaxed
@given(st.integers(1, 60), st.lists(st.tuples(workers_of, st.booleans(), st.randoms()), min_size=1, max_size=6))
def test_every_lane_has_one_owner_and_shares_follow_weights(lanes, worlds):
    assignment = {}
    for workers, weighted, rng in worlds:
        weights = {worker: rng.uniform(0.1, 4) for worker in workers if rng.random() < 0.8} if weighted else None
        assignment = assign_lanes(lanes, workers, assignment, weights)
        assert list(assignment) == workers
        assert sorted(itertools.chain(*assignment.values())) == list(range(lanes))
        known = weights or {}
        average = sum(known.values()) / len(known) if known else 1.0
        weight = {worker: known.get(worker, average) for worker in workers}
        share = {worker: lanes * weight[worker] / sum(weight.values()) for worker in workers}
        enough = lanes >= len(workers)
        given = (
            sum(ideal < 1 for ideal in share.values()) if enough else 0
        )  # by the others, so that nobody goes without
        assert all(assignment.values()) or not enough
        for worker, mine in assignment.items():
            assert share[worker] - 1 - given - 1e-9 < len(mine) < share[worker] + 1 + 1e-9
            assert list(mine) == sorted(mine)


@relaxed
@given(st.integers(1, 40), workers_of, workers_of, st.randoms())
def test_movement_is_the_least_possible(lanes, before, after, rng):
    order = list(range(lanes))
    rng.shuffle(order)
    previous = {worker: order[i :: len(before)] for i, worker in enumerate(before)}
    assignment = assign_lanes(lanes, after, previous)
    moved = sum(owners(previous)[lane] != worker for lane, worker in owners(assignment).items())
    # Least over all balanced ownerships: of those who own more than the lower share, as many as possible keep one more.
    low, extra = divmod(lanes, len(after))
    had = [len(previous.get(worker, ())) for worker in after]
    kept = sum(min(n, low) for n in had) + min(extra, sum(n > low for n in had))
    assert moved == lanes - kept


@relaxed
@given(st.integers(1, 60), workers_of, st.randoms())
def test_the_same_world_keeps_its_lanes(lanes, workers, rng):
    weights = {worker: rng.uniform(0.1, 4) for worker in workers}
    first = assign_lanes(lanes, workers, {}, weights)
    assert assign_lanes(lanes, workers, first, weights) == first
    assert assign_lanes(lanes, workers, dict(reversed(first.items())), weights) == first


def test_a_slow_worker_owns_less():
    assignment = assign_lanes(64, ["a", "b", "c", "d"], {}, {"a": 2, "b": 2, "c": 2, "d": 1})
    assert sorted(len(mine) for mine in assignment.values()) == [9, 18, 18, 19]
    assert len(assignment["d"]) == 9


def test_more_workers_than_lanes_leaves_some_without():
    assignment = assign_lanes(2, ["a", "b", "c"], {"c": [1]})
    assert assignment == {"a": (0,), "b": (), "c": (1,)}


def test_nobody_goes_without_while_there_are_lanes_for_all():
    assignment = assign_lanes(8, ["a", "b", "c", "d"], {}, {"a": 1.0, "b": 0.25, "c": 1.0, "d": 1.0})
    assert sorted(len(mine) for mine in assignment.values()) == [1, 2, 2, 3]
    assert len(assignment["b"]) == 1
    assignment = assign_lanes(3, ["a", "b", "c"], {}, {"a": 100.0, "b": 1.0, "c": 1.0})
    assert [len(mine) for mine in assignment.values()] == [1, 1, 1]


def test_previous_ownership_that_makes_no_sense_is_put_right():
    assignment = assign_lanes(4, ["a", "b"], {"a": [0, 0, 1, 9, -1], "b": [1, 2], "gone": [3]})
    assert assignment == {"a": (0, 1), "b": (2, 3)}


def test_bad_worlds_and_weights_are_refused():
    for workers in ([], ["a", "a"]):
        with pytest.raises(ConfigError, match="each named once"):
            assign_lanes(4, workers, {})
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="positive"):
            assign_lanes(4, ["a", "b"], {}, {"a": weight})


# ---- churn: the counting model in memory


def run_history(seed, plan, epochs):
    """One random history: kills, joins, roll-backs to a commit, restarts. Returns the trained batches of each epoch.

    The job's cursor is (epoch, offset). A step is trained by all workers or by none; its rows are counted when it is
    committed; a roll-back takes the counts since the checkpoint back with the model.
    """
    rng = random.Random(seed)
    names = itertools.count()
    world = [f"w{next(names)}" for _ in range(rng.randint(1, 9))]
    owned = assign_lanes(plan.lanes, world, {})
    shares = {}
    done = []
    saved = 0
    total = epochs * plan.steps_per_epoch
    while len(done) < total:
        act = rng.random()
        if act < 0.25:
            lost = set(rng.sample(world, rng.randint(0, len(world))))
            survivors = [worker for worker in world if worker not in lost]
            if not survivors:  # all lost: back to the checkpoint, with another world
                del done[saved:]
            joining = rng.randint(0 if survivors else 1, 9 - len(survivors))
            world = [*survivors, *(f"w{next(names)}" for _ in range(joining))]
            rng.shuffle(world)
            weights = {worker: rng.uniform(0.2, 3) for worker in world} if rng.random() < 0.5 else None
            owned = assign_lanes(plan.lanes, world, owned, weights)
            shares = {}
        elif act < 0.3:
            del done[saved:]
        elif act < 0.4:
            saved = len(done)
        epoch, offset = divmod(len(done), plan.steps_per_epoch)
        for worker in world:
            if (worker, epoch) not in shares:
                shares[worker, epoch] = plan.share(epoch, owned[worker])
        step = [shares[worker, epoch].row_ids(offset) for worker in world]
        assert sum(map(len, step)) == plan.rows_in_step(offset)
        if rng.random() < 0.9:  # else a worker died in the step: nobody commits it
            done.append(np.concatenate(step))
    per_epoch = plan.steps_per_epoch
    return [done[i * per_epoch : (i + 1) * per_epoch] for i in range(epochs)]


@given(st.integers(0, 2**32))
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_thousand_churn_histories_lose_and_repeat_nothing(seed):
    rng = random.Random(seed)
    groups = (*(rng.choice((0, 1, 2, 5, 13)) for _ in range(rng.randint(1, 12))), rng.randint(1, 20))
    rows = sum(groups)
    batch = rng.randint(max(1, rows // 8), rows + 10)
    plan = LanePlan(groups, choose_lanes(rng.randint(1, 9), batch, rows), batch, seed)
    for epoch, steps in enumerate(run_history(seed, plan, epochs=2)):
        counts = np.bincount(np.concatenate(steps), minlength=rows)
        assert counts.tolist() == [1] * rows
        alone = plan.share(epoch, range(plan.lanes))
        for offset, step in enumerate(steps):
            assert sorted(step.tolist()) == sorted(alone.row_ids(offset).tolist())
