"""The figures, against expectations computed by hand and against naive counters."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.core import events as ev
from elastic_spark.core.audit import expected_rows
from elastic_spark.core.metrics import (
    PauseMeter,
    RateMeter,
    Summary,
    goodput,
    ideal_rates,
    percentile,
    recovery_time,
    summarise,
)


def started(at=0.0, **fields):
    fields = {
        "job_name": "j",
        "job_id": "id",
        "run_id": "r",
        "num_proc": 4,
        "min_num_proc": 1,
        "max_num_proc": 8,
    } | fields
    return ev.JobStarted(at=at, **fields)


def frozen(rows=100, batch=10, name="train", at=0.0):
    return ev.DatasetFrozen(
        at=at,
        dataset=name,
        rows=rows,
        digest="d",
        lanes=2,
        seed=0,
        global_batch=batch,
        steps_per_epoch=math.ceil(rows / batch),
        row_groups=1,
    )


def formed(generation, size, at, cause="executor lost", **fields):
    members = tuple(f"w{i}" for i in range(size))
    fields = {"joined": (), "lost": (), "left": (), "source": "w0", "step": 0} | fields
    return ev.GenerationFormed(at=at, generation=generation, members=members, cause=cause, **fields)


def ending(generation, at, cause="executor lost"):
    return ev.GenerationEnding(at=at, generation=generation, cause=cause)


def steps(generation, first, times, epoch=0, offset=None, rows=None, name="train"):
    cursors = {} if epoch is None else {name: (epoch, first - 1 if offset is None else offset)}
    rows = 10 * len(times) if rows is None else rows
    return ev.StepsCommitted(
        at=times[-1] if times else 0.0,
        generation=generation,
        first_step=first,
        times=tuple(times),
        cursors=cursors,
        rows=rows,
    )


def rolled_back(frm, to, at=0.0):
    return ev.StepsRolledBack(at=at, from_step=frm, to_step=to, cause="all lost")


# One epoch of 100 rows in 10 steps at 4 workers, one step a second; at 5.3 a worker is lost, the next step comes at 8
# with 3 workers. Step 10 is committed at 12, is undone, and made again at 14.
STORY = [
    started(config={"a": 1}),
    frozen(),
    formed(1, 4, at=0.5, cause="start"),
    ev.GenerationRunning(at=0.6, generation=1, seconds=0.1),
    steps(1, 1, [1.0, 2.0, 3.0]),
    steps(1, 4, [4.0, 5.0]),
    ev.WorkerLost(at=5.3, worker="w3", cause="executor lost"),
    ending(1, at=5.3),
    formed(2, 3, at=5.4, lost=("w3",)),
    ev.GenerationRunning(at=5.9, generation=2, seconds=0.5),
    steps(2, 6, [8.0, 9.0, 10.0, 11.0, 12.0]),
    ev.CheckpointWritten(at=12.0, step=9, uri="file:/c/9", digest="abc", bytes=7, seconds=0.25, world_size=3),
    rolled_back(10, 9, at=12.5),
    steps(2, 10, [14.0]),
    ev.Warned(at=14.0, message="look"),
    ev.JobFinished(at=15.0, status="FINISHED"),
]


def test_story_by_hand():
    out = summarise(STORY)
    assert out["status"] == "FINISHED"
    assert out["run_id"] == "r"
    assert out["job_id"] == "id"
    assert out["job_name"] == "j"
    assert out["world_sizes"] == [(0.5, 4), (5.4, 3)]
    assert out["changes"] == [
        {
            "generation": 2,
            "cause": "executor lost",
            "at": 5.4,
            "from_size": 4,
            "to_size": 3,
            "joined": [],
            "lost": ["w3"],
            "left": [],
            "restored_from": None,
            "form_s": 0.5,
            "pause_s": 3.0,  # 5 -> 8
            "rto_s": 3.0,  # 5 steps in the 6 s after 8 is more than 0.9 * 3/4 of one a second
            "rto_absolute_s": None,  # and less than 0.9 of it
        }
    ]
    assert (out["pause_s_p50"], out["pause_s_p95"], out["pause_s_max"]) == (3.0, 3.0, 3.0)
    assert (out["rows_total"], out["rows_once"], out["rows_twice"], out["rows_never"], out["rows_open"]) == (
        100,
        100,
        0,
        0,
        0,
    )
    assert out["rows_reported"] == 110
    assert out["rows_unexplained"] == 0
    assert out["rows_unreported"] == 0
    assert (out["steps"], out["steps_lost"], out["rows_lost"], out["seconds_lost"]) == (10, 1, 10, 1.0)
    assert out["checkpoints"] == [
        {"at": 12.0, "step": 9, "uri": "file:/c/9", "digest": "abc", "bytes": 7, "seconds": 0.25, "world_size": 3}
    ]
    assert out["losses"] == {"executor lost": 1}
    assert out["warnings"] == 1
    assert out["wall_s"] == 15.0
    assert out["resumed_from"] is None
    assert out["epochs"] == [
        {
            "dataset": "train",
            "epoch": 0,
            "rows": 100,
            "finished": True,
            "rows_total": 100,
            "rows_once": 100,
            "rows_twice": 0,
            "rows_never": 0,
            "rows_open": 0,
            "rows_inherited": 0,
            "digest": None,  # the workers of this story told no hashes
        }
    ]
    # 9 steps after the first commit; from 1 to 14, both sizes sustain 1 step a second: 13 ideal steps
    assert out["goodput"] == pytest.approx(9 / 13)


def test_the_log_alone_gives_the_same_figures():
    lines = [ev.to_json(event) for event in STORY]
    assert summarise(ev.read_log(lines)) == summarise(STORY)
    json.dumps(summarise(STORY), allow_nan=False)


def test_rpo_is_from_the_state_of_a_checkpoint_to_the_manifest_of_the_next():
    def written(at, seconds):
        return ev.CheckpointWritten(at=at, step=1, uri="", digest="", bytes=1, seconds=seconds, world_size=1)

    running = [ev.GenerationRunning(at=at, generation=at, seconds=0.1) for at in (2, 3)]
    assert summarise([started(), *running])["rpo_s_max"] is None
    assert summarise([started(), *running, written(10, 1.0)])["rpo_s_max"] == 8.0
    assert summarise([started(), *running, written(10, 1.0), written(15, 0.5), written(24, 1)])["rpo_s_max"] == 9.5
    assert summarise([started(), written(9, 1.0), written(10, 1.0)])["rpo_s_max"] == 2.0
    again = [started(at=100.0), ev.GenerationRunning(at=101.0, generation=1, seconds=0.1), written(104, 1.0)]
    assert summarise([started(), *running, written(10, 1.0), *again])["rpo_s_max"] == 8.0


def test_nothing_yet():
    out = summarise([])
    assert out["status"] == "RUNNING"
    assert out["steps"] == 0
    assert out["goodput"] is None
    assert out["pause_s_max"] is None
    assert out["job_name"] == ""
    assert out["wall_s"] == 0.0
    assert out["epochs"] == []
    assert summarise([frozen()])["epochs"] == []


def test_incremental_is_the_same_as_whole():
    summary = Summary()
    for event in STORY:
        summary.result()
        summary.add(event)
    assert summary.result() == summarise(STORY)


def test_percentile_is_nearest_rank():
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.5) == 1.0
    assert percentile(list(range(1, 21)), 0.95) == 19
    assert percentile([5.0], 0.0) == 5.0


def test_expected_rows():
    even = frozen(rows=25, batch=10)
    assert [expected_rows(even, i) for i in range(-1, 4)] == [0, 10, 10, 5, 0]


# --- rows audit ------------------------------------------------------------------------------------------------------


def test_twice_without_a_roll_back_and_never_in_a_finished_epoch():
    log = [
        started(),
        frozen(rows=30, batch=10),
        formed(1, 2, at=0.0),
        steps(1, 1, [1.0, 2.0], epoch=0, offset=0),
        steps(1, 3, [3.0], epoch=0, offset=1),  # offset 1 again, offset 2 never
        steps(1, 4, [4.0], epoch=1, offset=0),
    ]
    out = summarise(log)
    assert (out["rows_total"], out["rows_once"], out["rows_twice"], out["rows_never"], out["rows_open"]) == (
        40,
        20,
        10,
        10,
        20,
    )
    first, second = out["epochs"]
    assert first["finished"]
    assert first["rows_never"] == 10
    assert first["rows_twice"] == 10
    assert not second["finished"]
    assert second["rows_open"] == 20


def test_a_skipped_epoch_is_never_trained():
    out = summarise([started(), frozen(rows=10, batch=10), steps(1, 1, [1.0], 0, 0), steps(1, 2, [2.0], 2, 0)])
    assert [(e["epoch"], e["rows_never"]) for e in out["epochs"]] == [(0, 0), (1, 10), (2, 0)]


def test_roll_back_cuts_within_an_event_and_across_events():
    log = [started(), frozen(), steps(1, 1, [1.0, 2.0, 3.0]), steps(1, 4, [4.0, 5.0]), rolled_back(5, 2)]
    out = summarise(log)
    assert (out["rows_total"], out["rows_open"], out["steps"], out["steps_lost"]) == (20, 80, 2, 3)
    assert (out["rows_lost"], out["seconds_lost"]) == (30, 3.0)
    everything = summarise([*log, rolled_back(2, 0)])
    assert (everything["steps"], everything["steps_lost"], everything["rows_lost"]) == (0, 5, 50)
    assert everything["seconds_lost"] == 4.0  # 3, and from the first to go (1) to the last (2)


def test_steps_that_no_report_told_of_count_as_lost_too():
    assert summarise([started(), steps(1, 1, [1.0]), rolled_back(4, 1)])["steps_lost"] == 3


def test_reported_rows_are_cross_checked():
    log = [started(), frozen(), steps(1, 1, [1.0], rows=7), steps(1, 2, [2.0], rows=12), steps(1, 3, [3.0])]
    out = summarise(log)
    assert (out["rows_unexplained"], out["rows_unreported"], out["rows_reported"]) == (5, 0, 29)
    assert out["rows_once"] == 30  # the audit itself does not believe the reports


def test_reports_that_died_with_their_ranks_are_told_apart():
    incomplete = dataclasses.replace(steps(1, 1, [1.0], rows=7), missing=1)
    too_many = dataclasses.replace(steps(1, 2, [2.0], rows=11), missing=1)
    out = summarise([started(), frozen(), incomplete, too_many])
    assert (out["rows_unexplained"], out["rows_unreported"], out["rows_reported"]) == (1, 3, 18)


def test_stock_functions_and_unknown_data_sets_have_no_audit():
    out = summarise([started(), frozen(), steps(1, 1, [1.0], epoch=None, rows=9), steps(1, 2, [2.0], name="other")])
    assert out["rows_unexplained"] == 0
    assert out["rows_total"] == 0
    assert out["steps"] == 2
    assert summarise([steps(1, 1, [1.0], name="other"), rolled_back(1, 0)])["rows_lost"] == 0


def test_empty_event_of_steps_changes_nothing():
    out = summarise([started(), frozen(), steps(1, 1, [])])
    assert out["steps"] == 0
    assert out["rows_total"] == 0


# --- a second driver -------------------------------------------------------------------------------------------------


def test_second_driver_in_the_same_log_undoes_what_the_checkpoint_had_not():
    log = [
        started(),
        frozen(rows=40),
        formed(1, 2, at=0.0),
        steps(1, 1, [1.0, 2.0, 3.0]),
        started(at=10.0, resumed_from="c2", resumed_step=2, resumed_cursors={"train": (0, 2)}),
        frozen(rows=40, at=10.0),
        rolled_back(3, 2, at=10.0),  # said twice, counted once
        formed(1, 3, at=11.0, cause="resumed"),  # generations may start again at 1
        steps(1, 3, [12.0, 13.0]),
    ]
    out = summarise(log)
    assert (out["rows_once"], out["rows_twice"], out["rows_never"], out["rows_inherited"]) == (40, 0, 0, 0)
    assert (out["steps"], out["steps_lost"], out["rows_lost"]) == (4, 1, 10)
    assert out["resumed_from"] == "c2"
    assert out["resumed_step"] == 2
    assert [(c["cause"], c["from_size"], c["to_size"], c["pause_s"]) for c in out["changes"]] == [
        ("resumed", 2, 3, 9.0)
    ]


def test_what_a_killed_driver_had_not_written_is_inherited_if_a_checkpoint_holds_it():
    """The log tells of 3 steps, the checkpoint holds 5: 2 batches are taken from it. A jump beyond is still seen."""
    first = [started(), frozen(rows=80), formed(1, 2, at=0.0, cause="start"), steps(1, 1, [1.0, 2.0, 3.0])]
    again = started(at=10.0, resumed_from="c5", resumed_step=5, resumed_cursors={"train": (0, 5)})
    out = summarise([*first, again, formed(1, 2, at=11.0, cause="start"), steps(1, 6, [12.0, 13.0, 14.0])])
    assert (out["rows_once"], out["rows_inherited"], out["rows_never"], out["steps"]) == (60, 20, 0, 8)
    assert [c["cause"] for c in out["changes"]] == ["resumed"]
    out = summarise([*first, again, steps(1, 6, [12.0, 13.0], offset=6)])
    assert (out["rows_inherited"], out["rows_never"]) == (20, 10)
    # without cursors in the event, the first step after the resume gives them
    blind = started(at=10.0, resumed_from="c5", resumed_step=5)
    out = summarise([*first, blind, steps(1, 6, [12.0]), steps(1, 7, [13.0]), rolled_back(7, 4), steps(1, 5, [14.0])])
    assert (out["rows_once"], out["rows_inherited"], out["rows_open"]) == (40, 10, 30)
    assert summarise([*first, blind, rolled_back(5, 0)])["rows_inherited"] == 0
    other = started(at=10.0, resumed_from="c5", resumed_step=5, resumed_cursors={"other": (0, 5)})
    assert summarise([*first, other])["rows_inherited"] == 0


def test_second_driver_that_lost_nothing():
    log = [started(), steps(1, 1, [1.0]), started(at=5.0, resumed_from="c1", resumed_step=1), steps(1, 2, [6.0])]
    assert summarise(log)["steps_lost"] == 0


def test_roll_backs_to_the_same_step_count_each_where_steps_lie_between():
    again = [steps(1, 2, [2.0, 3.0]), rolled_back(3, 1)]
    assert summarise([started(), steps(1, 1, [1.0]), *again, *again])["steps_lost"] == 4


@pytest.mark.parametrize("cursors", [{"train": (1, 2)}, {}])
def test_second_driver_with_a_log_of_its_own(cursors):
    """What the former driver trained is inherited: not counted, and not called lost."""
    log = [
        started(resumed_from="c", resumed_step=6, resumed_cursors=cursors),
        frozen(rows=40),
        steps(1, 7, [1.0, 2.0], 1, 2),
    ]
    out = summarise(log)
    assert (out["rows_once"], out["rows_inherited"], out["rows_never"], out["rows_open"]) == (20, 20, 0, 0)
    assert out["steps"] == 8
    assert out["steps_lost"] == 0


def test_a_cursor_that_jumps_on_resume_is_seen():
    log = [started(resumed_step=6, resumed_cursors={"train": (0, 1)}), frozen(rows=40), steps(1, 7, [1.0, 2.0], 0, 2)]
    assert summarise(log)["rows_never"] == 10


# --- pauses ----------------------------------------------------------------------------------------------------------


def test_two_changes_in_one_gap_share_it():
    log = [
        formed(1, 4, at=0.0),
        steps(1, 1, [1.0]),
        ending(1, at=1.5),
        formed(2, 3, at=1.6),
        ending(2, at=1.7),
        ending(2, at=1.8),
        formed(3, 2, at=2.0),
        steps(3, 2, [4.0]),
    ]
    assert [c["pause_s"] for c in summarise(log)["changes"]] == [3.0, 3.0]


def test_old_generation_goes_on_until_the_world_changes():
    """A join: notified at 2.5, two more steps (one slow) before the change, and a quick first step after it."""
    log = [
        formed(1, 2, at=0.0),
        steps(1, 1, [1.0, 2.0]),
        ending(1, at=2.5, cause="join"),
        formed(2, 3, at=6.1, cause="join", joined=("w9",)),
        steps(1, 3, [3.0, 6.0]),  # reported late
        steps(2, 5, [7.0, 8.0]),
    ]
    change = summarise(log)["changes"][0]
    assert change["pause_s"] == 3.0
    assert change["joined"] == ["w9"]


def test_gaps_before_the_change_do_not_count():
    log = [formed(1, 2, at=0.0), steps(1, 1, [1.0, 9.0]), formed(2, 1, at=9.2), steps(2, 3, [10.0])]
    assert summarise(log)["changes"][0]["pause_s"] == 1.0


def test_a_change_that_never_steps_has_no_pause():
    out = summarise(
        [
            formed(1, 2, at=0.0),
            steps(1, 1, [1.0]),
            formed(2, 1, at=2.0),
            ev.GenerationRunning(at=2, generation=1, seconds=0),
        ]
    )
    assert out["changes"][0]["pause_s"] is None
    assert out["pause_s_p95"] is None
    no_steps_before = [formed(1, 2, at=0.0), formed(2, 1, at=2.0), steps(2, 1, [3.0, 4.0])]
    assert summarise(no_steps_before)["changes"][0]["pause_s"] is None


def test_pause_meter_tells_at_the_first_commit():
    meter = PauseMeter()
    closed = [meter.add(event) for event in STORY]
    assert [(p.generation, p.seconds, p.stopped_at, p.resumed_at) for found in closed for p in found] == [
        (2, 3.0, 5.0, 8.0)
    ]
    assert closed[10]


# --- rates -----------------------------------------------------------------------------------------------------------


def test_rate_meter():
    meter = RateMeter(window_s=4.0)
    assert meter.rows_s is None
    assert meter.steps_s is None
    meter.add(steps(1, 1, []))
    meter.add(steps(1, 1, [1.0]))
    assert meter.rows_s is None
    meter.add(steps(1, 2, [2.0, 3.0]))
    assert (meter.steps_s, meter.rows_s) == (1.0, 10.0)
    meter.add(steps(1, 4, [3.5, 4.0, 4.5, 5.0]))
    meter.add(steps(1, 8, [6.0]))
    assert meter.steps_s == pytest.approx(5 / 3)  # 1.0 has left the window: 3.0 .. 6.0


def test_recovery_time():
    before = [float(i) for i in range(6)]  # 1 step a second, stops at 5
    slow = [10.0 + 2 * i for i in range(4)]  # back at 10 with half the speed
    fast = [17.0 + i for i in range(8)]  # full speed from 16 on
    times = before + slow + fast
    assert recovery_time(times, 5, len(times), 1.0) == 16 - 5  # from 14 on 5 steps would take 6 s
    assert recovery_time(times, 5, len(times), 0.5) == 10 - 5
    assert recovery_time(times, 5, 12, 1.0) is None
    assert recovery_time(times, 0, len(times), 1.0) is None  # nothing before to compare with


def test_rto_in_the_summary_ends_at_the_next_change():
    log = [
        formed(1, 4, at=0.0),
        steps(1, 1, [float(i) for i in range(6)]),
        formed(2, 2, at=5.5),
        steps(2, 7, [8.0 + 2 * i for i in range(7)]),  # 8 .. 20 at half the speed
        formed(3, 4, at=20.5),
        steps(3, 14, [22.0 + i for i in range(9)]),
    ]
    first, second = summarise(log)["changes"]
    assert (first["rto_s"], first["rto_absolute_s"]) == (3.0, None)
    assert (second["rto_s"], second["rto_absolute_s"]) == (2.0, 2.0)
    assert summarise(log)["rto_s_p50"] == 2.0


def test_goodput_and_ideal_rates():
    assert ideal_rates({4: [1.0, 1.0, 5.0], 2: [1.0, 1.0], 1: [0.0, 0.0, 0.0]}) == {4: 1.0}
    assert goodput(5, [(0.0, 4)], 0.0, 10.0, {}) is None
    assert goodput(5, [(0.0, 4)], 0.0, 10.0, {4: 1.0}) == 0.5
    # 4 workers for 5 s at 1/s, then 2 (no rate of their own: 2 * 1/4) for 5 s: 7.5 ideal steps
    assert goodput(6, [(-1.0, 4), (5.0, 2)], 0.0, 10.0, {4: 1.0}) == pytest.approx(6 / 7.5)
    assert goodput(0, [(0.0, 4)], 3.0, 3.0, {4: 1.0}) is None


# --- random histories ------------------------------------------------------------------------------------------------


@st.composite
def histories(draw):
    """A log of churn and roll-backs by a job that makes one mistake now and then, and a naive count of its rows."""
    batch = draw(st.integers(1, 4))
    per_epoch = draw(st.integers(1, 8))
    rows = [batch] * (per_epoch - 1) + [draw(st.integers(1, batch))]
    log = [started(), frozen(rows=sum(rows), batch=batch), formed(1, 2, at=0.0)]
    trained = []  # trained[s - 1] = (epoch, offset) of step s
    now = 0.0
    for _ in range(draw(st.integers(1, 12))):
        now += 1
        if trained and draw(st.integers(0, 3)) == 0:
            to = draw(st.integers(0, len(trained)))
            log.append(ev.StepsRolledBack(at=now, from_step=len(trained), to_step=to, cause="x"))
            del trained[to:]
            continue
        follows = divmod(trained[-1][0] * per_epoch + trained[-1][1] + 1, per_epoch) if trained else (0, 0)
        jump = draw(st.sampled_from([0, 0, 0, -1, 1]))
        epoch, offset = divmod(max(0, follows[0] * per_epoch + follows[1] + jump), per_epoch)
        count = draw(st.integers(1, per_epoch - offset))
        reported = sum(rows[offset : offset + count])
        log.append(steps(1, len(trained) + 1, [now + i / 100 for i in range(count)], epoch, offset, rows=reported))
        trained += [(epoch, offset + i) for i in range(count)]
    return log, trained, rows


@settings(max_examples=300, deadline=None)
@given(histories())
def test_rows_agree_with_a_naive_counter(history):
    log, trained, rows = history
    out = summarise(log)
    ids = [sum(rows[:i]) for i in range(len(rows) + 1)]  # rows of offset i have the ids ids[i] .. ids[i + 1] - 1
    count = Counter((epoch, row) for epoch, offset in trained for row in range(ids[offset], ids[offset + 1]))
    seen = [epoch for epoch, _ in trained]
    universe = [
        (epoch, row) for epoch in range(min(seen, default=0), max(seen, default=-1) + 1) for row in range(sum(rows))
    ]
    done = {e for e in seen if e < max(seen) or (e, len(rows) - 1) in trained} | set(
        range(min(seen, default=0), max(seen, default=0))
    )
    assert out["rows_total"] == sum(count.values())
    assert out["rows_once"] == sum(1 for key in universe if count[key] == 1)
    assert out["rows_twice"] == sum(1 for key in universe if count[key] > 1)
    assert out["rows_never"] == sum(1 for key in universe if count[key] == 0 and key[0] in done)
    assert out["rows_open"] == sum(1 for key in universe if count[key] == 0 and key[0] not in done)
    assert out["steps"] == len(trained)
    assert out["rows_unexplained"] == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.001, 5.0), st.booleans()), min_size=1, max_size=30))
def test_pauses_agree_with_a_naive_search(gaps):
    """Every change's pause is the gap that encloses it."""
    now, generation, log, expected = 10.0, 1, [formed(1, 2, at=0.0), steps(1, 1, [10.0])], []
    for number, (gap, change) in enumerate(gaps):
        if change:
            generation += 1
            log += [ending(generation - 1, at=now + gap / 3), formed(generation, 2, at=now + gap / 2)]
            expected.append(now + gap - now)
        now += gap
        log.append(steps(generation, number + 2, [now]))
    assert [c["pause_s"] for c in summarise(log)["changes"]] == pytest.approx(expected)


def test_a_roll_back_cuts_through_events_that_were_joined():
    log = [started(), frozen(), *(steps(1, n, [float(n)]) for n in range(1, 8)), rolled_back(7, 3), steps(1, 4, [9.0])]
    out = summarise(log)
    assert (out["rows_once"], out["rows_twice"], out["rows_open"], out["steps"]) == (40, 0, 60, 4)
    assert (out["steps_lost"], out["rows_lost"], out["seconds_lost"]) == (4, 40, 4.0)


def test_alarms_of_the_guard_are_in_the_summary():
    alarm = ev.GuardAlarm(
        at=1.0, generation=1, step=4, key="loss", kind="not finite", value=float("nan"), suspect_from=4
    )
    assert summarise([alarm])["guard_alarms"] == ["loss is nan at step 4"]
