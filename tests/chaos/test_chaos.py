"""25 schedules of the fuzzer, four or five to a job: every seed that ever failed, and the first ones."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_spark.checkpoint import CheckpointStore
from elastic_spark.core import events as ev
from elastic_spark.core.verdict import verdict
from elastic_spark.errors import StorageFailed
from elastic_spark.worker.memory import read_newest

from .schedule import Fault, Schedule, schedule
from .world import World, run_schedules

#: Seeds that broke an invariant once.
ONCE_FAILED: tuple[int, ...] = (26, 29, 31, 47)


@pytest.mark.parametrize(
    "jobs", [(range(0, 4), range(4, 8)), (range(8, 12), range(12, 16)), (range(16, 21), ONCE_FAILED)]
)
def test_what_goes_wrong_leaves_every_invariant(jobs: Sequence[Sequence[int]], tmp_path: Path) -> None:
    """Two jobs at a time: each waits most of the time, and that the other one is in its way is one more trouble."""

    def run(seeds: Sequence[int]) -> None:
        run_schedules([schedule(seed) for seed in seeds], tmp_path / f"from-{seeds[0]}")

    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(run, seeds) for seeds in jobs]:
            done.result()


def test_all_workers_die_at_once_and_no_committed_step_is_lost(tmp_path: Path) -> None:
    """Nobody is left who holds the state; their successors find it in the executors' memory."""
    schedule = Schedule(0, 3, 3, 1, 60.0, (Fault(1.0, "kill_all_workers", 0, 0.0),))
    world = World(schedule, tmp_path / "world", budget=1.0)
    try:
        figures = world.run()
        restored = [event.restored_from for event in world.seen(ev.GenerationFormed) if event.restored_from]
        assert len(restored) == 1
        assert restored[0].startswith("memory:")
        assert figures["steps_lost"] == 0
        assert world.seen(ev.StepsRolledBack, ev.CheckpointRejected) == []
        assert not [event for event in world.seen(ev.Warned) if "reported by nobody" in event.message]
    finally:
        world.close()


def test_many_resets_leave_no_memory_threads_or_descriptors_behind(tmp_path: Path) -> None:
    """In the driver, in the agents, and in the worker that survives them all. ``ELASTIC_SPARK_RESETS`` sets how many;
    each loss is two: one world without the lost worker, one with its successor."""
    losses = int(os.environ.get("ELASTIC_SPARK_RESETS", "12")) // 2
    world = World(Schedule(0, 3, 3, 1, 60.0, ()), tmp_path / "world", epochs=60)
    try:
        world.begin()
        survivor = world.members()[0]
        measured = []
        for loss in range(losses + 5):
            victim = next(member for member in world.members() if member != survivor)  # who may be of any rank
            formed = len(world.seen(ev.GenerationFormed))
            world.kill(victim)
            world.wait(lambda n=formed: _full_again(world, n), 60.0, f"a full world after loss {loss}")
            if loss in (4, losses + 4):
                pids = {"driver": os.getpid(), "survivor": world.spawned(survivor).pid}
                pids |= {f"agent {number}": world.executors[number].pid for number in world.living()}
                measured.append({name: _held(pid) for name, pid in pids.items()})
        world.finish()
    finally:
        world.close()
    before, after = measured
    print(before, after, sep="\n")
    for name, (memory, threads, files) in after.items():
        was = before[name]
        assert memory <= 1.1 * was[0] + 4, f"{name}: {was[0]} MB, then {memory} MB"
        assert threads <= was[1], f"{name}: {was[1]} threads, then {threads}"
        assert files <= was[2] + 2, f"{name}: {was[2]} descriptors, then {files}"


def _full_again(world: World, formed: int) -> bool:
    """A world of three that was formed since then runs, and has made a step."""
    generations = world.seen(ev.GenerationFormed)
    steps = world.seen(ev.StepsCommitted)
    newest = generations[-1]
    return len(generations) > formed and len(newest.members) == 3 and steps[-1].generation == newest.generation


def _held(pid: int) -> tuple[int, int, int]:
    """Resident MB, threads, open descriptors."""
    process = psutil.Process(pid)
    return process.memory_info().rss >> 20, process.num_threads(), process.num_fds()


def test_a_rank_that_waits_for_one_that_has_returned_ends_with_a_named_error(tmp_path: Path) -> None:
    def uneven(ctx: object) -> None:
        import horovod.torch as hvd
        import torch

        import elastic_spark as es

        @hvd.elastic.run
        def loop(state: es.ElasticState) -> None:
            if hvd.rank() == 0:
                hvd.allreduce(torch.ones(1), name="for two")

        loop(es.ElasticState(model=torch.nn.Linear(2, 2)))

    world = World(Schedule(0, 2, 2, 2, 60.0, ()), tmp_path / "world", function=uneven, stall_after_s=2.0)
    try:
        for _ in range(2):
            world.add_executor()
        assert world.controller.wait(90.0), f"it hangs: {world.events[-5:]}"
        ended, _ = world.controller.outcome()
        assert ended.kind == "UserCodeFailed"
        assert "do all ranks call the same collectives" in ended.error
    finally:
        world.close()


