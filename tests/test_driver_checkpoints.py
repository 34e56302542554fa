"""The driver's side of checkpoints: which one a world starts from, and what is undone with a roll-back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from elastic_spark.checkpoint import BackgroundWriter, CheckpointStore, WriteOutcome
from elastic_spark.core import events as ev
from elastic_spark.driver import checkpoints as module
from elastic_spark.driver.checkpoints import DriverCheckpoints
from elastic_spark.errors import JobHeld, StorageFailed

T = TypeVar("T")


class Bench:
    """A store of real files, its driver's side, and the facts that came of it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = CheckpointStore(str(folder))
        self.facts: list[ev.Event] = []
        options = {"keep": 10, "only_good": True, "resumed": None, **options}
        self.driver = DriverCheckpoints(
            self.store, job_id="job", noted={"run_id": "run"}, append=self.facts.append, now=lambda: 1.0, **options
        )

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """In an event loop, until nothing is under way any more."""

        async def whole() -> T:
            value = await work
            await self.driver.finish(30.0)
            return value

        return asyncio.run(whole())

    def write(self, step: int, generation: int = 1, **fields: Any) -> None:
        part = self.store.write_part(step, {"model/w": torch.full((4,), float(step))}, {}, token=f"g{generation}")
        fields = {"cursors": {}, "generation": generation, **fields}
        self.call(self.driver.commit(part, fields, world_size=2, seconds=0.1))

    def write_part(self, step: int, number: int, parts: int, **fields: Any) -> None:
        tensors = {f"model/w{number}": torch.full((4,), float(step))}
        part = self.store.write_part(step, tensors, {}, token="g1", part=number, parts=parts)
        fields = {"cursors": {"train": [number, step]}, "generation": 1, **fields}
        self.call(self.driver.commit(part, fields, world_size=parts, seconds=0.1))

    def steps(self) -> list[int]:
        return [item.step for item in self.store.list()]

    def of(self, kind: type[ev.Event]) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_the_guard_does_not_trust_is_discarded_and_comes_no_more(bench: Bench) -> None:
    for step in (10, 20, 30):
        bench.write(step)
    bench.driver.alarmed(30)
    bench.driver.alarmed(20)
    bench.call(bench.driver.distrust())
    bench.write(15)
    bench.write(40)  # was on its way
    assert bench.steps() == [15, 10]
    assert [item.reason for item in bench.of(ev.CheckpointSkipped)] == ["the guard trusts no state from step 20 on"]


def test_a_roll_back_goes_to_the_newest_good_one_and_undoes_what_came_after(bench: Bench) -> None:
    for step in (10, 20, 40, 50):
        bench.write(step)
    bench.write(30, suspect="tensor model/w holds NaN")
    found = bench.call(bench.driver.good_before(50, 2))
    assert found is not None
    assert found.step == 40
    assert bench.steps() == [40, 30, 20, 10], "step 50 is of a history that is undone"
    assert [item.reason for item in bench.of(ev.CheckpointRejected)] == ["the guard trusts no state from step 50 on"]
    found = bench.call(bench.driver.good_before(40, 3))
    assert found is not None
    assert found.step == 20
    assert "holds NaN" in bench.of(ev.CheckpointRejected)[-1].reason


def test_what_a_world_wrote_that_was_rolled_back_meanwhile_does_not_count(bench: Bench) -> None:
    bench.write(10)
    bench.call(bench.driver.good_before(20, 2))
    bench.write(30, generation=1)
    assert bench.steps() == [10]
    assert bench.of(ev.CheckpointSkipped)[0].reason == "its world was rolled back"
    bench.write(15, generation=2)
    assert bench.steps() == [15, 10]
    assert bench.store.list()[0].fields["parent"] == bench.store.list()[1].name


def test_without_a_good_one_there_is_none_to_go_back_to(bench: Bench) -> None:
    bench.write(10, suspect="committed with loss is nan")
    assert bench.call(bench.driver.good_before(20, 2)) is None
    assert bench.steps() == [10], "nothing is deleted then"


