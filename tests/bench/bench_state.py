"""What keeping the state costs: commit, snapshot, checkpoint, load; one JSON object as the last line.

    python tests/bench/bench_state.py [--folder DIR] [--trials 9] [--seconds 60]

A state of 302 MB: 25.2 M parameters and Adam's two moments, one rank of a real Horovod world of one, with the worker's
own session, writer and store; the driver's part (the manifest) is played by the channel's stand-in. Each trial takes
every measure once, in turn, so that a noisy moment hits all alike; ``_p50`` and ``_s`` are medians over the trials.

* ``commit_ms_p50``: `ElasticState.save` in a training loop, where it takes no snapshot: the mark.
* ``snapshot_ms_p50``: a snapshot of everything; ``memcpy_ms_p50``: the same bytes, copied into buffers that are there;
  ``torchstate_commit_ms_p50``: ``hvd.elastic.TorchState.save`` of the same model and optimizer.
* ``step_overhead_pct``: what commits, snapshots and checkpoints at the default policy cost in a loop of ``--seconds``:
  the share of the time inside of ``save`` (``save_share_pct``), and by how much the other steps take longer while a
  checkpoint is copied and written (``writer_share_pct``). Both come from within one loop, so a machine whose speed
  drifts does not disturb them. ``step_overhead_across_pct``: the loop's mean step against that of loops without a state
  before and after it, as long together; ``plain_drift_pct`` is by how much those two differ, and so how much it can be
  believed.
* ``rpo_s_max``: what a total loss could have cost in that loop at the worst moment: from the state of a checkpoint to
  the manifest of the next one.
* ``disk_limit_mb_s``: the same bytes written in order to one file, then fsync; ``write_mb_s``:
  `CheckpointStore.write_part`, hashed, with the meta file and the directories synced; ``write_ratio``: median over the
  trials of the one by the other.
* ``load_verify_s``: `load`, every byte checked. ``torch_save_load_s``: ``torch.save`` with fsync, then ``torch.load``,
  which check nothing. Files are read from the page cache, as after a restart on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import torch

import elastic_spark as es
from elastic_spark.checkpoint import CheckpointStore, WrittenPart
from elastic_spark.config import JobConfig
from elastic_spark.worker import collective
from elastic_spark.worker.session import WorkerSession, bind

LAYERS, WIDTH = 24, 1024


class Driver:
    """Takes the worker's messages: a written part gets its manifest, and reports are confirmed, at once."""

    local_host = "127.0.0.1"

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.session: WorkerSession | None = None
        self.durable: list[tuple[int, float]] = []  # step, time

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        if message["type"] == "checkpoint":
            part = WrittenPart.from_dict(message["part"])
            self.store.commit(part.step, part.token, [part], fields=message["fields"])
            self.durable.append((part.step, time.monotonic()))
        elif message["type"] == "progress" and self.session is not None:
            self.session._confirmed(message["generation"], len(message["reports"]))


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


