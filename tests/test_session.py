"""A worker's line to the driver."""

from __future__ import annotations

import os
import queue
import time
from typing import Any

import pytest

from elastic_spark.errors import ProtocolError
from elastic_spark.worker import collective
from elastic_spark.worker.commits import Commit, Drawn
from elastic_spark.worker.session import MOST_IN_MESSAGE, MOST_UNREAD, WorkerSession


class Line:
    """Stands for the channel; ``said`` is what the driver would read."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.coming: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        self.said.append(message)

    def receive(self, limit_s: float) -> tuple[dict[str, Any], bytes] | None:
        try:
            message = self.coming.get(timeout=0.001)
        except queue.Empty:
            return None
        if message is None:
            raise ProtocolError("closed")
        return message, b""

    def reports(self) -> int:
        return sum(len(message["reports"]) for message in self.said if message["type"] == "progress")

    def heartbeats(self) -> int:
        return sum(message["type"] == "heartbeat" for message in self.said)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_driver_that_reads_nothing_is_sent_no_more_than_the_kernel_holds_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its connection counts as dead after two minutes, and each worker of a driver that was paused ends itself."""
    monkeypatch.setattr(collective, "waits_s", lambda: 0.0)
    monkeypatch.setattr(collective, "in_native_init", lambda: False)
    monkeypatch.setattr("elastic_spark.worker.session.HEARTBEAT_S", 0.001)
    line = Line()
    session = WorkerSession(line, {})  # type: ignore[arg-type]
    session.open()
    made = 0

    def commit() -> None:
        nonlocal made
        session.committed(Commit(made, 1.0, {"train": [Drawn(0, made, 8, 1)]}, {}, 0.1, 0.0))
        made += 1

    while line.reports() < MOST_UNREAD:
        commit()
        told = made
        wait_until(lambda told=told: line.reports() == told)
    for _ in range(5 * MOST_UNREAD):
        commit()
    before = line.heartbeats()
    time.sleep(0.2)  # as nothing is what is waited for
    assert line.reports() == MOST_UNREAD
    assert line.heartbeats() <= before + 1
    line.coming.put({"type": "taken", "generation": -1, "count": MOST_UNREAD})
    wait_until(lambda: line.reports() == made)
    line.coming.put({"type": "taken", "generation": -1, "count": made - MOST_UNREAD})
    wait_until(lambda: line.heartbeats() > before + 1)
    session._stopping.set()
    line.coming.put(None)
    session._link.join(20.0)


def test_a_driver_that_reads_nothing_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "waits_s", lambda: 0.0)
    monkeypatch.setattr(collective, "in_native_init", lambda: False)
    monkeypatch.setattr("elastic_spark.worker.session.UNREAD_LIMIT_S", 0.1)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    session = WorkerSession(Line(), {})  # type: ignore[arg-type]
    session.committed(Commit(0, 1.0, {"train": [Drawn(0, i, 8, 1) for i in range(MOST_UNREAD)]}, {}, 0.1, 0.0))
    session.open()
    session._link.join(20.0)
    assert codes == [1]


def test_all_that_was_made_while_the_driver_stood_still_goes_in_messages_of_a_size() -> None:
    line = Line()
    session = WorkerSession(line, {})  # type: ignore[arg-type]
    drawn = [Drawn(0, i, 8, 1) for i in range(2 * MOST_IN_MESSAGE + 1)]
    session.committed(Commit(0, 1.0, {"train": drawn}, {}, 0.1, 0.0))
    session._flush()
    assert [len(message["reports"]) for message in line.said] == [MOST_IN_MESSAGE, MOST_IN_MESSAGE, 1]
