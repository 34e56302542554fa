"""The data path against its limit and against what users have: one JSON line.

    python tests/bench/bench_data.py [rows] [trials]

A million rows of 32 float32 and a label as Parquet, batches of 1,024, one worker. Files lie in the page cache. The
figures in rows/s are taken in turn, trial by trial, so that a noisy moment hits all alike; they are medians, and ratios
are medians over the trials of the ratio within a trial.

* ``rows_per_s_limit``: `np.take` of 1,024 random rows from one contiguous memory-mapped array, as a torch tensor; one
  thread. ``rows_per_s_warm``: `LaneReader` on a filled cache, both columns of each batch taken, whole epochs; it uses
  two threads besides the consumer. ``ratio_warm_to_limit_cpu``: the same by CPU seconds of all threads.
* ``rows_per_s_cold``: a whole first epoch, from the Parquet files, cache written on the way.
* ``rows_per_s_dataloader``: torch `DataLoader` over `hvd.elastic` `ElasticSampler`, a row at a time, from arrays in
  memory (which favours it: the Parquet was read before); ``_batched``: the data set has
  ``__getitems__``, which returns the batch as it is to be.
* ``rows_per_s_datasets``, ``rows_per_s_streaming``: Hugging Face `datasets` (the shuffled table, in batches of torch
  tensors) and `mosaicml-streaming` (`StreamingDataset` from local MDS files of a tenth of the rows, shuffled, under a
  `DataLoader`), on as many rows as they make in about the time of the others. Left out where they are not installed.
* ``resize_s_1e8``: 8 workers become 7 in the middle of an epoch of 10^8 rows: new ownership on the driver, and on a
  worker that knows nothing yet: the epoch's layout, its share, a reader, the row ids of its first block.
  ``resize_mb_1e8``: the memory this takes. ``peer_resize_s_1e7``: `ElasticSampler.reset` with 10^7 rows.
* ``plan_s``: plan 10^4 lanes over 10^3 workers: ownership, ownership after a change, the layout of an epoch.
* ``step_wait_fraction``: share of the time that a small MLP on this data waits for its batches.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from horovod.torch.elastic.sampler import ElasticSampler
from torch.utils.data import DataLoader, Dataset

from elastic_spark.core.lanes import LanePlan, assign_lanes, choose_lanes
from elastic_spark.core.manifest import Column, Manifest, RowGroup
from elastic_spark.driver.freeze import freeze
from elastic_spark.worker.data import LaneReader

WIDTH, BATCH = 32, 1024


def clock(action: Callable[[], int]) -> tuple[float, float]:
    """Rows per second, and per CPU second of this process, of an action that returns a number of rows."""
    wall, cpu = time.perf_counter(), time.process_time()
    rows = action()
    return rows / (time.perf_counter() - wall), rows / (time.process_time() - cpu)


class Rows(Dataset):
    """Rows in memory, one at a time."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class BatchedRows(Rows):
    """Rows in memory, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> Any:
        return self.x[indices], self.y[indices]


def peers(folder: Path, table: pa.Table, x: np.ndarray, y: np.ndarray) -> dict[str, Callable[[], int]]:
    """An action for each of the other libraries that are installed."""
    actions: dict[str, Callable[[], int]] = {}
    if importlib.util.find_spec("datasets"):
        import datasets

        shuffled = datasets.Dataset(table).with_format("torch").shuffle(seed=1)

        def read_datasets() -> int:
            batches = itertools.islice(shuffled.iter(batch_size=BATCH), 100)
            return sum(len(batch["y"]) for batch in batches if batch["x"].shape[1] == WIDTH)

        actions["datasets"] = read_datasets
    if importlib.util.find_spec("streaming"):
        import streaming

        streaming.base.util.clean_stale_shared_memory()
        kinds = {"x": f"ndarray:float32:{WIDTH}", "y": "float32"}
        with streaming.MDSWriter(out=str(folder / "mds"), columns=kinds) as out:
            for row in range(len(x) // 10):
                out.write({"x": x[row], "y": y[row]})
        streamed = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
        loader = DataLoader(streamed, batch_size=BATCH)
        actions["streaming"] = lambda: sum(len(batch["y"]) for batch in itertools.islice(loader, 60))
    return actions


def measure_rows(folder: Path, rows: int, trials: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    x, y = rng.random((rows, WIDTH), dtype=np.float32), rng.random(rows, dtype=np.float32)
    array = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), WIDTH)
    (folder / "in").mkdir()
    table = pa.table({"x": array, "y": y})
    pq.write_table(table, folder / "in/rows.parquet", row_group_size=65_536)
    one = np.lib.format.open_memmap(folder / "one.npy", mode="w+", dtype=np.float32, shape=(rows, WIDTH + 1))
    one[:, :WIDTH], one[:, WIDTH] = x, y
    one = np.load(folder / "one.npy", mmap_mode="r")
    manifest = freeze(folder / "in", folder / "out")
    plan = LanePlan(manifest.group_rows, choose_lanes(8, BATCH, rows), BATCH, seed=1)
    random_rows = rng.permutation(rows)

    def limit() -> int:
        for at in range(0, rows, BATCH):
            torch.from_numpy(np.take(one, random_rows[at : at + BATCH], axis=0))
        return rows

    def read(reader: LaneReader, epoch: int) -> int:
        seen = 0
        for batch in reader.batches(epoch):
            _, labels = batch["x"], batch["y"]
            seen += len(labels)
        return seen

    def cold() -> int:
        cache = tempfile.mkdtemp(dir=folder)
        reader = LaneReader(manifest, plan, range(plan.lanes), 1, cache_dir=cache)
        seen = read(reader, 0)
        reader.close()
        shutil.rmtree(cache)
        return seen

    def load(data: Rows, batches: int) -> Callable[[], int]:
        def run() -> int:
            whole = {"collate_fn": lambda batch: batch} if isinstance(data, BatchedRows) else {}
            loader = DataLoader(data, batch_size=BATCH, sampler=sampler, **whole)
            return sum(len(labels) for (_, labels), _ in zip(loader, range(batches), strict=False))

        return run

    sampler = ElasticSampler(x)
    warm_reader = LaneReader(manifest, plan, range(plan.lanes), 1, cache_dir=str(folder / "cache"))
    read(warm_reader, 0)
    limit()
    actions = {
        "limit": limit,
        "warm": lambda: read(warm_reader, 1),
        "cold": cold,
        "dataloader": load(Rows(torch.from_numpy(x), torch.from_numpy(y)), 60),
        "dataloader_batched": load(BatchedRows(torch.from_numpy(x), torch.from_numpy(y)), 400),
        **peers(folder, table, x, y),
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(trials):
        for name, action in actions.items():
            seen[name].append(clock(action))

    def ratio(other: str, which: int) -> float:
        return statistics.median(a[which] / b[which] for a, b in zip(seen["warm"], seen[other], strict=True))

    out = {f"rows_per_s_{name}": statistics.median(wall for wall, _ in values) for name, values in seen.items()}
    out |= {f"ratio_warm_to_{name}": ratio(name, 0) for name in actions if name not in ("warm", "cold")}
    out["ratio_warm_to_limit_cpu"] = ratio("limit", 1)
    out["step_wait_fraction"] = wait_fraction(warm_reader)
    warm_reader.close()
    return out


def wait_fraction(reader: LaneReader) -> float:
    """Share of the time that a training step of an MLP waits for its batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.Adam(model.parameters())
    waited, batches, started = 0.0, reader.batches(2), time.perf_counter()
    for _ in range(300):
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch["x"])[:, 0], batch["y"])
        (loss * batch.weight).backward()
        optimizer.step()
    return waited / (time.perf_counter() - started)


