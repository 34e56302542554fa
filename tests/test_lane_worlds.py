"""The same training at any number of workers and under churn, on real Horovod workers (`bare_job`)."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bare_job import BareJob
from collective_world import Template

from elastic_spark.core import events as ev
from elastic_spark.core import job as core
from elastic_spark.core.audit import check_digests
from elastic_spark.core.manifest import Manifest
from elastic_spark.driver.freeze import freeze
from elastic_spark.testing.counting import assert_exact
from elastic_spark.worker.context import _counted
from elastic_spark.worker.rows import RowStore

ROWS, EPOCHS, BATCH, WIDTH = 1003, 3, 32, 8
STEPS = EPOCHS * -(-ROWS // BATCH)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    with Template(tmp_path_factory.mktemp("template") / "workers.log") as started:
        yield started


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Rows ``x float32[WIDTH], y float32``: noisy labels of a fixed function, in four files of two row groups each."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "in").mkdir()
    for part, rows in enumerate(np.array_split(rng.standard_normal((ROWS, WIDTH)).astype(np.float32), 4)):
        y = np.sin(rows[:, 0]) + rows[:, 1] * rows[:, 2] + 0.1 * rng.standard_normal(len(rows)).astype(np.float32)
        x = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), WIDTH)
        pq.write_table(pa.table({"x": x, "y": y}), folder / f"in/{part}.parquet", row_group_size=150)
    return freeze(folder / "in", folder / "out", name="train")


def trainer(
    gate: str = "", wait_at: tuple[int, ...] = (), epochs: int = EPOCHS, row_s: float = 0.0, slow: str = ""
) -> Any:
    """A float32 MLP under Adam.

    Where ``gate`` is a file's path, no step after those of ``wait_at`` is begun before the file holds as many
    characters as there are such steps up to it: so the world can be changed at chosen steps. ``row_s``: seconds to
    sleep for each row, three times as long on the worker named ``slow``.
    """

    def train(ctx: Any) -> dict[str, Any]:
        import os
        import time

        import horovod.torch as hvd
        import torch

        import elastic_spark as es
        from elastic_spark.worker.session import session

        pause_s = row_s * (3 if session().config["worker"] == slow else 1)
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=3e-3), named_parameters=model.named_parameters()
        )
        state = es.ElasticState(model=model, optimizer=optimizer, losses=[])

        @hvd.elastic.run
        def loop(state: Any) -> dict[str, Any]:
            for batch in ctx.batches("train", state, epochs=epochs):
                time.sleep(batch.rows * pause_s)
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"]) * batch.weight
                loss.backward()
                whole = hvd.allreduce(loss.detach(), name="loss")
                optimizer.step()
                state.losses.append(float(whole))
                state.commit()
                while os.path.exists(gate) and os.path.getsize(gate) < sum(state.step >= step for step in wait_at):
                    state.check_host_updates()
                    time.sleep(0.005)
            return {"losses": state.losses, "size": hvd.size()}

        return loop(state)

    return train


def deviation(losses: list[float], reference: list[float]) -> float:
    a, b = np.array(losses), np.array(reference)
    return float(np.max(np.abs(a - b) / np.abs(b)))


def test_loss_by_step_and_digests_are_the_same_for_worlds_of_1_2_3_5_8_and_under_churn(
    template: Template, data: Manifest, tmp_path: Path
) -> None:
    seen: dict[str, tuple[list[float], list[str]]] = {}
    for size in (1, 2, 3, 5, 8):
        with BareJob(template, tmp_path / str(size), trainer(), {"train": data}, num_proc=size) as job:
            first = job.done()[0]
        assert first["size"] == size
        assert_audited(job, data)
        seen[str(size)] = first["losses"], [epoch["digest"] for epoch in job.summary()["epochs"]]
    seen["churn"] = churned(template, data, tmp_path)
    for losses, digests in seen.values():
        assert len(losses) == STEPS
        assert digests == seen["1"][1]
    worst = {name: deviation(losses, seen["1"][0]) for name, (losses, _) in seen.items()}
    assert max(worst.values()) <= 1e-5, worst


def churned(template: Template, data: Manifest, tmp_path: Path) -> tuple[list[float], list[str]]:
    """3 workers, two more join, three at once are killed, one joins, rank 0 is killed: at chosen steps."""
    gate = tmp_path / "gate"
    gate.touch()
    train = trainer(str(gate), (10, 30, 50, 70))
    with BareJob(template, tmp_path / "churn", train, {"train": data}, num_proc=3) as job:

        def let_on() -> None:
            with gate.open("a") as file:
                file.write("x")

        job.until(lambda: job.steps() >= 10)
        job.add_agents(2)
        job.until(lambda: len(job.events(ev.GenerationFormed)[-1].members) == 5)
        let_on()
        job.until(lambda: job.steps() >= 30)
        for worker in job.events(ev.GenerationFormed)[-1].members[2:]:
            job.kill(worker)
        let_on()  # a loss is seen in the next collective
        job.until(lambda: len(job.events(ev.GenerationFormed)[-1].members) == 2)
        job.until(lambda: job.steps() >= 50)
        job.add_agents(1)
        job.until(lambda: len(job.events(ev.GenerationFormed)[-1].members) == 3)
        let_on()
        job.until(lambda: job.steps() >= 70)
        job.kill(job.events(ev.GenerationFormed)[-1].members[0])
        let_on()
        first = job.done()[0]
    assert_audited(job, data)
    summary = job.summary()
    assert {size for _, size in summary["world_sizes"]} >= {2, 3, 5}
    assert summary["steps_lost"] == 0
    return first["losses"], [epoch["digest"] for epoch in summary["epochs"]]


def test_a_slow_worker_gets_fewer_rows_and_the_gradient_stays_that_of_the_whole_batch(
    template: Template, data: Manifest, tmp_path: Path
) -> None:
    """One of three takes three times as long for a row. The losses are those of a single worker, to rounding."""
    options: dict[str, Any] = {"global_batch": 96, "max_num_proc": 3}
    with BareJob(template, tmp_path / "one", trainer(epochs=12), {"train": data}, num_proc=1, **options) as reference:
        expected = reference.done()[0]["losses"]
    train = trainer(epochs=12, row_s=0.001, slow="w1")
    with BareJob(template, tmp_path / "job", train, {"train": data}, num_proc=3, balance=True, **options) as job:
        losses = job.done()[0]["losses"]
    assert deviation(losses, expected) <= 1e-5
    assert_audited(job, data, epochs=12)
    assert [change["cause"] for change in job.summary()["changes"]] == ["uneven speed"]
    fact, formed = job.events(ev.LanesUnbalanced)[0], job.events(ev.GenerationFormed)
    owned = [dict(zip(e.members, map(len, e.lanes["train"]), strict=True)) for e in formed]
    assert owned[0] == {"w0": 32, "w1": 32, "w2": 32}
    assert 10 <= owned[1].pop("w1") <= 20
    assert all(38 <= lanes <= 43 for lanes in owned[1].values())
    others = fact.rows_per_s["w0"], fact.rows_per_s["w2"]
    assert all(2.0 <= speed / fact.rows_per_s["w1"] <= 4.0 for speed in others), "the wait for others is not own time"


def assert_audited(job: BareJob, data: Manifest, epochs: int = EPOCHS) -> None:
    """Each row once an epoch, and the digests are those that manifest, seed and log give."""
    summary = job.summary()
    rows = [(epoch["rows_once"], epoch["rows_twice"], epoch["rows_never"]) for epoch in summary["epochs"]]
    assert rows == [(ROWS, 0, 0)] * epochs
    assert summary["rows_unexplained"] == 0
    assert 0 < summary["data_wait_fraction"] < 1
    checks = check_digests(summary["epochs"], job.events(ev.DatasetFrozen), [data])
    assert [good for _, good in checks] == [True] * epochs, checks


def with_batch_norm(ctx: Any) -> dict[str, Any]:
    """Trains an MLP with batch norm; its own rows by step."""
    import horovod.torch as hvd
    import torch

    import elastic_spark as es

    layers = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-2), named_parameters=model.named_parameters()
    )
    state = es.ElasticState(model=model, optimizer=optimizer, rows=[])

    @hvd.elastic.run
    def loop(state: Any) -> dict[str, Any]:
        for batch in ctx.batches("train", state):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"]) * batch.weight
            loss.backward()
            optimizer.step()
            state.rows.append(batch.rows)
            state.commit()
        finite = all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
        return {"rows": state.rows, "finite": finite}

    return loop(state)


def test_batch_norm_with_a_worker_that_never_has_a_row(template: Template, data: Manifest, tmp_path: Path) -> None:
    """Two lanes, three workers: one takes part with rows that count nothing."""
    with BareJob(
        template, tmp_path / "job", with_batch_norm, {"train": data}, num_proc=3, global_batch=59, lanes=2
    ) as job:  # 17 steps of 59 rows, 29 or 30 for each lane
        values = job.done()
    assert [set(value["rows"]) == {0} for value in values].count(True) == 1
    assert all(value["finite"] for value in values)
    assert job.summary()["rows_once"] == ROWS


def breaks(ctx: Any) -> tuple[int, list[int]]:
    """Draws a batch and leaves it, epoch after epoch: its steps, and the offsets that it trained."""
    import horovod.torch as hvd
    import torch

    import elastic_spark as es

    model = torch.nn.Linear(8, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    state = es.ElasticState(model=model, optimizer=optimizer, trained=[])

    @hvd.elastic.run
    def loop(state: Any) -> tuple[int, list[int]]:
        while state.step < -(-ROWS // 100):
            for number, batch in enumerate(ctx.batches("train", state)):
                if number == 3:
                    break
                optimizer.zero_grad()
                (model(batch["x"]).mean() * batch.weight).backward()
                optimizer.step()
                state.trained.append(batch.offset)
                state.commit()
        return state.step, state.trained

    return loop(state)


def test_a_batch_that_was_drawn_and_left_is_drawn_again_and_counted_once(
    template: Template, data: Manifest, tmp_path: Path
) -> None:
    with BareJob(template, tmp_path / "job", breaks, {"train": data}, num_proc=2, global_batch=100) as job:
        steps, trained = job.done()[0]
    assert trained == list(range(steps)) == list(range(-(-ROWS // 100)))
    assert job.summary()["rows_once"] == ROWS
    assert job.summary()["rows_twice"] == 0


def test_batch_norm_with_a_share_of_one_row_says_what_to_do(template: Template, data: Manifest, tmp_path: Path) -> None:
    with BareJob(
        template, tmp_path / "job", with_batch_norm, {"train": data}, num_proc=2, global_batch=2, lanes=2
    ) as job:
        assert job.controller.wait(60.0)
        ended, _ = job.controller.outcome()
    assert (ended.status, ended.kind) == ("FAILED", "UserCodeFailed")
    assert "Expected more than 1 value per channel" in ended.error
    assert "elastic_spark: this worker's share of the global batch is a single row" in ended.error
    assert "Raise global_batch" in ended.error


def test_a_worker_that_takes_the_place_of_another_decodes_nothing_again(template: Template, tmp_path: Path) -> None:
    """The files are gone by the time it comes: what it reads is what its predecessor left on the machine."""
    (tmp_path / "in").mkdir()
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(np.ones(ROWS * 8, np.float32)), 8)})
    pq.write_table(table.append_column("y", pa.array(np.ones(ROWS, np.float32))), tmp_path / "in/rows.parquet")
    manifest = freeze(tmp_path / "in", tmp_path / "out", name="train")
    gate, cache = tmp_path / "gate", tmp_path / "cache"
    gate.touch()
    train = trainer(str(gate), (20, 60))
    with BareJob(template, tmp_path / "job", train, {"train": manifest}, num_proc=2, cache_dir=str(cache)) as job:
        job.until(lambda: job.steps() >= 20)
        members = job.events(ev.GenerationFormed)[-1].members
        (tmp_path / "in/rows.parquet").unlink()
        job.kill(members[1], with_agent=False)
        gate.write_text("x")
        job.until(lambda: set(job.events(ev.GenerationFormed)[-1].members) == {members[0], "w2"})
        gate.write_text("xx")
        job.done()
    assert job.summary()["rows_once"] == ROWS * EPOCHS


# ---- field bugs: each id is counted, in the weights of the counting model, and no rank is left waiting


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Ids 0 .. 237 in files of 100, 101, 37 and 0 rows."""
    folder = tmp_path_factory.mktemp("uneven")
    (folder / "in").mkdir()
    for part, ids in enumerate(np.split(np.arange(238), [100, 201, 238])):
        pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), folder / f"in/{part}.parquet")
    return freeze(folder / "in", folder / "out", name="train")


