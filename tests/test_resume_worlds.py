"""A checkpoint that four ranks wrote, a part each, goes on at 1, 2, 3 and 7 with the losses of an uninterrupted run.

They copied it late, as a large state: while the step after it was computed, and after the loop had swapped other
weights in and out. Real ranks of Horovod, forked from one server that has imported what they need; the worker's own
session, state, reader and checkpoint writer. The driver's part is played by the test: it places the ranks and commits
what they wrote.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from horovod_ranks import Rendezvous, world

from elastic_spark.checkpoint import Checkpoint, CheckpointStore, WrittenPart
from elastic_spark.core.lanes import LanePlan, assign_lanes
from elastic_spark.core.manifest import Manifest
from elastic_spark.driver.freeze import freeze

ROWS, BATCH, LANES, SAVED, STEPS = 600, 56, 28, 10, 15
LIMIT_S = 100.0


class Told:
    """Stands for the channel to the driver: what a worker says is kept."""

    local_host = "127.0.0.1"

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        self.messages.append(message)


def rank_main(task: dict[str, Any], answer: Any) -> None:
    """One rank: restores where it is told to, trains, and answers with ``(losses by step, written parts, digest)``."""
    import time

    import horovod.torch as hvd
    import torch

    import elastic_spark as es
    from elastic_spark.worker import collective
    from elastic_spark.worker import state as state_module
    from elastic_spark.worker.context import Context
    from elastic_spark.worker.session import WorkerSession, bind

    torch.set_num_threads(1)
    state_module.LATE_FROM_S = -1.0
    told = Told()
    session = WorkerSession(told, task["config"])  # type: ignore[arg-type]
    bind(session)
    collective.install(session)
    session._assignments.put(task["assignment"])
    hvd.init()
    torch.manual_seed(hvd.rank())  # ranks differ until they are made equal
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    state = es.ElasticState(model=model, optimizer=optimizer, schedule=schedule, batches=0)
    state.sync()
    losses: dict[int, float] = {}
    context = Context(session, {"train": (task["manifest"], task["plan"])})
    for batch in context.batches("train", state, epochs=9):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"]) * batch.weight
        loss.backward()
        optimizer.step()
        schedule.step()
        state.batches += 1
        whole = float(hvd.allreduce(loss.detach(), name="loss"))
        if state.step + 1 == task["save_at"]:
            session._obey({"type": "parts", "generation": 1, "step": task["save_at"]})
        state.save(loss=whole)
        losses[state.step] = whole
        committed = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.zero_()  # an evaluation with other weights, which torch's version counters do not see
        for parameter, weights in zip(model.parameters(), committed, strict=True):
            parameter.data.copy_(weights)
        if state.step == task["last"]:
            break
    deadline = time.monotonic() + 60.0
    while session._saver is not None and session._saver._writer.busy and time.monotonic() < deadline:
        time.sleep(0.005)
    parts = [message for message in told.messages if message["type"] == "checkpoint"]
    answer.send((losses, parts, state.digests()[0].hex()))
    answer.close()
    os._exit(0)


@dataclass
class Bench:
    """Worlds on the same data, the same store."""

    store: CheckpointStore
    manifest: Manifest
    plan: LanePlan
    context: Any

    def run(
        self, size: int, *, last: int, save_at: int = -1, resumed: Checkpoint | None = None
    ) -> tuple[dict[int, float], list[dict[str, Any]]]:
        """Losses by step, and what was said of checkpoints, over a world of ``size`` whose ranks end equal."""
        workers = [f"w{rank}" for rank in range(size)]
        lanes = assign_lanes(self.plan.lanes, workers, {})
        server = Rendezvous()
        ranks = []
        try:
            for rank, worker in enumerate(workers):
                body = {
                    "memory": False,
                    "sole_holder": False,
                    "lanes": {"train": lanes[worker]},
                    "restore": resumed.uri if resumed else None,
                    "step": resumed.step if resumed else 0,
                    "seed": 0,
                }
                config = {
                    "worker": worker,
                    "checkpoint_uri": self.store.uri,
                    "rpo_target_s": 1e6,
                    "ckpt_budget": 1.0,
                    "cache_dir": None,
                }
                place = {"type": "assignment", "generation": 1, "rank": rank, "size": size, "body": body}
                assignment = {**place, "env": world(server, rank, size)}
                task = {"config": config, "assignment": assignment, "save_at": save_at}
                task |= {"manifest": self.manifest, "plan": self.plan, "last": last}
                ours, theirs = self.context.Pipe()
                process = self.context.Process(target=rank_main, args=(task, theirs))
                process.start()
                theirs.close()
                ranks.append((process, ours))
            answers = []
            for _, ours in ranks:
                assert ours.poll(LIMIT_S), "a rank did not end in time"
                answers.append(ours.recv())
        finally:
            for process, _ in ranks:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()
            server.close()
        assert len({digest for _, _, digest in answers}) == 1, "all ranks hold the same at the end"
        assert all(losses == answers[0][0] for losses, _, _ in answers)
        return answers[0][0], [part for _, parts, _ in answers for part in parts]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder: Path = tmp_path_factory.mktemp("worlds")
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype(np.float32)
    y = (np.sin(x[:, 0]) + x[:, 1] * x[:, 2]).astype(np.float32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4), "y": y})
    pq.write_table(table, folder / "data.parquet", row_group_size=100)
    manifest = freeze(str(folder / "data.parquet"), str(folder / "frozen"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["horovod.torch", "elastic_spark.worker.state", "elastic_spark.worker.data"])
    plan = LanePlan(manifest.group_rows, LANES, BATCH, 0, True)
    return Bench(CheckpointStore(str(folder / "store")), manifest, plan, context)


@pytest.fixture(scope="module")
def uninterrupted(bench: Bench) -> tuple[dict[int, float], Checkpoint]:
    """The losses of a world of four that goes through, and the checkpoint that it wrote on its way."""
    losses, said = bench.run(4, last=STEPS, save_at=SAVED)
    parts = [WrittenPart.from_dict(message["part"]) for message in said]
    assert sorted(part.part for part in parts) == [0, 1, 2, 3]
    checkpoint = bench.store.commit(SAVED, parts[0].token, parts, fields=said[0]["fields"])
    sizes = [file.bytes for file in checkpoint.files if file.name.startswith("state")]
    assert len(sizes) == 4
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert len({round(loss, 3) for loss in losses.values()}) > STEPS // 2, "it learns"
    return losses, checkpoint


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_written_at_four_it_goes_on_at(size: int, bench: Bench, uninterrupted: tuple[dict[int, float], Any]) -> None:
    expected, checkpoint = uninterrupted
    assert checkpoint.step == SAVED
    losses, _ = bench.run(size, last=STEPS, resumed=checkpoint)
    assert sorted(losses) == list(range(SAVED + 1, STEPS + 1))
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-6), "the next one, and more"
