"""How a job ends: by the user's error, by too few workers, by a cancel; and functions written for Horovod itself."""

from __future__ import annotations

import threading
import time

import pytest

import elastic_spark as es
from elastic_spark.core import events as ev
from elastic_spark.errors import ConfigError, DataError, JobCancelled, JobHeld, NotEnoughWorkers, UserCodeFailed
from elastic_spark.testing.counting import counting_data

from .conftest import Job


def test_an_error_of_the_users_code_ends_the_job_with_its_traceback(job: Job) -> None:
    def boom(state: object) -> None:
        import horovod.torch as hvd

        if hvd.rank() == 1 and state.step >= 3:  # type: ignore[attr-defined]
            raise ValueError("boom-42")

    job.count(epochs=2, on_step=boom)
    with pytest.raises(UserCodeFailed, match="boom-42") as caught:
        job.done(limit_s=150.0)
    assert "test_outcomes.py" in str(caught.value)
    assert "in boom" in str(caught.value)
    failed = job.events(ev.UserFailed)[0]
    assert (failed.rank, failed.step) == (1, 3)
    assert job.events(ev.WorkerLost) == []
    assert job.events(ev.JobFinished)[-1].status == "FAILED"
    job.assert_no_orphans()


def test_an_error_seen_once_is_survived_when_asked_for(job: Job) -> None:
    flag = str(job.folder / "raised")

    def boom_once(state: object) -> None:
        import os

        import horovod.torch as hvd

        if hvd.rank() == 1 and state.step == 5 and not os.path.exists(flag):  # type: ignore[attr-defined]
            open(flag, "w").close()
            raise ValueError("boom-once")

    job.count(epochs=2, on_step=boom_once, user_error_retries=1)
    job.assert_counted(job.done(), epochs=2)


def test_mismatched_collectives_end_the_job_instead_of_resetting_for_ever(job: Job) -> None:
    def mismatched(ctx: object) -> None:
        import horovod.torch as hvd
        import torch

        state = es.ElasticState(model=torch.nn.Linear(2, 2))

        @hvd.elastic.run
        def loop(state: object) -> None:
            hvd.allreduce(torch.zeros(1 + hvd.rank()), name="odd")

        loop(state)

    job.run(mismatched)
    with pytest.raises(UserCodeFailed, match="Mismatched"):
        job.done(limit_s=150.0)


def test_too_few_slots_is_an_error_with_the_numbers_and_the_next_call_works(job: Job) -> None:
    es.run(lambda: 1, num_proc=3, tracking=False, verbose=0, work_dir=str(job.folder / "before"))  # all can answer
    job.run(lambda: 1, num_proc=5, min_num_proc=5, start_timeout=12.0)
    started = time.monotonic()
    told = r"asked for 5 workers.*3 executors' slots answered.*have 3 cores, 0 free"
    with pytest.raises(NotEnoughWorkers, match=told):
        job.done()
    assert time.monotonic() - started < 100.0
    again = es.run(
        lambda: "fine", num_proc=2, tracking=False, verbose=0, work_dir=str(job.folder / "again"), start_timeout=200.0
    )
    assert list(again) == ["fine", "fine"]


def test_it_starts_with_what_is_there_when_that_is_enough(job: Job) -> None:
    job.count(epochs=1, num_proc=5, min_num_proc=2)
    job.hurry()
    result = job.done(limit_s=200.0)
    assert result.summary["world_sizes"][0][1] == 3
    job.assert_counted(result, epochs=1)