def test_after_the_loss_of_all_a_suspect_one_serves_only_where_the_guard_just_warns(tmp_path: Path) -> None:
    for only_good, expected in ((True, 10), (False, 20)):
        bench = Bench(tmp_path / str(only_good), only_good=only_good)
        bench.write(10)
        bench.write(20, suspect="tensor model/w holds NaN")
        found = bench.call(bench.driver.newest(2))
        assert found is not None
        assert found.step == expected


def test_what_is_safe_after_a_restore_is_what_was_restored(bench: Bench) -> None:
    """Else a step that is newer, but below one that was passed over, would count as saved."""
    bench.write(50)
    bench.write(100, suspect="loss is nan")
    assert bench.driver.best == 100
    found = bench.call(bench.driver.newest(2))
    assert found is not None
    assert (found.step, bench.driver.best) == (50, 50)
    bench.write(70, generation=2)
    assert bench.driver.best == 70


def test_old_ones_go_but_never_the_newest_good_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep=2)
    bench.write(10)
    bench.write(20)
    for step in (30, 40, 50):
        bench.write(step, suspect="tensor model/w holds NaN")
    assert bench.steps() == [50, 40, 20]


def test_a_writer_notices_nan_and_lets_masks_of_infinities_be(tmp_path: Path) -> None:
    outcomes: list[WriteOutcome] = []
    writer = BackgroundWriter(CheckpointStore(str(tmp_path)), outcomes.append)
    good = {"mask": torch.full((3, 3), -torch.inf), "count": torch.arange(3), "none": torch.empty(0)}
    bad = [{**good, "w": torch.tensor([0.0, torch.nan], dtype=kind)} for kind in (torch.float16, torch.float64)]
    for step, tensors in enumerate([good, *bad]):
        while not writer.submit(step, tensors, {}, "t"):
            pass
        while writer.busy:
            pass
    assert writer.close(10.0)
    assert [outcome.nan for outcome in outcomes] == ["", "w", "w"]


def test_a_set_of_parts_is_a_checkpoint_once_all_have_come(bench: Bench) -> None:
    for number in (2, 0):
        bench.write_part(10, number, 3)
        assert bench.steps() == []
    bench.write_part(10, 1, 3, suspect="tensor model/w1 holds NaN")
    (checkpoint,) = bench.store.list()
    assert (checkpoint.parts, checkpoint.fields["cursors"]) == (3, {"train": [0, 10]}), "the first part's cursors"
    assert checkpoint.suspect == "tensor model/w1 holds NaN", "of whatever part"
    tensors, _ = bench.store.load(checkpoint)
    assert sorted(tensors) == ["model/w0", "model/w1", "model/w2"]


def test_a_rank_lost_in_between_leaves_no_checkpoint_and_it_is_said(bench: Bench) -> None:
    bench.write_part(10, 0, 3)
    bench.write_part(10, 2, 3)
    for number in range(2):
        bench.write_part(20, number, 2)
    assert bench.steps() == [20]
    assert [(fact.step, fact.reason) for fact in bench.of(ev.CheckpointSkipped)] == [
        (10, "of 3 parts only [0, 2] came")
    ]
    found, rejected = bench.store.newest_valid("job")
    assert found is not None
    assert [item.finished for item in rejected] == []
    assert bench.store.prune(5, job_id="job", unfinished_age_s=0.0) == [f"{bench.store.uri}/step-000000000010-g1"]


def test_who_chooses_during_a_roll_back_chooses_behind_it(bench: Bench) -> None:
    """All members of the world that is to go back are lost while its checkpoint is read."""
    for step in (10, 20, 30):
        bench.write(step)

    async def both() -> list[Any]:
        return await asyncio.gather(bench.driver.good_before(20, 4), bench.driver.newest(5))

    assert [item.step for item in bench.call(both())] == [10, 10]
    assert bench.steps() == [10]


