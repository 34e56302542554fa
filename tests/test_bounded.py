"""Calls that may never return."""

from __future__ import annotations

import threading
import time

import pytest

from elastic_spark.bounded import Bounded


def test_a_call_that_never_returns_is_left_behind_and_few_of_them_are() -> None:
    call, release = Bounded(most_left=2), threading.Event()
    assert call(lambda: 3, 5.0) == 3
    with pytest.raises(KeyError):
        call(lambda: {}["x"], 5.0)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="no answer within"):
            call(lambda: release.wait(60.0), 0.01)
    with pytest.raises(TimeoutError, match="2 earlier requests"):
        call(lambda: 3, 5.0)
    release.set()
    for thread in threading.enumerate():
        if thread.name == "elastic-spark-call":
            thread.join(10.0)
    assert call(lambda: 4, 5.0) == 4


def test_a_deadline_ends_the_call_that_is_under_way() -> None:
    call, release = Bounded(), threading.Event()
    timer = threading.Timer(0.2, lambda: setattr(call, "deadline", time.monotonic() + 0.3))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within \d+\."):
        call(lambda: release.wait(60.0), 50.0)
    assert 0.4 < time.monotonic() - begin < 10.0
    release.set()
