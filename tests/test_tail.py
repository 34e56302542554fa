"""A log that is read while it is written."""

from __future__ import annotations

from elastic_spark.core import events as ev
from elastic_spark.tail import Tail


def lines(*messages):
    return "".join(ev.to_json(ev.Warned(at=1.0, message=message)) + "\n" for message in messages)


def messages(tail):
    return [event.message for event in tail.read()]


def test_each_event_comes_once_and_when_its_line_is_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert messages(tail) == []
    whole = lines("one", "zwei ü", "three")
    for end in range(0, len(whole.encode()), 7):
        path.write_bytes(whole.encode()[:end])
        list(tail.read())
    path.write_bytes(whole.encode())
    assert messages(tail) == ["three"]
    path.write_bytes((whole + lines("four")).encode())
    assert messages(tail) == ["four"]
    assert messages(tail) == []


def test_the_past_may_be_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(lines("past"))
    tail = Tail(path, from_end=True)
    assert messages(tail) == []
    with path.open("a") as file:
        file.write(lines("new"))
    assert messages(tail) == ["new"]


def test_a_log_that_takes_its_place_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(lines("past", "past"))
    tail = Tail(path, from_end=True)
    path.rename(tmp_path / "old.jsonl")
    assert messages(tail) == []
    path.write_text(lines("a", "new", "one"))
    assert messages(tail) == ["a", "new", "one"]