def test_a_roll_back_that_storage_held_up_is_done_by_who_chooses_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        bench.write(step)
    newest_valid = bench.store.newest_valid
    monkeypatch.setattr(bench.store, "newest_valid", _away)
    with pytest.raises(StorageFailed):
        bench.call(bench.driver.good_before(20, 4))
    monkeypatch.setattr(bench.store, "newest_valid", newest_valid)
    found = bench.call(bench.driver.newest(5))
    assert found is not None
    assert found.step == 10
    assert bench.steps() == [10]


def _away(*_: Any, **__: Any) -> Any:
    raise StorageFailed("away")


def test_a_roll_back_that_is_done_is_not_what_the_next_alarm_speaks_of(bench: Bench) -> None:
    for step in (10, 20):
        bench.write(step)
    bench.driver.alarmed(15)
    bench.call(bench.driver.good_before(15, 2))
    for step in (20, 30, 40):
        bench.write(step, generation=2)
    bench.driver.alarmed(35)
    bench.call(bench.driver.distrust())
    assert bench.steps() == [30, 20, 10]


def test_a_manifest_that_cannot_be_written_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMIT_AGAIN_S", 0.0)
    commit, tries = bench.store.commit, []

    def fails(often: int) -> None:
        def once_more(*arguments: Any, **keywords: Any) -> Any:
            tries.append(arguments[0])
            if tries.count(arguments[0]) <= often:
                raise StorageFailed("away")
            return commit(*arguments, **keywords)

        monkeypatch.setattr(bench.store, "commit", once_more)

    fails(module.COMMIT_TRIES - 1)
    bench.write(10)
    fails(module.COMMIT_TRIES)
    bench.write(20)
    assert bench.steps() == [10]
    assert [item.reason for item in bench.of(ev.CheckpointSkipped)] == ["away"]


def test_a_world_that_is_rolled_back_between_two_tries_writes_no_manifest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMIT_AGAIN_S", 0.2)
    bench.write(10)
    commit = bench.store.commit
    part = bench.store.write_part(30, {"model/w": torch.zeros(4)}, {}, token="g1")

    def away(*arguments: Any, **keywords: Any) -> Any:
        monkeypatch.setattr(bench.store, "commit", commit)
        raise StorageFailed("away")

    monkeypatch.setattr(bench.store, "commit", away)

    async def both() -> Any:
        writing = bench.driver.commit(part, {"cursors": {}, "generation": 1}, world_size=1, seconds=0.1)
        return await asyncio.gather(writing, bench.driver.good_before(20, 2))

    done, good = bench.call(both())
    assert (done, good.step) == (False, 10)
    assert bench.steps() == [10]
    assert [item.reason for item in bench.of(ev.CheckpointSkipped)] == ["its world was rolled back"]


def test_a_driver_that_has_lost_its_job_publishes_and_deletes_nothing(tmp_path: Path) -> None:
    ours = [True]

    def require_ours() -> None:
        if not ours[0]:
            raise JobHeld("another driver has taken the job")

    bench = Bench(tmp_path, keep=1, require_ours=require_ours)
    bench.write(10)
    bench.write(20)
    assert bench.steps() == [20]
    ours[0] = False
    bench.write(30)
    bench.driver.alarmed(20)
    bench.call(bench.driver.distrust())
    assert bench.steps() == [20]
    assert bench.of(ev.CheckpointSkipped)[-1].reason == "another driver has taken the job"


def test_storage_that_does_not_answer_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    monkeypatch.setattr(module, "COMMIT_TRIES", 1)
    answers = threading.Event()
    monkeypatch.setattr(bench.store, "commit", lambda *_, **__: answers.wait(60.0))
    bench.write(10)
    answers.set()
    assert [item.reason for item in bench.of(ev.CheckpointSkipped)] == ["storage has not answered for 0.1 s"]


def test_a_call_that_never_returns_does_not_hold_up_the_end_of_the_process() -> None:
    script = """
import asyncio, threading
from elastic_spark.driver.lane import Lane

async def main():
    lane = Lane("storage")
    try:
        await lane(threading.Event().wait, 0.1)
    except TimeoutError:
        print("told")
    lane.close()

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60.0, check=True)
    assert (ended.stdout, ended.stderr) == ("told\n", "")