def test_steps_that_the_driver_had_not_read_when_all_workers_died_are_known_from_their_memory(tmp_path: Path) -> None:
    """The driver stands still, workers go on, and are killed before it looks again. Storage is away besides."""
    world = World(Schedule(0, 2, 2, 1, 60.0, ()), tmp_path / "world", epochs=4)
    try:
        world.begin()
        world.controller._checkpoints._store.newest_valid = _away  # type: ignore[method-assign]
        world.controller._loop.call_soon_threadsafe(time.sleep, 2.0)
        threading.Event().wait(1.0)  # the workers' time
        for worker in world.members():
            world.kill(worker)
        world.finish()
        assert not [event for event in world.seen(ev.Warned) if "reported by nobody" in event.message]
        assert [event for event in world.seen(ev.GenerationFormed) if event.restored_from]
    finally:
        world.close()


def _away(*_arguments: Any, **_keywords: Any) -> Any:
    raise StorageFailed("away")


def test_the_end_survives_a_rank_0_that_is_lost_when_the_others_have_returned(tmp_path: Path) -> None:
    """What they hold at their end is newer than their last snapshot that was due."""
    gate = tmp_path / "gate"
    gate.touch()

    def train(ctx: object) -> int:
        import time

        import horovod.torch as hvd
        import torch

        import elastic_spark as es

        @hvd.elastic.run
        def loop(state: es.ElasticState) -> int:
            while state.step < 40:
                time.sleep(0.02)
                hvd.allreduce(torch.ones(1), name="a step")
                state._snapshot_due_at = float("inf")
                state.commit(loss=1.0)
            while hvd.rank() == 0 and gate.exists():
                time.sleep(0.02)
            return state.step

        return loop(es.ElasticState(model=torch.nn.Linear(2, 2)))

    world = World(Schedule(0, 2, 2, 1, 60.0, ()), tmp_path / "world", function=train)
    try:
        world.begin()
        world.wait(lambda: world.controller._results, 60.0, "the end of the other one")
        world.kill(world.members()[0])
        gate.unlink()
        assert world.controller.wait(60.0), f"it hangs: {world.events[-5:]}"
        assert world.controller.outcome()[0].status == "FINISHED"
        assert world.seen(ev.StepsRolledBack) == []
        assert [event.step for event in world.seen(ev.GenerationFormed)] == [0, 40]
    finally:
        world.close()


def test_the_only_holder_of_the_state_is_lost_while_a_newcomer_still_prepares(tmp_path: Path) -> None:
    """Horovod is initialised, the newcomer has not received the state. No snapshot was due since the first step."""
    gate, hold = tmp_path / "gate", tmp_path / "hold"
    gate.touch()

    def train(ctx: object) -> int:
        import time

        import horovod.torch as hvd
        import torch

        import elastic_spark as es

        while hold.exists():
            time.sleep(0.02)

        @hvd.elastic.run
        def loop(state: es.ElasticState) -> int:
            while hvd.allreduce(torch.tensor([float(gate.exists())]), name="a step") > 0:
                time.sleep(0.02)
                state._snapshot_due_at = float("inf")
                state.commit(loss=1.0)
            return state.step

        return loop(es.ElasticState(model=torch.nn.Linear(2, 2)))

    world = World(Schedule(0, 2, 2, 1, 60.0, ()), tmp_path / "world", function=train)
    try:
        world.begin()
        world.wait(lambda: world.newest() > 5, 60.0, "some steps")
        hold.touch()
        world.kill(world.members()[1])
        formed = world.wait(lambda: _newcomers_world(world), 60.0, "a newcomer's world")
        holder = formed.source
        agent = world.executors[world.spawned(holder).executor].pid
        world.wait(lambda: formed.step in _remembered(agent), 10.0, "a snapshot of what only the holder holds")
        world.kill(holder)
        hold.unlink()
        world.wait(lambda: world.newest() > formed.step, 60.0, "a step after that")
        gate.unlink()
        assert world.controller.wait(60.0), f"it hangs: {world.events[-5:]}"
        assert world.controller.outcome()[0].status == "FINISHED"
        assert world.seen(ev.StepsRolledBack) == []
        (again,) = [event for event in world.seen(ev.GenerationFormed) if event.restored_from]
        assert (again.restored_from, again.step) == (f"memory:{again.source}", formed.step)
    finally:
        world.close()


def _newcomers_world(world: World) -> ev.GenerationFormed | None:
    """The newest world, if it runs and a newcomer has joined those who made steps."""
    formed = world.seen(ev.GenerationFormed)[-1]
    runs = formed.generation in {event.generation for event in world.seen(ev.GenerationRunning)}
    return formed if runs and 0 < len(formed.joined) < len(formed.members) else None