def counter(gate: str = "", wait_at: tuple[int, ...] = (), every: int = 1, die_at: int = 0, ask_at: int = 0) -> Any:
    """Trains the counting model for two epochs, with a validation pass that counts the ids after each of them.

    ``gate``, ``wait_at`` as for `trainer`. ``every``: batches from one commit to the next. ``die_at``: where ``gate``
    is a file, the worker of rank 1 removes it and is killed after so many batches. ``ask_at``: before the commit
    of this batch it asks whether the world changes, until it is told so and ``gate`` is gone.
    """

    def train(ctx: Any) -> dict[str, Any]:
        import os
        import signal
        import time

        import horovod.torch as hvd
        import torch

        import elastic_spark as es

        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(238))})
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters(), op=hvd.Sum
        )
        state = es.ElasticState(model=model, optimizer=optimizer, seen=[])

        @hvd.elastic.run
        def loop(state: Any) -> dict[str, Any]:
            while len(state.seen) < 2:
                for batch in ctx.batches("train", state, epochs=len(state.seen) + 1):
                    optimizer.zero_grad()
                    (-model["w"][batch["id"][: batch.rows]].sum()).backward()
                    optimizer.step()
                    number = batch.epoch * ctx.steps_per_epoch("train") + batch.offset + 1
                    if number == die_at and hvd.rank() == 1 and os.path.exists(gate):
                        os.unlink(gate)
                        os.kill(os.getpid(), signal.SIGKILL)
                    while number == ask_at and os.path.exists(gate):
                        if not state._host_messages.empty():
                            open(f"{gate}.{hvd.rank()}", "w").close()
                        state.check_host_updates()
                        time.sleep(0.005)
                    if number % every == 0 or batch.offset + 1 == ctx.steps_per_epoch("train"):
                        state.commit()
                    while os.path.exists(gate) and os.path.getsize(gate) < sum(state.step >= step for step in wait_at):
                        state.check_host_updates()
                        time.sleep(0.005)
                counts = torch.zeros(238)
                for batch in ctx.batches("train"):
                    counts[batch["id"][: batch.rows]] += 1
                    hvd.allreduce(torch.ones(1), name="each batch")  # whoever has fewer would hold up the others
                state.seen.append(hvd.allreduce(counts, op=hvd.Sum, name="counts").tolist())
                state.commit()
            return {"w": model["w"].detach().numpy().copy(), "seen": state.seen, "size": hvd.size()}

        return loop(state)

    return train


