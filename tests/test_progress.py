"""What the terminal shows."""

from __future__ import annotations

import io
import os
import pty
from pathlib import Path

import pytest

from elastic_spark.core import events as ev
from elastic_spark.outlet import Outlet
from elastic_spark.progress import Progress

GOLDEN = Path(__file__).parent / "goldens" / "churn.jsonl"


@pytest.fixture
def golden():
    with GOLDEN.open() as lines:
        return list(ev.read_log(lines))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(events, stream=None, **options):
    stream = stream if stream is not None else io.StringIO()
    progress = Progress(stream, **options)
    for event in events:
        progress.publish(event)
    return stream.getvalue()


def test_plain_lines_tell_the_story(golden):
    lines = shown(golden).splitlines()
    told = [line.split(" ", 1)[1] for line in lines]
    assert told[0] == "generation 1: 4 workers (start)"
    assert "worker w2 lost: executor lost (executor 2 on 10.0.0.3 lost: worker lost)" in told
    assert "generation 2: 4 -> 3 workers (executor lost)" in told
    assert "training goes on after 0.34 s" in told
    assert "worker w1 will leave: decommission" in told
    assert "steps 198 to 229 undone: no survivor; restored" in told
    assert any(line.startswith("checkpoint file:") and "SHA-256 differs" in line for line in told)
    assert "warning: all workers lost; waiting for 1" in told
    assert told[-1] == "FINISHED"
    assert told[-2].startswith("epoch 3 batch 101/101 | step 303 | loss 0.09")
    assert "rows/s | 2 workers of 4 | generation 5: 3 -> 2 workers (all workers lost), pause 1.36 s" in told[-2]
    assert told[-2].endswith("ago")
    states = [line for line in told if " | step " in line]
    assert 3 <= len(states) <= 8  # 24 s of training, one every five seconds


def test_a_terminal_has_one_line_that_is_kept_up_to_date(golden):
    text = shown(golden, Terminal())
    assert "\r" in text
    kept = [line.rsplit("\r", 1)[-1] for line in text.split("\n")]
    assert any("generation 2: 4 -> 3 workers" in line for line in kept)
    assert kept[-2].endswith("FINISHED")
    assert all(len(part.rstrip()) < 120 for line in text.split("\n") for part in line.split("\r"))


def test_a_real_terminal(golden):
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        progress = Progress(stream)
        for event in golden[:30]:
            progress.publish(event)
        stream.write("\0")
    text = b""
    while not text.endswith(b"\0"):
        text += os.read(leader, 1 << 16)
    os.close(leader)
    text = text.decode()
    assert "\rsteps" not in text
    assert "generation 1: 4 workers" in text
    assert "\repoch 1 batch" in text.replace("\r\n", "\n")


def test_the_line_is_not_redrawn_more_often_than_asked():
    def committed(at, step):
        return ev.StepsCommitted(at=at, generation=1, first_step=step, times=(at,), rows=4)

    events = [committed(i / 100, i + 1) for i in range(1_000)]
    assert shown(events, Terminal(), interval_s=1.0).count("\r") == 10
    assert shown(events, interval_s=1.0).count("\n") == 2


def test_a_stock_function_without_data_or_metrics():
    events = [
        ev.StepsCommitted(at=float(i), generation=1, first_step=i, times=(float(i),), rows=0) for i in range(1, 12)
    ]
    last = shown(events).splitlines()[-1]
    assert last.split(" ", 1)[1] == "step 11 | 1.0 steps/s | 0 workers"


def test_values_that_are_not_numbers():
    metrics = ev.MetricsReported(at=1.0, step=1, values={"loss": float("nan"), "note": "x"})
    text = shown([metrics, ev.StepsCommitted(at=1.0, generation=1, first_step=1, times=(1.0,), rows=0)])
    assert "loss nan | note x" in text


def test_troubles_are_said():
    events = [
        ev.UserFailed(at=1.0, worker="w1", rank=0, step=3, error="ValueError: x", traceback="T"),
        ev.CheckpointSkipped(at=1.0, step=3, reason="slow storage"),
        ev.JobFinished(at=2.0, status="FAILED", error="Traceback\nValueError: x"),
    ]
    text = shown(events)
    assert "the training function raised on w1 (rank 0) at step 3: ValueError: x" in text
    assert "checkpoint at step 3 skipped: slow storage" in text
    assert text.rstrip().endswith("FAILED: ValueError: x")


def test_a_resumed_job_says_from_where():
    start = {"job_name": "j", "job_id": "i", "run_id": "r", "num_proc": 2, "min_num_proc": 1, "max_num_proc": 2}
    text = shown([ev.JobStarted(at=0.0, **start, resumed_from="file:/c/9", resumed_step=1_200)])
    assert "resumed from file:/c/9 at step 1,200" in text


def test_a_broken_stream_disturbs_nobody(golden):
    stream = io.StringIO()
    stream.close()
    progress = Progress(Outlet(stream))
    for event in golden:
        progress.publish(event)
