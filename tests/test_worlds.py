"""What a world starts from, where checkpoints cannot be read."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_spark.core import job as core
from elastic_spark.driver import worlds as module
from elastic_spark.driver.worlds import Worlds
from elastic_spark.errors import StorageFailed


class Stored:
    """A store whose newest checkpoint is of step ``best``, and takes ``seconds`` to be read; None: it is away."""

    def __init__(self, best: int, seconds: float | None) -> None:
        self.best, self._seconds, self.asked = best, seconds, 0

    async def newest(self, generation: int) -> Any:
        self.asked += 1
        if self._seconds is None:
            raise StorageFailed("away")
        await asyncio.sleep(self._seconds)
        return SimpleNamespace(step=self.best)


def start_from(stored: Stored, found: int, limit_s: float = 0.3) -> tuple[Any, list[core.Input]]:
    """The step of the checkpoint that a world starts from whose rank 0 has ``found`` a step in memory; what the core
    was told."""
    told: list[core.Input] = []
    worlds: Any = Worlds(
        "127.0.0.1",
        seed=0,
        read_limit_s=limit_s,
        peers=SimpleNamespace(),  # type: ignore[arg-type]
        lanes=SimpleNamespace(),  # type: ignore[arg-type]
        ledger=SimpleNamespace(),  # type: ignore[arg-type]
        checkpoints=stored,  # type: ignore[arg-type]
        job=lambda: SimpleNamespace(generation=2, ended=None),  # type: ignore[arg-type, return-value]
        turn=told.append,
        append=lambda facts: None,
        now=lambda: asyncio.get_event_loop().time() if asyncio._get_running_loop() else 0.0,
        formed=lambda effect: None,
    )
    members = ("w2", "w3")
    form = core.Form(2, members, members, ("w0", "w1"), (), "lost", -1, True, found=found)
    chosen = asyncio.run(worlds._checkpoint_for(form))
    return (chosen.step if chosen is not None else None), told


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_AGAIN_S", 0.05)


@pytest.mark.parametrize("fails", [0, 2, 10_000])
def test_a_port_that_cannot_be_opened_now_is_tried_again_and_not_for_ever(
    fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        tried = 0

        async def open(self, generation: int, members: Any) -> None:
            self.tried += 1
            if self.tried <= fails:
                raise OSError(24, "Too many open files")

    monkeypatch.setattr(module, "OPEN_S", 0.3)
    monkeypatch.setattr(module, "OPEN_AGAIN_S", 0.01)
    job, told = SimpleNamespace(generation=2, ended=None), []

    def turn(happened: core.Input) -> None:
        told.append(happened)
        job.ended = happened

    worlds: Any = object.__new__(Worlds)
    worlds._rendezvous, worlds._job, worlds._turn, worlds._now = Full(), lambda: job, turn, time.monotonic
    form = core.Form(2, ("w2",), (), (), (), "lost", -1, True)
    assert asyncio.run(worlds._open(form)) is (fails < 10_000)
    assert [happened.kind for happened in told] == ["EnvironmentUnfit"] * (fails == 10_000)
    assert all("Too many open files" in happened.error for happened in told)


def test_what_is_in_memory_and_as_new_as_any_checkpoint_waits_for_no_storage() -> None:
    stored = Stored(20, None)
    assert start_from(stored, found=20) == (None, [])
    assert stored.asked == 0


def test_what_is_in_memory_serves_where_a_newer_checkpoint_cannot_be_read() -> None:
    step, told = start_from(Stored(30, None), found=20)
    assert step is None
    assert {type(item) for item in told} == {core.Reading}, "it was tried again"
    step, told = start_from(Stored(30, 60.0), found=20)
    assert step is None
    assert {type(item) for item in told} == {core.Reading}


def test_a_newer_checkpoint_is_taken() -> None:
    step, told = start_from(Stored(30, 0.12), found=20, limit_s=60.0)
    assert step == 30
    assert {type(item) for item in told} == {core.Reading}, "nobody has a place meanwhile"


def test_without_any_state_at_all_the_job_ends() -> None:
    step, told = start_from(Stored(30, None), found=-1)
    assert step is None
    assert isinstance(told[-1], core.Fault)
    assert told[-1].kind == "StorageFailed"
    assert "elastic_timeout=0.3 s: away" in told[-1].error
