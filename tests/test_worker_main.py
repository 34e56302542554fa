"""What a worker adds to an error that its user could not make sense of."""

from __future__ import annotations

import pytest

from elastic_spark.worker import collective, main


def advice(error: Exception) -> str:
    main._advise(error)
    return "".join(getattr(error, "__notes__", []))


def test_who_catches_a_failed_collective_is_told_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Horovod raises after that is an AssertionError without a word."""
    monkeypatch.setattr(collective, "last_collective_error", lambda: "Connection closed by peer")
    told = advice(AssertionError())
    assert "a collective had failed (Connection closed by peer)" in told
    assert "it is for @hvd.elastic.run" in told


def test_other_errors_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "last_collective_error", lambda: None)
    assert advice(AssertionError()) == ""