def _remembered(agent: int) -> set[int]:
    """Steps of the snapshots in an agent's memory."""
    steps = set()
    for link in Path(f"/proc/{agent}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was open for a moment
            if "memfd:elastic_spark" in os.readlink(link):
                descriptor = os.open(link, os.O_RDONLY)
                snapshot = read_newest(descriptor)
                os.close(descriptor)
                steps |= {snapshot.step} if snapshot is not None else set()
    return steps


def test_when_the_guard_has_ended_a_job_no_state_after_the_alarm_is_left(tmp_path: Path) -> None:
    """And what the training function started in a session of its own is not left either."""
    sleeper = tmp_path / "sleeper"

    def train(ctx: object) -> None:
        import subprocess
        import time

        import horovod.torch as hvd
        import torch

        import elastic_spark as es

        sleeper.write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))

        @hvd.elastic.run
        def loop(state: es.ElasticState) -> None:
            while True:
                time.sleep(0.02)
                state.commit(loss=float("nan") if state.step == 60 else 1.0)

        loop(es.ElasticState(model=torch.nn.Linear(2, 2)))

    world = World(Schedule(0, 1, 1, 1, 0.4, ()), tmp_path / "world", function=train, guard="stop")
    try:
        world.add_executor()
        assert world.controller.wait(90.0), f"it hangs: {world.events[-5:]}"
        assert world.controller.outcome()[0].kind == "GuardStopped"
        (alarm,) = world.seen(ev.GuardAlarm)
        assert alarm.step == alarm.suspect_from == 61
        kept = [item.step for item in CheckpointStore(str(world.folder / "checkpoints")).list()]
        assert kept
        assert max(kept) < 61
        world.executors["0"].wait(15.0)
        assert not psutil.pid_exists(pid := int(sleeper.read_text())) or psutil.Process(pid).status() == "zombie"
    finally:
        world.close()


def test_storage_that_fails_is_not_tried_at_each_step_and_that_the_end_is_not_saved_is_told(tmp_path: Path) -> None:
    world = World(Schedule(0, 1, 1, 1, 0.05, ()), tmp_path / "world", epochs=6)
    try:
        (world.folder / "checkpoints").write_text("a file stands where the folder should be")
        world.begin()
        figures = world.finish()
        assert figures["steps"] == 120
        assert 1 <= figures["checkpoints_skipped"] <= 8
        line = next(line for line in verdict(figures) if line[0] == "checkpoints")
        assert line[1].endswith("skipped, the end of training is not in one")
        assert line[2] == "bad"
    finally:
        world.close()


class FreezesOne(World):
    """A member of the first world is stopped before it hears that it is one."""

    def _hear(self, event: ev.Event) -> None:
        super()._hear(event)
        if isinstance(event, ev.GenerationFormed) and event.generation == 1:
            self.kill(event.members[1], signal.SIGSTOP)


def test_a_checkpoint_that_takes_long_to_read_from_storage_that_was_away_is_waited_for(tmp_path: Path) -> None:
    """Longer than Horovod's init may take: those who are called have no place in a world yet."""
    schedule = Schedule(0, 2, 2, 1, 0.5, (Fault(2.0, "kill_all_executors", 0, 0.0),))
    world = World(schedule, tmp_path / "world", init_timeout_s=3.0)
    store, tries = world.controller._checkpoints._store, []
    read = store.newest_valid

    def slow(*arguments: Any, **keywords: Any) -> Any:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise StorageFailed("away for a moment")
        time.sleep(5.0)
        return read(*arguments, **keywords)

    store.newest_valid = slow  # type: ignore[method-assign]
    try:
        world.run()
        (formed,) = [event for event in world.seen(ev.GenerationFormed) if event.restored_from]
        assert formed.step > 0
        assert len(tries) == 3
        assert [event for event in world.seen(ev.GenerationEnding) if "initialise" in event.cause] == []
    finally:
        world.close()


def test_who_holds_up_a_world_is_named_and_then_lost(tmp_path: Path) -> None:
    world = FreezesOne(Schedule(0, 3, 3, 2, 60.0, ()), tmp_path / "world", epochs=2)
    try:
        world.begin()
        world.finish()
        frozen = world.seen(ev.GenerationFormed)[0].members[1]
        told = [event.message for event in world.seen(ev.Warned) if event.where == "generation 1"]
        assert told == [f"workers have waited for {frozen} for 3 s to form their world"]
        assert [(event.worker, event.cause) for event in world.seen(ev.WorkerLost)] == [(frozen, "frozen")]
    finally:
        world.close()


def test_a_seed_is_a_schedule() -> None:
    assert schedule(7) == schedule(7)
    assert len({schedule(seed).faults for seed in range(100)}) == 100