def assert_counted(job: BareJob, size: int) -> None:
    first = job.done()[0]
    assert_exact(first["w"], epochs=2)
    assert first["seen"] == [[1.0] * 238] * 2
    assert first["size"] == size
    summary = job.summary()
    assert (summary["rows_once"], summary["rows_twice"], summary["rows_never"]) == (476, 0, 0)


@pytest.mark.parametrize("batch", [10, 101])
def test_epochs_end_on_all_ranks_at_once_also_after_a_resize_at_the_last_but_one_batch(
    template: Template, uneven: Manifest, tmp_path: Path, batch: int
) -> None:
    """BR-03: files of 100, 101, 37 rows and an empty one on 3 workers; a fourth one joins."""
    steps, gate = -(-238 // batch), tmp_path / "gate"
    gate.touch()
    train = counter(str(gate), (steps - 1,))
    with BareJob(template, tmp_path / "job", train, {"train": uneven}, num_proc=3, global_batch=batch) as job:
        job.until(lambda: job.steps() >= steps - 1)
        job.add_agents(1)
        job.until(lambda: len(job.events(ev.GenerationFormed)[-1].members) == 4)
        gate.write_text("x")
        assert_counted(job, 4)


def test_scaling_down_in_good_order_repeats_nothing_and_a_kill_forgets_nothing(
    template: Template, uneven: Manifest, tmp_path: Path
) -> None:
    """BR-01 and BR-02, in one epoch: one of four workers drains, then another one is killed."""
    gate = tmp_path / "gate"
    gate.touch()
    train = counter(str(gate), (8, 16))
    with BareJob(template, tmp_path / "job", train, {"train": uneven}, num_proc=4, global_batch=10) as job:
        job.until(lambda: job.steps() >= 8)
        job.controller.post(core.Draining("2", "a spot notice"))
        job.until(lambda: len(job.events(ev.GenerationFormed)[-1].members) == 3)
        gate.write_text("x")
        job.until(lambda: job.steps() >= 16)
        job.kill(job.events(ev.GenerationFormed)[-1].members[1])
        gate.write_text("xx")
        assert_counted(job, 2)
    assert [event.reason for event in job.events(ev.WorkerLeft)][:1] == ["draining"]
    assert len(job.events(ev.WorkerLost)) == 1


@pytest.mark.parametrize(("every", "die_at"), [(5, 12), (5, 15), (100, 40)])
def test_what_was_not_committed_is_trained_again_once(
    template: Template, uneven: Manifest, tmp_path: Path, every: int, die_at: int
) -> None:
    """BR-02: a worker dies between two commits, at one, and in the second epoch where only its end is committed."""
    flag = tmp_path / "flag"
    flag.touch()
    train = counter(str(flag), every=every, die_at=die_at)
    with BareJob(template, tmp_path / "job", train, {"train": uneven}, num_proc=3, global_batch=10) as job:
        job.done()
        assert_counted(job, job.done()[0]["size"])
    assert not flag.exists()
    assert len(job.events(ev.WorkerLost)) == 1


def test_a_change_that_is_announced_between_two_commits_waits_for_the_next(
    template: Template, uneven: Manifest, tmp_path: Path
) -> None:
    """Horovod's own examples ask at each batch and commit at every tenth."""
    gate = tmp_path / "gate"
    gate.touch()
    train = counter(str(gate), every=5, ask_at=12)
    with BareJob(template, tmp_path / "job", train, {"train": uneven}, num_proc=2, global_batch=10) as job:
        job.until(lambda: job.steps() >= 10)
        job.add_agents(1)
        deadline = time.monotonic() + 60.0
        while not all((tmp_path / f"gate.{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        gate.unlink()
        assert_counted(job, 3)
    assert [event.step for event in job.events(ev.GenerationFormed)] == [0, 15]


def test_a_checkpoint_that_rank_0_cannot_read_is_read_by_another(
    template: Template, uneven: Manifest, tmp_path: Path
) -> None:
    """Its machine does not see what the driver sees; it is not the training function's fault."""
    gate, blind = tmp_path / "gate", tmp_path / "blind"
    gate.touch()
    count = counter(str(gate), (10,))

    def train(ctx: Any) -> Any:
        import os

        import horovod.torch as hvd

        from elastic_spark.checkpoint import CheckpointStore
        from elastic_spark.errors import CheckpointInvalid

        def opened(self: Any, name: str) -> Any:
            raise CheckpointInvalid(f"{name}: is not there")

        if hvd.rank() == 0 and os.path.exists(blind):
            os.unlink(blind)
            CheckpointStore.open = opened  # type: ignore[method-assign]
        return count(ctx)

    options = {"num_proc": 2, "global_batch": 10, "checkpoint_uri": str(tmp_path / "job/checkpoints")}
    with BareJob(template, tmp_path / "job", train, {"train": uneven}, rpo_target_s=0.01, **options) as job:
        job.until(lambda: job.steps() >= 10 and job.events(ev.CheckpointWritten))
        blind.touch()
        for worker in job.wait_world(2):
            job.kill(worker)
        gate.write_text("x")
        job.add_agents(2)
        assert_counted(job, job.done()[0]["size"])  # whether its successor has come in time
    assert not blind.exists()
    assert "checkpoint unreadable" in [event.cause for event in job.events(ev.WorkerLost)]
    restored = [event.source for event in job.events(ev.GenerationFormed) if event.restored_from]
    assert len(restored) == len(set(restored)) == 2, "one tried, and another one did"


def test_an_iterator_that_another_thread_collects_leaves_the_state_alone() -> None:
    told = []
    state: Any = SimpleNamespace(
        draws=lambda: told.append("draws"),
        drew=lambda name, batch: told.append("drew"),
        draws_no_more=lambda: told.append("no more"),
    )
    left, ended = (_counted(iter([1, 2]), "train", state) for _ in range(2))
    next(left)
    thread = threading.Thread(target=left.close)
    thread.start()
    thread.join()
    assert told == ["draws", "drew"]
    list(ended)
    assert told[-1] == "no more"


def test_a_worker_that_waits_for_others_reads_ahead(template: Template, tmp_path: Path) -> None:
    """One of two has come; by the time of the other one all rows are in the cache, and the files are gone."""
    (tmp_path / "in").mkdir()
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(np.ones(ROWS * 8, np.float32)), 8)})
    table = table.append_column("y", pa.array(np.ones(ROWS, np.float32)))
    pq.write_table(table, tmp_path / "in/rows.parquet", row_group_size=100)
    manifest = freeze(tmp_path / "in", tmp_path / "out", name="train")
    cache = tmp_path / "cache"
    with BareJob(
        template, tmp_path / "job", trainer(), {"train": manifest}, num_proc=2, agents=1, cache_dir=str(cache)
    ) as job:
        job.until(lambda: job.events(ev.WorkerReady))
        store = RowStore(manifest, str(cache))
        deadline = time.monotonic() + 60.0
        while store.missing(range(len(manifest.row_groups))):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        store.close()
        (tmp_path / "in/rows.parquet").unlink()
        job.add_agents(1)
        job.done()
    assert job.summary()["rows_once"] == ROWS * EPOCHS


