"""Executors and workers come and go while the counting model trains: every row once, equal parameters, no orphan."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import elastic_spark as es
from elastic_spark.core import events as ev
from elastic_spark.testing.counting import counting_data

from .conftest import Job


def test_an_executor_is_killed_and_a_new_one_joins(job: Job) -> None:
    """The one with rank 0, and then another one."""
    job.count(epochs=12)
    for rank in (0, 1):
        world = job.wait_world(3)
        killed = time.time()
        job.kill_executor(world[rank])
        survivors = job.wait_formed(2, since=killed)
        assert set(survivors) == {*world} - {world[rank]}
        joined = job.wait_world(3)
        assert set(survivors) < set(joined)
    result = job.done()
    job.assert_counted(result, epochs=12)
    assert result.summary["steps_lost"] == 0
    assert result.summary["resumed_from"] is None
    assert [c["to_size"] for c in result.summary["changes"]][:4] == [2, 3, 2, 3]
    job.assert_no_orphans()


def test_a_worker_process_is_killed(job: Job) -> None:
    job.count(epochs=6)
    world = job.wait_world(3)
    assert list(Path(job.cluster.directory).rglob("elastic-spark-rows/*.rows")), "where Spark cleans up"
    job.kill_worker(world[2])
    job.wait_formed(2)
    job.wait_world(3)
    result = job.done()
    job.assert_counted(result, epochs=6)
    lost = job.events(ev.WorkerLost)
    assert [(e.worker, e.cause, e.exit_code) for e in lost] == [(world[2], "process died", -signal.SIGKILL)]
    assert result.summary["steps_lost"] == 0


def write_in_parts(state: object) -> None:
    """As a state that is large enough would be."""
    from elastic_spark.worker import saver

    saver.PARTS_FROM = 0


def test_all_executors_die_and_come_back(job: Job) -> None:
    job.count(epochs=8, rpo_target_s=1.0, ckpt_budget=1.0, keep_checkpoints=100, on_step=write_in_parts)
    world = job.wait_world(3)
    job.wait(lambda: job.events(ev.CheckpointWritten), 100.0, "a checkpoint")
    for worker in world:
        job.kill_executor(worker)
    job.wait(lambda: any(e.restored_from for e in job.events(ev.GenerationFormed)), 150.0, "a restored world")
    result = job.done()
    job.assert_counted(result, epochs=8)
    restored = next(e for e in job.events(ev.GenerationFormed) if e.restored_from)
    written = [e for e in job.events(ev.CheckpointWritten) if e.at < restored.at]
    assert (restored.restored_from, restored.step) == (written[-1].uri, written[-1].step)
    assert len(list(Path(restored.restored_from).glob("state-*"))) == 3, "each rank had written its share"
    job.assert_no_orphans()


def test_twelve_kills_in_a_row_with_default_settings(job: Job) -> None:
    """Spark gives a task four tries by default; no try of ours counts towards a stage that could fail."""
    job.count(epochs=24)
    for kill in range(12):
        world = job.wait(lambda: job.world() if len(job.world()) >= 2 else (), 150.0, "a world of two")
        victim = world[kill % len(world)]
        if kill % 4 == 3:
            job.kill_executor(victim)
        else:
            job.kill_worker(victim)
        job.wait(lambda victim=victim: victim in _gone(job), 60.0, "its loss")
    result = job.done(limit_s=250.0)
    job.assert_counted(result, epochs=24)
    assert len(_gone(job)) >= 12
    job.assert_no_orphans()


def test_a_newcomer_that_has_received_the_state_holds_it_though_its_source_dies_at_that_moment(job: Job) -> None:
    """The only holder is killed between the broadcast of the state and the proof that all ranks agree."""
    armed, half = job.folder / "armed", str(job.slow)

    def train(ctx: object) -> dict[str, object]:
        import horovod.torch as hvd
        import torch

        class Weights(torch.nn.ParameterDict):
            def load_state_dict(self, *arguments: object, **options: object) -> object:
                loaded = super().load_state_dict(*arguments, **options)
                if armed.exists():
                    source = int(armed.read_text())
                    armed.unlink()
                    os.kill(source, signal.SIGKILL)
                return loaded

        model = Weights({"w": torch.nn.Parameter(torch.zeros(1200))})
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters(), op=hvd.Sum
        )
        state = es.ElasticState(model=model, optimizer=optimizer)

        @hvd.elastic.run
        def loop(state: es.ElasticState) -> dict[str, object]:
            for batch in ctx.batches("train", state, epochs=6):  # type: ignore[attr-defined]
                optimizer.zero_grad()
                (-model["w"][batch["id"][: batch.rows]].sum()).backward()
                optimizer.step()
                time.sleep(0.04 if os.path.exists(half) else 0)
                state.commit()
            return {"w": model["w"].detach().numpy().copy()}

        return loop(state)

    job.run(train, num_proc=2, data={"train": counting_data(job.spark, 1200)})
    world = job.wait_world(2)
    armed.write_text(str(job.spawned(world[1]).pid))
    job.kill_worker(world[0])
    job.wait(lambda: set(world) <= _gone(job), 100.0, "both to be gone")
    result = job.done()
    job.assert_counted(result, epochs=6)
    assert not armed.exists()
    assert result.summary["steps_lost"] == 0
    assert job.events(ev.StepsRolledBack) == []
    assert not [event for event in job.events(ev.Warned) if "reported by nobody" in event.message]


def _gone(job: Job) -> set[str]:
    return {event.worker for event in job.events(ev.WorkerLost, ev.WorkerLeft)}


def test_exit_code_zero_without_returning_is_a_lost_worker(job: Job) -> None:
    flag = str(job.folder / "left")

    def leave_once(state: object) -> None:
        import horovod.torch as hvd

        if state.step == 60 and hvd.rank() == 1 and not os.path.exists(flag):  # type: ignore[attr-defined]
            open(flag, "w").close()
            os._exit(0)

    job.count(epochs=4, on_step=leave_once)
    job.wait(lambda: job.events(ev.WorkerLost), 150.0, "the loss")
    result = job.done()
    assert job.events(ev.WorkerLost)[0].cause == "exited without returning"
    job.assert_counted(result, epochs=4)


def test_a_frozen_worker_is_found_and_killed(job: Job) -> None:
    job.count(epochs=8)
    world = job.wait_world(3)
    pid = job.spawned(world[1]).pid
    job.cluster.freeze(pid)
    job.wait_formed(2, limit_s=60.0)
    job.cluster.wait_for(lambda: not os.path.exists(f"/proc/{pid}"), 10.0, "the frozen process to be killed")
    result = job.done()
    job.assert_counted(result, epochs=8)
    assert job.events(ev.WorkerLost)[0].cause == "frozen"
    assert result.summary["steps_lost"] == 0


def test_a_decommissioned_executor_leaves_without_a_lost_step(job: Job) -> None:
    job.count(epochs=10)
    world = job.wait_world(3)
    executor = job.spawned(world[1]).executor
    node = next(e.worker for e in job.cluster.executors() if e.id == executor)
    assert node is not None
    job.cluster.decommission(next(w for w in job.cluster.workers if w.name == node))
    job.wait(lambda: [e for e in job.events(ev.WorkerLeft) if e.reason == "draining"], 100.0, "the drain")
    job.wait_formed(2)
    job.cluster.add_worker()
    job.wait_world(3)
    result = job.done()
    job.assert_counted(result, epochs=10)
    assert job.events(ev.WorkerLost) == []
    assert result.summary["steps_lost"] == 0


def test_notice_of_a_source_drains_the_executor_and_spark_uses_it_no_more(job: Job) -> None:
    job.count(epochs=10, notices="notice:in_working_directory")
    world = job.wait_world(3)
    spawned = job.spawned(world[1])
    executor = next(e for e in job.cluster.executors() if e.id == spawned.executor)
    notice = Path(f"/proc/{executor.pid}/cwd").resolve() / "notice"
    notice.write_text("the spot market")
    job.wait(lambda: [e for e in job.events(ev.WorkerLeft) if e.reason == "draining"], 60.0, "the drain")
    job.wait_formed(2)
    job.wait(lambda: len(job.events(ev.SlotEnded)) > 0, 30.0, "the slot to be asked for again")
    job.cluster.kill_executor(executor.id)  # the machine goes; Spark's worker, which stays here, starts another one
    job.wait_world(3)
    result = job.done()
    job.assert_counted(result, epochs=10)
    assert [(e.worker, e.reason) for e in job.events(ev.WorkerDraining)] == [(world[1], "the spot market")]
    assert len([e for e in job.events(ev.AgentRegistered) if e.executor == executor.id]) == 1
    assert job.events(ev.WorkerLost) == []
    assert result.summary["steps_lost"] == 0
