"""The figures for Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_spark.core import events as ev
from elastic_spark.core.gauges import MOST_NAMES, TABLE, Gauges
from elastic_spark.core.metrics import summarise

GOLDEN = Path(__file__).parents[1] / "goldens" / "churn.jsonl"
LINE = re.compile(r'elastic_spark_(\w+)(\{(?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*\})? (\S+)')


def values(events):
    """``{name with labels: value}``; each line must be of the format."""
    gauges = Gauges()
    for event in events:
        gauges.add(event)
    text = gauges.text()
    assert text.endswith("\n")
    found, typed = {}, set()
    for line in text.splitlines():
        if line.startswith("#"):
            typed.add(line.split()[2].removeprefix("elastic_spark_"))
            continue
        match = LINE.fullmatch(line)
        assert match, line
        name = re.sub(r"_(sum|count)$", "", match[1])
        assert name in typed, "TYPE comes before its samples"
        found[match[1] + (match[2] or "")] = float(match[3])
    return found


def test_they_agree_with_the_summary():
    with GOLDEN.open() as lines:
        log = list(ev.read_log(lines))
    told, figures = values(log), summarise(log)
    assert told["step"] == figures["steps"]
    assert told["steps_rolled_back_total"] == figures["steps_lost"]
    assert told["rows_committed_total"] == figures["rows_reported"]
    assert told["workers"] == figures["world_sizes"][-1][1]
    assert told["changes_total"] == len(figures["changes"])
    assert told["checkpoints_written_total"] == len(figures["checkpoints"])
    assert told["checkpoint_step"] == figures["checkpoints"][-1]["step"]
    assert told["checkpoints_rejected_total"] == figures["checkpoints_rejected"]
    assert {name: told[f'workers_lost_total{{cause="{name}"}}'] for name in figures["losses"]} == figures["losses"]
    pauses = [change["pause_s"] for change in figures["changes"] if change["pause_s"] is not None]
    assert told["pause_seconds_count"] == len(pauses)
    assert told["pause_seconds_sum"] == pytest.approx(sum(pauses))


def test_waits_and_alarms():
    steps = ev.StepsCommitted(at=2, generation=1, first_step=1, times=(1, 2), wait_s=0.25)
    alarm = ev.GuardAlarm(at=3, generation=1, step=2, key="loss", kind="jump", value=9.0, suspect_from=2)
    told = values([steps, steps, alarm])
    assert told["data_wait_seconds_total"] == 0.5
    assert told['guard_alarms_total{kind="jump"}'] == 1


def test_nothing_has_happened_yet():
    told = values([])
    assert told["steps_committed_total"] == 0
    assert "workers" not in told


def test_names_of_others_are_escaped_and_bounded():
    evil = 'a"b\\c\nd} 1'
    log = [ev.MetricsReported(at=1, step=1, values={evil: 2.5, "bad": float("nan"), "big": float("inf")})]
    log += [ev.MetricsReported(at=1, step=1, values={f"m{i}": i}) for i in range(500)]
    log += [ev.MetricsReported(at=1, step=1, values={evil: 3})]
    told = values(log)
    assert told['metric{name="a\\"b\\\\c\\nd} 1"}'] == 3, "a name that is known goes on"
    assert told['metric{name="big"}'] == float("inf")
    assert sum(name.startswith("metric") for name in told) == MOST_NAMES


def test_the_table_names_each_once_and_counters_as_counters():
    names = [name for name, _, _ in TABLE]
    assert len(set(names)) == len(names)
    assert all((kind == "counter") == name.endswith("_total") for name, kind, _ in TABLE)
