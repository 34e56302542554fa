"""What is drawn: bars, speed, marks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.core import events as ev
from elastic_spark.core.timeline import Bar, Story, speed, thin, timeline

GOLDEN = Path(__file__).parents[1] / "goldens" / "churn.jsonl"


def spawned(worker, at):
    return ev.WorkerSpawned(at=at, worker=worker, agent="a", host="h", executor="1", pid=1)


def formed(members, at, generation=1):
    return ev.GenerationFormed(
        at=at, generation=generation, members=members, joined=(), lost=(), left=(), cause="c", source=members[0], step=0
    )


def test_bars():
    start = {"job_name": "j", "job_id": "i", "run_id": "r", "num_proc": 2, "min_num_proc": 1, "max_num_proc": 2}
    log = [
        ev.JobStarted(at=0.0, **start),
        spawned("w0", 1.0),
        spawned("w1", 1.5),
        spawned("w2", 1.6),
        formed(("w0", "w1"), 2.0),
        ev.WorkerLost(at=3.0, worker="w1", cause="frozen"),
        ev.WorkerLeft(at=4.0, worker="w2", reason="not needed"),
        ev.WorkerLost(at=4.0, worker="unknown", cause="frozen"),
        ev.JobStarted(at=9.0, **start),
        formed(("w7",), 10.0, generation=2),
        formed(("w7",), 11.0, generation=3),
    ]
    story = timeline(log)
    assert story.bars == [
        Bar("w0", "h", 1.0, 2.0, 9.0, "lost", "driver lost"),
        Bar("w1", "h", 1.5, 2.0, 3.0, "lost", "frozen"),
        Bar("w2", "h", 1.6, None, 4.0, "left", "not needed"),
        Bar("w7", "", 10.0, 10.0),
    ]
    assert (story.begin, story.end, story.unit, story.speed) == (0.0, 11.0, "steps/s", [])
    assert story.sizes == [(2.0, 2), (10.0, 1), (11.0, 1)]


def test_marks_and_series():
    log = [
        ev.CheckpointWritten(at=1.0, step=4, uri="u", digest="d", bytes=1, seconds=0.1, world_size=2),
        ev.StepsRolledBack(at=2.0, from_step=6, to_step=4, cause="all lost"),
        ev.UserFailed(at=3.0, worker="w1", rank=0, step=5, error="E", traceback="T"),
        ev.MetricsReported(at=3.0, step=5, values={"loss": 0.5}),
        ev.StepsCommitted(at=4.0, generation=1, first_step=5, times=(), rows=0),
    ]
    story = timeline(log)
    assert [(at, kind) for at, kind, _ in story.marks] == [(1.0, "checkpoint"), (2.0, "roll-back"), (3.0, "failure")]
    assert story.series == {"loss": [(5, 0.5)]}
    assert timeline([]).bars == []


def test_speed_shows_a_pause():
    commits = [(float(i), 10.0) for i in range(9)] + [(float(i), 10.0) for i in range(16, 25)]
    assert [value for _, _, value in speed(commits, bins=2)] == [pytest.approx(10 * 8 / 12), pytest.approx(10 * 9 / 12)]
    assert speed([(1.0, 1.0)], 5) == []
    assert speed([(1.0, 1.0), (1.0, 1.0)], 5) == []
    assert speed([(0.0, 0.0), (2.2250738585e-313, 1.0)], 1) == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**9).map(lambda ms: ms / 1000), st.floats(0, 1e3)), min_size=2, max_size=60),
    st.integers(1, 20),
)
def test_speed_keeps_the_total(commits, bins):
    out = speed(commits, bins)
    total = sum(amount for _, amount in sorted(commits)[1:])
    if out:
        assert sum((end - begin) * value for begin, end, value in out) == pytest.approx(total, rel=1e-5, abs=1e-3)


def test_thin():
    points = [(i, float(i)) for i in range(1000)]
    assert thin(points, 2000) == points
    few = thin(points, 11)
    assert len(few) == 11
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert thin([(1, float("nan")), (2, float("inf")), (3, 1.0)], 10) == [(3, 1.0)]


def test_a_recorded_log():
    with GOLDEN.open() as log:
        story = timeline(ev.read_log(log))
    assert len(story.bars) == 7
    assert story.unit == "rows/s"
    assert {bar.end for bar in story.bars} == {"lost", "left"}


def test_a_long_story_stays_small_and_tells_the_same():
    """Put together: the total, the ends and the mean speed stay; only the curve is coarser."""
    short, whole = Story(most=64), Story()
    for i in range(10_000):
        at = float(i)
        for event in (
            ev.StepsCommitted(at=at, generation=1, first_step=i + 1, times=(at,), rows=10),
            ev.MetricsReported(at=at, step=i + 1, values={"loss": 1 / (i + 1)}),
            ev.CheckpointWritten(at=at, step=i, uri="u", digest="d", bytes=1, seconds=0.1, world_size=2),
        ):
            short.add(event)
            whole.add(event)
    few, all_ = short.result(bins=5), whole.result(bins=5)
    assert len(short._commits.items()) <= 130
    assert 60 < len(few.series["loss"]) <= 130
    assert few.series["loss"][-1] == all_.series["loss"][-1] == (10_000, 1 / 10_000)
    assert len(few.marks) <= 128
    assert few.marks[-1] == all_.marks[-1]
    assert (few.speed[0][0], few.speed[-1][1]) == (all_.speed[0][0], all_.speed[-1][1])
    total = sum((end - begin) * value for begin, end, value in few.speed)
    assert total == pytest.approx(sum((end - begin) * value for begin, end, value in all_.speed))
    assert [value for _, _, value in few.speed] == pytest.approx([10.0] * 5, rel=0.15)