def test_a_stock_horovod_function_is_killed_and_goes_on(job: Job) -> None:
    """As Horovod's documentation shows it: TorchState, commit, no ctx."""
    slow = str(job.slow)

    def stock() -> tuple[int, int, float]:
        import os
        import time

        import horovod.torch as hvd
        import torch

        hvd.init()
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        state = hvd.elastic.TorchState(model, optimizer, batch=0)

        @hvd.elastic.run
        def train(state: object) -> tuple[int, int, float]:
            while state.batch < 400:  # type: ignore[attr-defined]
                optimizer.zero_grad()
                model(torch.ones(2, 4)).pow(2).mean().backward()
                optimizer.step()
                state.batch += 1  # type: ignore[attr-defined]
                state.commit()  # type: ignore[attr-defined]
                if os.path.exists(slow):
                    time.sleep(0.04)
            return hvd.size(), state.batch, float(model.weight.sum())  # type: ignore[attr-defined]

        return train(state)

    job.run(stock)
    world = job.wait(lambda: job.world() if len(job.world()) == 3 else None, 150.0, "a world of three")
    job.wait(lambda: job.world(), 10.0, "steps")
    job.kill_worker(world[0])
    job.wait(lambda: job.world() if world[0] not in (job.world() or world) else None, 60.0, "the survivors' world")
    job.wait(lambda: job.world() if len(job.world()) == 3 else None, 150.0, "the newcomer")
    result = job.done()
    assert [value[:2] for value in result] == [(3, 400)] * 3
    assert len({value[2] for value in result}) == 1


def test_a_cancelled_job_group_ends_the_job(job: Job) -> None:
    job.count(epochs=50)
    job.wait_world(3)
    tracker = job.spark.sparkContext.statusTracker()
    groups = {f"elastic_spark-{job.events(ev.JobStarted)[0].job_id}"}
    assert tracker.getJobIdsForGroup(next(iter(groups)))
    job.spark.sparkContext.cancelJobGroup(next(iter(groups)))
    with pytest.raises(JobCancelled):
        job.done(limit_s=100.0)
    assert job.events(ev.JobFinished)[-1].status == "KILLED"
    job.assert_no_orphans()


def test_what_cannot_travel_is_named_before_anything_starts(job: Job) -> None:
    lock = threading.Lock()

    def closes_over() -> None:
        lock.acquire()

    with pytest.raises(ConfigError, match="'lock'"):
        es.run(closes_over, num_proc=1, tracking=False, verbose=0, work_dir=str(job.folder))


def test_bad_numbers_and_bad_data_are_refused_before_anything_starts(job: Job) -> None:
    common = {"tracking": False, "verbose": 0, "work_dir": str(job.folder)}
    with pytest.raises(ConfigError, match="min_num_proc=3 is more than max_num_proc=2"):
        es.run(lambda: 1, min_num_proc=3, max_num_proc=2, **common)
    with pytest.raises(ConfigError, match="num_proc=0"):
        es.run(lambda: 1, num_proc=0, **common)
    with pytest.raises(ConfigError, match="global_bach"):
        es.run(lambda: 1, global_bach=3, **common)
    with pytest.raises(DataError, match="train"):
        es.run(lambda: 1, data={"train": counting_data(job.spark, 0)}, num_proc=1, **common)


def test_sys_exit_and_unspeakable_errors_are_the_users_errors(job: Job) -> None:
    def leaves() -> None:
        import sys

        sys.exit("config missing")

    job.run(leaves, num_proc=2)
    with pytest.raises(UserCodeFailed, match="SystemExit: config missing"):
        job.done(limit_s=150.0)
    assert job.events(ev.WorkerLost) == []


def test_a_result_that_cannot_be_read_is_a_failure_that_says_so(job: Job) -> None:
    def odd() -> object:
        class Odd:
            def __reduce__(self) -> tuple[object, ...]:
                return (eval, ("1/0",))

        return Odd()

    job.run(odd, num_proc=1)
    with pytest.raises(UserCodeFailed, match="rank 0 returned cannot be read on the driver: ZeroDivisionError"):
        job.done(limit_s=150.0)
    assert job.events(ev.JobFinished)[-1].status == "FAILED"


def test_a_job_is_held_by_one_call_at_a_time(job: Job) -> None:
    job.count(epochs=4)
    job.wait_world(3)
    with pytest.raises(JobHeld, match="held by a living driver"):
        es.run(lambda: 1, num_proc=1, tracking=False, verbose=0, work_dir=str(job.folder / "runs"), job_name="job")
    job.assert_counted(job.done(), epochs=4)
