"""Seeded churn on a real cluster, with a model that counts how often each row was trained.

    python jobs/chaos.py --seeds 0:10

For each seed a Spark cluster is started on this machine, a job is run on it, and workers, executors and machines are
killed, drained and added as the seed says. Ends with exit code 1 unless every job held every promise under every blow;
a seed that failed is tried again with ``--seeds N``, and what its job left is kept below ``--keep``: its event log, its
checkpoints. To try a function of your own: ``elastic-spark chaos``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_spark.testing.chaos import chaos
from elastic_spark.testing.churn import schedule
from elastic_spark.testing.counting import assert_exact, train_counting

ROWS, BATCH, STEP_S = 1200, 24, 0.03


def train(ctx, epochs):
    counted = train_counting(ctx, ROWS, epochs=epochs, step_s=STEP_S)
    assert_exact(counted["w"], epochs)
    return counted["steps"]


def main() -> int:
    options = parse_options()
    seeds = options.seeds
    broken = []
    for seed in seeds:
        folder = options.keep / f"seed-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started = time.monotonic()
        verdict = try_seed(seed, folder, options)
        print(f"seed {seed}: {verdict}, {time.monotonic() - started:.0f} s", flush=True)
        if verdict == "held":
            shutil.rmtree(folder)
        else:
            broken.append(seed)
            print(f"  its log: {folder / 'job' / 'events.jsonl'}", flush=True)
    print(f"{len(seeds) - len(broken)} of {len(seeds)} held" + (f"; not: {broken}" if broken else ""))
    return 1 if broken else 0


def try_seed(seed: int, folder: Path, options: argparse.Namespace) -> str:
    rows = str(folder / "rows.parquet")
    pq.write_table(pa.table({"id": range(ROWS)}), rows, row_group_size=100)
    job = {
        **{"kwargs": {"epochs": options.epochs}, "data": {"train": rows}, "global_batch": BATCH},
        **{"num_proc": options.machines, "min_num_proc": 1, "max_num_proc": options.machines + 1},
        **{"work_dir": str(folder), "job_name": "job", "tracking": False, "verbose": 0},
    }
    blows = schedule(seed, options.blows, options.machines, options.machines + 1)
    outcome = chaos(train, blows, options.machines, job, conf={}, say=lambda line: print(f"  {line}", flush=True))
    if outcome.error is not None:
        print(f"  {type(outcome.error).__name__}: {' '.join(str(outcome.error).split())}")
    for promise, kept in outcome.promises.items():
        if not kept:
            print(f"  BROKEN: {promise}")
    if not outcome.held:
        return "BROKEN"
    if outcome.struck < outcome.due:
        return f"not tried, as only {outcome.struck} of {outcome.due} blows fell before the job ended (--epochs)"
    return "held"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=as_range, default="0:10", help="first:end, or one")
    parser.add_argument("--blows", type=int, default=8)
    parser.add_argument("--machines", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=45)
    keep = Path(tempfile.gettempdir()) / f"elastic-spark-chaos-{os.getuid()}"
    parser.add_argument("--keep", type=Path, default=keep, help="folder for what seeds that failed have left")
    options = parser.parse_args()
    try:
        options.keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--keep: {error}")
    return options


def as_range(text):
    first, _, end = text.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    if not seeds:
        raise ValueError("no seed")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