class Bench:
    """The model, its state and the places that are measured."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.driver = Driver(CheckpointStore(f"{folder}/checkpoints"))
        defaults = JobConfig()
        config = {"worker": "w0", "checkpoint_uri": self.driver.store.uri}
        config |= {"rpo_target_s": defaults.rpo_target_s, "ckpt_budget": defaults.ckpt_budget}
        self.session = WorkerSession(self.driver, config)  # type: ignore[arg-type]
        self.driver.session = self.session
        bind(self.session)
        collective.install(self.session)
        env = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        body = {"restore": None, "memory": False, "sole_holder": False, "step": 0, "seed": 0}
        place = {"type": "assignment", "generation": 1, "rank": 0, "size": 1, "env": env, "body": body}
        self.session._assignments.put(place)
        hvd.init()
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=1e-4), named_parameters=self.model.named_parameters()
        )
        self.state = es.ElasticState(model=self.model, optimizer=self.optimizer, best=0.0)
        self.batch = torch.randn(32, WIDTH)
        self.drawn: Any = SimpleNamespace(epoch=0, offset=0, rows=32, row_hash=0)
        self.saves: list[float] = []
        self.beside: list[float] = []  # steps while a checkpoint was written
        self.alone: list[float] = []  # the others
        self.times: dict[int, float] = {}  # of commits, by step
        self.step()
        self.state.sync()
        _, live = self.state.capture()
        self.tensors = {name: tensor.detach().clone() for name, tensor in live.items()}
        self.buffers = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.stock = hvd.elastic.TorchState(self.model, self.optimizer, best=0.0)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).pow(2).mean().backward()
        self.optimizer.step()

    def loop(self, seconds: float, *, keep: bool) -> float:
        """Mean step of a loop of so long, in seconds."""
        steps, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            writing = self.writing
            self.state.draws()
            self.state.drew("train", self.drawn)
            took = timed(self.step)
            (self.beside if writing or self.writing else self.alone).append(took)
            if keep:
                self.saves.append(timed(lambda: self.state.save(loss=0.0)))
                self.times[self.state.step] = time.monotonic()
            steps += 1
        return (time.perf_counter() - started) / steps

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        saver = self.session._saver
        return saver is not None and saver._writer.busy

    def overhead(self, seconds: float) -> dict[str, float]:
        self.loop(2.0, keep=True)
        before = self.loop(seconds / 2, keep=False)
        for record in (self.saves, self.beside, self.alone, self.times):
            record.clear()
        begun = time.monotonic()
        kept = self.loop(seconds, keep=True)
        ended = time.monotonic()
        inside, beside, alone = sum(self.saves), list(self.beside), list(self.alone)
        total = inside + sum(beside) + sum(alone)
        slower = len(beside) * (statistics.mean(beside) - statistics.mean(alone)) if beside else 0.0
        while self.writing:
            time.sleep(0.01)
        after = self.loop(seconds / 2, keep=False)
        plain = (before + after) / 2
        durable = [(self.times[step], at) for step, at in self.driver.durable if step in self.times]
        states = [begun, *(state for state, _ in durable)]
        manifests = [*(at for _, at in durable), ended]
        return {
            "commit_ms_p50": 1e3 * statistics.median(self.saves),
            "commit_ms_max": 1e3 * max(self.saves),
            "step_ms_plain": 1e3 * plain,
            "step_overhead_pct": 100 * (inside + slower) / (total - inside - slower),
            "save_share_pct": 100 * inside / total,
            "writer_share_pct": 100 * slower / total,
            "step_overhead_across_pct": 100 * (kept / plain - 1),
            "plain_drift_pct": 100 * (after / before - 1),
            "checkpoints": len(durable),
            "rpo_s_max": max(at - state for state, at in zip(states, manifests, strict=True)),
        }

    def memcpy(self) -> None:
        for name, buffer in self.buffers.items():
            buffer.copy_(self.tensors[name])

    def plain(self) -> None:
        with open(f"{self.folder}/plain", "wb", buffering=0) as file:
            for tensor in self.tensors.values():
                file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
            os.fsync(file.fileno())

    def torch_save(self) -> None:
        with open(f"{self.folder}/torch.pt", "wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def trials(self, count: int) -> dict[str, float]:
        times: dict[str, list[float]] = {}
        store = CheckpointStore(f"{self.folder}/store")

        def take(name: str, action: Callable[[], object]) -> None:
            times.setdefault(name, []).append(timed(action))

        for trial in range(count):
            take("memcpy", self.memcpy)
            take("snapshot", self.state._take_snapshot)
            take("torchstate", self.stock.save)
            take("plain", self.plain)
            os.unlink(f"{self.folder}/plain")
            take("write", lambda trial=trial: store.write_part(trial, self.tensors, {}, token="t"))
            store.discard(trial, "t")
            part = store.write_part(trial, self.tensors, {}, token="c")
            checkpoint = store.commit(trial, "c", [part], fields={})
            take("load_verify", lambda checkpoint=checkpoint: store.load(checkpoint))
            take("verify", lambda checkpoint=checkpoint: store.verify(checkpoint))
            store.discard(trial, "c")
            take("torch_save", self.torch_save)
            take("torch_load", lambda: torch.load(f"{self.folder}/torch.pt"))
            os.unlink(f"{self.folder}/torch.pt")
        megabytes = sum(tensor.nbytes for tensor in self.tensors.values()) / 1e6
        middle = {name: statistics.median(values) for name, values in times.items()}

        def ratio(one: str, other: str) -> float:
            return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))

        return {
            "trials": count,
            "megabytes": megabytes,
            "memcpy_ms_p50": 1e3 * middle["memcpy"],
            "snapshot_ms_p50": 1e3 * middle["snapshot"],
            "snapshot_ratio": ratio("snapshot", "memcpy"),
            "torchstate_commit_ms_p50": 1e3 * middle["torchstate"],
            "write_mb_s": megabytes / middle["write"],
            "disk_limit_mb_s": megabytes / middle["plain"],
            "write_ratio": ratio("plain", "write"),
            "load_verify_s": middle["load_verify"],
            "verify_s": middle["verify"],
            "torch_save_load_s": middle["torch_save"] + middle["torch_load"],
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", help="a directory on the disk to measure; default: the system's temporary one")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        bench = Bench(folder)
        figures = bench.trials(options.trials) | bench.overhead(options.seconds)
    finally:
        shutil.rmtree(folder)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
