"""The log's lines: out and in again, strict JSON, and readers that survive newer logs."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.core import events as ev

KINDS = [
    item for item in vars(ev).values() if isinstance(item, type) and issubclass(item, ev.Event) and item is not ev.Event
]
TEXT = st.text(max_size=20)
BY_TYPE = {
    "str": TEXT,
    "bool": st.booleans(),
    "str | None": st.none() | TEXT,
    "int": st.integers(-(2**53), 2**53),
    "int | None": st.none() | st.integers(0, 255),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "float | None": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    "tuple[str, ...]": st.lists(TEXT, max_size=4).map(tuple),
    "tuple[float, ...]": st.lists(st.floats(0, 2e9), max_size=4).map(tuple),
    "Mapping[str, tuple[int, int]]": st.dictionaries(TEXT, st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3),
    "Mapping[str, float]": st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    "Mapping[str, str]": st.dictionaries(TEXT, TEXT, max_size=3),
    "Mapping[str, Any]": st.dictionaries(TEXT, st.tuples(st.integers(0, 9)) | TEXT | st.booleans(), max_size=3),
}


@st.composite
def events(draw):
    kind = draw(st.sampled_from(KINDS))
    return kind(**{item.name: draw(BY_TYPE[str(item.type)]) for item in dataclasses.fields(kind)})


@settings(max_examples=300, deadline=None)
@given(events())
def test_a_line_and_back(event):
    line = ev.to_json(event)
    assert "\n" not in line
    assert ev.from_json(line) == event


def test_every_kind_is_known_by_its_name():
    assert len(KINDS) >= 20
    assert all(ev.Event._classes[kind.__name__] is kind for kind in KINDS)
    assert all(typing.get_type_hints(kind) for kind in KINDS)


def test_numbers_that_json_does_not_know_become_strings():
    values = {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1.0}
    line = ev.to_json(ev.MetricsReported(at=1.0, step=1, values=values))
    assert json.loads(line, parse_constant=pytest.fail)["values"] == {"a": "nan", "b": "inf", "c": "-inf", "d": 1.0}


def test_objects_become_their_text():
    line = ev.to_json(
        ev.JobStarted(
            at=1.0,
            job_name="j",
            job_id="i",
            run_id="",
            num_proc=1,
            min_num_proc=1,
            max_num_proc=1,
            config={"path": pytest, 3: [1, (2, None)], "on": True},
        )
    )
    found = ev.from_json(line)
    assert found.config == {"path": str(pytest), "3": (1, (2, None)), "on": True}


@pytest.mark.parametrize(
    "line",
    ["", "{", "3", "null", "[]", "{}", '{"event": "FromTheFuture", "at": 1}', '{"event": "Warned"}', '{"event": 3}'],
)
def test_torn_unknown_and_incomplete_lines_are_passed_over(line):
    good = ev.to_json(ev.Warned(at=1.0, message="m"))
    assert ev.from_json(line) is None
    assert list(ev.read_log([line, good, line])) == [ev.Warned(at=1.0, message="m")]


def test_fields_of_a_newer_version_are_passed_over():
    assert ev.from_json('{"event":"Warned","at":1.0,"message":"m","colour":"red"}') == ev.Warned(at=1.0, message="m")