def test_a_member_list_that_cannot_be_written_is_told_once_and_written_when_it_can_be(
    template: Template, data: Manifest, tmp_path: Path
) -> None:
    def idle(ctx: Any, go: str) -> int:
        while not os.path.exists(go):
            time.sleep(0.01)
        return ctx.rank

    listed, go = tmp_path / "taken" / "members.json", str(tmp_path / "go")
    listed.parent.touch()
    with BareJob(template, tmp_path / "job", functools.partial(idle, go=go), {"train": data}, num_proc=1) as job:
        job.controller._members_path = listed
        job.until(lambda: job.events(ev.GenerationRunning))
        job.until(lambda: any("member list" in event.message for event in job.events(ev.Warned)))
        listed.parent.unlink()  # nothing happens in the job from here on
        deadline = time.monotonic() + 20.0
        while not listed.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert [member["host"] for member in json.loads(listed.read_text())["members"]] == ["host0"]
        Path(go).touch()
        assert job.done() == [0]
        assert len([event for event in job.events(ev.Warned) if "member list" in event.message]) == 1


def test_a_worker_whose_storage_hangs_is_told_lost_and_replaced(template: Template, tmp_path: Path) -> None:
    """The file is a pipe that nobody writes to, until the first worker that reads it is lost."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": range(96)}), tmp_path / "in" / "0.parquet")
    manifest = freeze(tmp_path / "in", tmp_path / "out", name="train")
    path, aside = Path(manifest.row_groups[0].path), tmp_path / "aside"

    def train(ctx: Any) -> dict[str, Any]:
        from elastic_spark.testing.counting import train_counting

        return train_counting(ctx, 96, epochs=2)

    path.rename(aside)
    os.mkfifo(path)
    with BareJob(template, tmp_path / "job", train, {"train": manifest}, num_proc=1) as job:
        options = dataclasses.replace(job.controller._job.options, elastic_timeout=8.0)
        job.controller._job = dataclasses.replace(job.controller._job, options=options)
        job.until(lambda: job.events(ev.WorkerLost))
        aside.replace(path)
        (values,) = job.done()
        assert_exact(values["w"], 2)
        lost = job.events(ev.WorkerLost)[0]
    assert lost.cause == "storage stalled"
    assert re.fullmatch(r"nothing has come of the data for \d+ s", lost.detail)
