"""What a tracking store is told of each event."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.core import events as ev
from elastic_spark.core.records import MOST, Recorder


def formed(generation, size, at=0.0, step=0, **fields):
    fields = {"joined": (), "lost": (), "left": (), "source": "w0", "cause": "executor lost"} | fields
    members = tuple(f"w{i}" for i in range(size))
    return ev.GenerationFormed(at=at, generation=generation, members=members, step=step, **fields)


def steps(first, times, generation=1, rows=0, **fields):
    return ev.StepsCommitted(
        at=times[-1], generation=generation, first_step=first, times=tuple(times), rows=rows, **fields
    )


def loss(step, value=1.0, at=0.0):
    return ev.MetricsReported(at=at, step=step, values={"loss": value})


def told(recorder, *events):
    return [record for event in events for record in recorder.add(event)]


def points(records, key):
    return [(r["step"], r["value"]) for r in records if r["kind"] == "metric" and r["key"] == key]


def tags(records):
    return {r["key"]: r["value"] for r in records if r["kind"] == "tag"}


def test_metrics_at_their_step_and_time():
    assert told(Recorder(), loss(3, 0.5, at=1.25)) == [
        {"kind": "metric", "key": "loss", "value": 0.5, "step": 3, "at_ms": 1250}
    ]


def test_nan_infinity_and_nonsense_stay_json():
    values = {"a": float("nan"), "b": float("-inf"), "c": "nan", "d": "text", "e": None}
    records = told(Recorder(), ev.MetricsReported(at=0.0, step=1, values=values))
    assert [(r["key"], r["value"]) for r in records] == [("a", "nan"), ("b", "-inf"), ("c", "nan")]
    json.dumps(records, allow_nan=False)


def test_replayed_steps_are_marked_and_the_rest_goes_on():
    records = told(Recorder(), loss(1), loss(2, 2.0), loss(2, 2.5), loss(3, 3.0))
    assert points(records, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert points(records, "replay/loss") == [(2, 2.5)]


def test_a_resumed_run_goes_on_where_it_was():
    recorder = Recorder(newest_step=57)
    records = told(recorder, loss(51), loss(57), loss(58))
    assert points(records, "replay/loss") == [(51, 1.0), (57, 1.0)]
    assert points(records, "loss") == [(58, 1.0)]
    assert recorder.newest_step == 58


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_step_once_and_growing(reported):
    records = told(Recorder(), *(loss(step) for step in reported))
    seen = [step for step, _ in points(records, "loss")]
    assert seen == sorted(set(seen))
    assert len(records) == len(reported)
    assert (seen[-1] if seen else 0) == max(reported, default=0)


def test_changes_become_tags_with_their_pause():
    log = [
        formed(1, 4, joined=("w0", "w1", "w2", "w3"), cause="start"),
        steps(1, [1.0, 2.0]),
        formed(2, 3, at=2.5, step=2, lost=("w3",), restored_from="c"),
        steps(3, [4.0], generation=2),
    ]
    records = told(Recorder(), *log)
    text = "gen 2: 4 -> 3 workers (executor lost) at step 2; lost w3; restored from c, pause 2.00 s"
    assert tags(records)["elastic.change.001"] == text
    assert tags(records)["elastic.change.count"] == "1"
    assert tags(records)["elastic.world_size"] == "3"
    assert points(records, "elastic/pause_s") == [(3, 2.0)]
    assert points(records, "elastic/world_size") == [(1, 4.0), (3, 3.0)]
    assert points(records, "elastic/generation") == [(1, 1.0), (3, 2.0)]


def test_a_thousand_changes_are_counted_not_tagged():
    log = [formed(1, 2), steps(1, [1.0])]
    for n in range(2, MOST + 12):
        log += [formed(n, 2, at=n - 0.5), steps(n, [float(n)], generation=n)]
    found = tags(told(Recorder(), *log))
    assert found["elastic.change.count"] == str(MOST + 10)
    assert len([key for key in found if key.startswith("elastic.change.")]) == MOST + 1


def test_rates_once_per_tick():
    recorder = Recorder()
    assert recorder.tick(0.0) == []
    told(recorder, formed(1, 2), steps(1, [1.0], rows=8, cursors={"train": (0, 0)}))
    first = recorder.tick(1.0)
    assert [r["key"] for r in first] == ["elastic.step"]  # the world's size at step 1 is told already, rates need two
    records = told(recorder, steps(2, [2.0, 3.0], rows=16, cursors={"train": (1, 1)}))
    assert points(records, "elastic/epoch") == [(3, 1.0)]
    second = recorder.tick(3.0)
    assert points(second, "perf/steps_per_s") == [(3, 1.0)]
    assert points(second, "perf/rows_per_s") == [(3, 8.0)]
    assert points(second, "perf/rows_per_s_per_worker") == [(3, 4.0)]
    assert points(second, "elastic/world_size") == [(3, 2.0)]
    assert tags(second) == {"elastic.step": "3"}
    assert recorder.tick(4.0) == []


def test_rates_without_rows_or_members():
    recorder = Recorder()
    told(recorder, steps(1, [1.0]), steps(2, [2.0]))
    assert [r["key"] for r in recorder.tick(2.0)] == ["elastic.step", "perf/steps_per_s"]
    assert told(recorder, ev.StepsCommitted(at=3.0, generation=1, first_step=3, times=())) == []


def test_checkpoints_data_and_roll_backs():
    recorder = Recorder()
    written = ev.CheckpointWritten(at=1.0, step=7, uri="u", digest="d", bytes=2_000_000, seconds=0.5, world_size=3)
    records = told(recorder, written)
    fields = {"step": 7, "uri": "u", "digest": "d", "bytes": 2_000_000, "seconds": 0.5, "world_size": 3}
    assert records[0] == {"kind": "checkpoint", **fields}
    assert tags(records) == {"elastic.latest_checkpoint": "u", "elastic.latest_checkpoint_step": "7"}
    assert points(records, "checkpoint/megabytes") == [(7, 2.0)]
    frozen = ev.DatasetFrozen(
        at=0.0, dataset="train", rows=9, digest="sha", lanes=2, seed=1, global_batch=4, steps_per_epoch=3, row_groups=1
    )
    data = told(recorder, frozen)
    assert (data[0]["kind"], data[0]["digest"], data[0]["source"]["lanes"]) == ("dataset", "sha", 2)
    assert tags(data) == {"elastic.data.train": "sha"}
    back = told(recorder, ev.StepsRolledBack(at=2.0, from_step=9, to_step=7, cause="all lost"))
    assert tags(back)["elastic.rollback.001"] == "steps 8 to 9 undone: all lost"
    assert points(back, "elastic/steps_lost") == [(9, 2.0)]


def test_troubles_become_tags_and_their_output_texts():
    log = [
        ev.WorkerLost(at=0.0, worker="w1", cause="frozen", detail="silent for 4 s", tail="last words"),
        ev.WorkerLost(at=0.0, worker="w2", cause="process died"),
        ev.CheckpointRejected(at=0.0, uri="u", reason="torn"),
        ev.CheckpointSkipped(at=0.0, step=3, reason="slow"),
        ev.Warned(at=0.0, message="look", where="driver"),
        ev.Warned(at=0.0, message="here"),
        ev.UserFailed(at=0.0, worker="w3", rank=2, step=5, error="ValueError: x", traceback="Traceback ..."),
        ev.JobFinished(at=0.0, status="FAILED", error="ValueError: x"),
        ev.JobFinished(at=0.0, status="FINISHED"),
        ev.WorkerReady(at=0.0, worker="w9"),
    ]
    records = told(Recorder(), *log)
    found = tags(records)
    assert found["elastic.lost_worker.001"] == "w1: frozen. silent for 4 s"
    assert found["elastic.lost_worker.002"] == "w2: process died"
    assert found["elastic.checkpoint_rejected.001"] == "u: torn"
    assert found["elastic.checkpoint_skipped.001"] == "step 3: slow"
    assert found["elastic.warning.001"] == "look [driver]"
    assert found["elastic.warning.002"] == "here"
    assert found["elastic.failure.001"] == "w3, rank 2, step 5: ValueError: x"
    assert found["elastic.error"] == "ValueError: x"
    texts = {r["path"]: r["text"] for r in records if r["kind"] == "text"}
    assert texts == {"logs/w1.txt": "last words", "logs/failure-w3.txt": "Traceback ..."}


def test_start_tells_versions_and_where_it_resumed():
    start = {"job_name": "j", "job_id": "i", "run_id": "r", "num_proc": 2, "min_num_proc": 1, "max_num_proc": 2}
    recorder = Recorder()
    assert tags(told(recorder, ev.JobStarted(at=0.0, **start, versions={"torch": "2"}))) == {
        "elastic.version.torch": "2"
    }
    again = told(recorder, ev.JobStarted(at=0.0, **start, resumed_from="c", resumed_step=4))
    assert tags(again) == {"elastic.resumed_from": "c", "elastic.resumed_step": "4"}


def test_an_alarm_of_the_guard_is_a_numbered_tag():
    alarm = ev.GuardAlarm(
        at=1.0, generation=1, step=4, key="loss", kind="not finite", value=float("nan"), suspect_from=4
    )
    assert tags(told(Recorder(), alarm))["elastic.guard.001"] == "loss is nan at step 4"
