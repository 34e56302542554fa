"""The verdict in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_spark.core import events as ev
from elastic_spark.core.metrics import summarise
from elastic_spark.core.verdict import change_line, headline, seconds, verdict

GOLDEN = Path(__file__).parents[1] / "goldens" / "churn.jsonl"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.214, "0.21 s"),
        (12.34, "12.3 s"),
        (65.0, "1 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7380.0, "2 h 03 min"),
    ],
)
def test_seconds(value, text):
    assert seconds(value) == text


def lines(summary):
    return {label: (text, mark) for label, text, mark in verdict(summary)}


def test_a_recorded_log():
    with GOLDEN.open() as log:
        found = lines(summarise(ev.read_log(log)))
    assert found["status"] == ("FINISHED", "ok")
    assert found["workers"] == ("4 -> 3 -> 4 -> 3 -> 2", "")
    assert found["changes"][0] == "4: 1 x executor lost, 1 x join, 1 x drain, 1 x all workers lost"
    assert found["rows"] == ("77,100 once, 0 twice, 0 never", "ok")
    assert found["pause at a change"][0].startswith(
        "p50 0.34 s, p95 1.36 s, max 1.36 s; back at 90 % of its rate after "
    )
    assert found["lost by roll-back"] == ("32 steps, 8,036 rows, 1.92 s: trained again", "bad")
    assert found["checkpoints"][0] == "3 written, newest at step 303, RPO at worst 12.0 s, 1 rejected"
    assert found["data"][0] == "train: 25,700 rows, sha256:5e5e5e5e5e5e"
    assert found["goodput"][0].endswith("% of the ideal rate")


def test_the_headline_says_how_it_ended_and_what_became_of_the_rows():
    with GOLDEN.open() as log:
        line = headline(summarise(ev.read_log(log)))
    assert line == (
        "FINISHED: rows 77,100 once, 0 twice, 0 never; lost by roll-back 32 steps, 8,036 rows, 1.92 s: trained again; "
        "4 changes, pause p50 0.34 s, p95 1.36 s, max 1.36 s; back at 90 % of its rate after 0.34 s (p50)"
    )
    assert headline(summarise([])).startswith("RUNNING: rows not audited")


def test_an_empty_log():
    found = lines(summarise([]))
    assert found["status"] == ("RUNNING", "")
    assert found["workers"][0] == "never started"
    assert found["rows"] == ("not audited: the function reads its own data", "ok")
    assert found["pause at a change"][0] == found["goodput"][0] == found["data"][0] == found["resumed from"][0] == "-"
    assert found["lost by roll-back"] == ("nothing", "ok")
    assert found["checkpoints"][0] == "0 written"
    assert found["changes"][0] == "0"


def test_bad_news_is_marked():
    summary = summarise([])
    summary |= {
        "status": "FAILED",
        "error": "Traceback\nValueError: x\n",
        "rows_never": 3,
        "rows_open": 5,
        "rows_inherited": 7,
        "rows_unexplained": 11,
        "datasets": {"d": {"rows": 9, "digest": "x"}},
        "world_sizes": [(float(i), 2 + i % 3) for i in range(20)],
        "checkpoints_skipped": 2,
        "pause_s_p50": 1.0,
        "pause_s_p95": 1.0,
        "pause_s_max": 1.0,
    }
    found = lines(summary)
    assert found["status"] == ("FAILED: ValueError: x", "bad")
    parts = "0 once, 0 twice, 3 never, 5 in an unfinished epoch, 7 known from a checkpoint only"
    text = f"{parts}; 11 differ from what workers reported"
    assert found["rows"] == (text, "bad")
    assert found["workers"][0] == "2 -> 3, between 2 and 4"
    assert found["checkpoints"][0] == "0 written, 2 skipped"
    assert found["pause at a change"][0] == "p50 1.00 s, p95 1.00 s, max 1.00 s"


def test_change_line():
    change = {"generation": 3, "from_size": 4, "to_size": 3, "cause": "drain", "pause_s": None, "restored_from": None}
    assert change_line(change) == "gen 3: 4 -> 3 workers (drain)"
    text = "gen 3: 4 -> 3 workers (drain), restored from u, pause 0.50 s"
    assert change_line({**change, "pause_s": 0.5, "restored_from": "u"}) == text
