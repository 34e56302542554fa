"""When a rank saves, what it waits for, and what it says of it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_spark.errors import StorageFailed
from elastic_spark.worker import saver as module
from elastic_spark.worker.memory import SnapshotMemory
from elastic_spark.worker.saver import Saver


class State:
    """As much of ElasticState as a saver needs."""

    def __init__(self, memory: SnapshotMemory) -> None:
        self.memory, self.step, self.is_dirty = memory, 0, False

    def for_checkpoint(self, *, late: bool = False) -> tuple[Any, dict[str, Any]]:
        body = {"state": {"step": self.step, "cursors": {}}}
        return self.memory.write(self.step, body, {"w": torch.ones(4)}), {"random": {}}


class Rank:
    """A saver in a folder of its own; ``said`` is what it told the driver."""

    def __init__(self, folder: Path) -> None:
        self.said: list[dict[str, Any]] = []
        memory = SnapshotMemory()
        config = {"rpo_target_s": 10.0, "ckpt_budget": 0.01, "checkpoint_uri": str(folder / "store")}
        self.saver = Saver(self, config, lambda: None, memory)  # type: ignore[arg-type]
        self.state = State(memory)

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        self.said.append(message)

    def commit(self, *, asked: bool = False) -> bool:
        self.state.step += 1
        return self.saver.consider(self.state, 1, asked=asked, late=False)  # type: ignore[arg-type]

    def wait(self) -> None:
        """Until nothing is being written."""
        deadline = time.monotonic() + 30.0
        while self.saver._writer.busy:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def written(self) -> list[int]:
        return [message["part"]["step"] for message in self.said if message["type"] == "checkpoint"]

    def slow_down(self, seconds: float) -> None:
        write = self.saver._store.write_part

        def slow(*arguments: Any, **keywords: Any) -> Any:
            time.sleep(seconds)
            return write(*arguments, **keywords)

        self.saver._store.write_part = slow  # type: ignore[method-assign]


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_the_end_waits_for_a_write_that_its_last_commit_began(rank: Rank) -> None:
    rank.slow_down(0.3)
    rank.saver.begin(1, "t", time.monotonic() - 20.0)
    rank.commit()
    rank.saver.last(rank.state)  # type: ignore[arg-type]
    assert rank.written() == [1]


@pytest.mark.parametrize("often", [1, 3, 4])
def test_the_end_is_written_again_where_that_write_has_failed(
    rank: Rank, often: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    write, tries = rank.saver._store.write_part, []

    def fails(*arguments: Any, **keywords: Any) -> Any:
        tries.append(keywords["token"])
        if len(tries) <= often:
            time.sleep(0.1)
            raise StorageFailed("away")
        return write(*arguments, **keywords)

    rank.saver._store.write_part = fails  # type: ignore[method-assign]
    rank.saver.begin(1, "t", time.monotonic() - 20.0)
    rank.commit()
    rank.saver.last(rank.state)  # type: ignore[arg-type]
    expected = ["checkpoint_skipped"] * often + ["checkpoint"] * (often <= module.END_TRIES)
    assert [message["type"] for message in rank.said] == expected
    assert len(set(tries)) == len(tries) == len(expected), "a token is for one attempt"


def test_a_save_that_is_asked_for_while_another_one_is_written_is_made_after_it(rank: Rank) -> None:
    rank.slow_down(0.2)
    rank.saver.begin(1, "t", time.monotonic() - 20.0)
    assert rank.commit()
    assert not rank.commit(asked=True)
    rank.wait()
    assert rank.commit(asked=True)
    rank.wait()
    assert rank.written() == [1, 3]


def test_an_end_that_was_not_committed_is_not_written(rank: Rank) -> None:
    rank.saver.begin(1, "t", time.monotonic())
    rank.commit()
    rank.state.is_dirty = True
    rank.saver.last(rank.state)  # type: ignore[arg-type]
    assert rank.written() == []
    assert "stepped an optimizer after its last commit" in rank.said[0]["reason"]


def test_a_new_rank_0_keeps_the_target_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is lost every 9 s, and each new one has never been it: what is safe grows no older than the target."""
    clock = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    durable_at, ages = clock[0], []
    for number in range(7):
        rank = Rank(tmp_path / str(number))
        monkeypatch.setattr(rank.saver, "_submit", lambda *_, **__: ages.append(clock[0]))
        rank.saver.begin(number, "t", durable_at)
        for _ in range(90):
            clock[0] += 0.1
            before = len(ages)
            rank.commit()
            if len(ages) > before:
                durable_at = rank.saver._saved_at = clock[0]
    assert len(ages) >= 6
    assert max(b - a for a, b in itertools.pairwise([100.0, *ages])) <= 10.0


def test_a_write_that_failed_has_saved_nothing(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise StorageFailed("away")

    monkeypatch.setattr(rank.saver._store, "write_part", fails)
    old = time.monotonic() - 20.0
    rank.saver.begin(1, "t", old)
    rank.commit()
    rank.wait()
    assert rank.saver._saved_at == old
    rank.commit()
    assert len(rank.said) == 1, "it is tried again, but not at once"