def measure_resize(folder: Path, trials: int) -> dict[str, float]:
    rows = 10**8
    sizes = [65_536] * (rows // 65_536) + [rows % 65_536]
    groups = [RowGroup(f"/data/part-{i // 8}.parquet", i % 8, n, n * 132) for i, n in enumerate(sizes)]
    manifest = Manifest.of("big", "/data", groups, [Column("x", "float32", WIDTH), Column("y", "float32")])
    workers = [f"w{i}" for i in range(8)]
    lanes = choose_lanes(8, BATCH, rows)
    before = assign_lanes(lanes, workers, {})

    def resize() -> None:
        after = assign_lanes(lanes, workers[1:], before)
        plan = LanePlan(manifest.group_rows, lanes, BATCH, seed=1)
        reader = LaneReader(manifest, plan, after["w7"], 7, cache_dir=str(folder / "big"))
        share = plan.share(3, after["w7"])
        share.row_groups()
        share.row_ids(rows // BATCH // 2, 200)
        reader.close()

    seconds = []
    for _ in range(max(5, trials)):
        started = time.perf_counter()
        resize()
        seconds.append(time.perf_counter() - started)
    tracemalloc.start()
    resize()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sampler = ElasticSampler(range(10**7))
    started = time.perf_counter()
    sampler.reset()
    return {
        "resize_s_1e8": statistics.median(seconds),
        "resize_mb_1e8": peak / 1e6,
        "peer_resize_s_1e7": time.perf_counter() - started,
    }


def measure_plan() -> float:
    workers = [f"w{i}" for i in range(1000)]
    weights = {worker: 1 + i % 7 / 7 for i, worker in enumerate(workers)}
    started = time.perf_counter()
    first = assign_lanes(10**4, workers, {}, weights)
    assign_lanes(10**4, workers[10:], first, weights)
    LanePlan((65_536,) * 1526, 10**4, 16_384, seed=1).layout(0)
    return time.perf_counter() - started


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    trials = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    hvd.init()
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        out = measure_rows(Path(folder), rows, trials) | measure_resize(Path(folder), trials)
    out["plan_s"] = statistics.median(measure_plan() for _ in range(trials))
    figures = {name: float(f"{value:.4g}") for name, value in out.items()}
    print(json.dumps({"bench": "data", "rows": rows, "batch": BATCH, "trials": trials, **figures}))


if __name__ == "__main__":
    main()
