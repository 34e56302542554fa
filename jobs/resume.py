"""A driver is lost, and a second start goes on where it was.

    python jobs/resume.py

Starts a Spark cluster on this machine, submits `jobs/train_digits.py` to it, sends ``kill -9`` to the whole driver once
a checkpoint is there, and submits it again under the same ``--job-name``. Ends with exit code 1, and says why, unless
the second start resumed from a checkpoint, in the same MLflow run, and finished with no row trained twice.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from elastic_spark.core import events as ev
from elastic_spark.testing import StandaloneCluster

HERE = Path(__file__).resolve().parent


def main() -> int:
    options = parse_options()
    folder = Path(options.work_dir).resolve() / "resume"
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["--epochs", str(options.epochs), "--rpo-target-s", "0.5", "--work-dir", str(folder)]
    arguments += ["--tracking-uri", f"sqlite:///{folder}/mlflow.db"]
    log = folder / "digits" / "events.jsonl"
    if log.exists():
        print(f"{folder} holds an earlier try: remove it, or name another --work-dir")
        return 2

    with StandaloneCluster(workers=2) as cluster, open(folder / "output.txt", "w") as output:
        print("first start", flush=True)
        job = cluster.spark_submit(HERE / "train_digits.py", *arguments, stdout=output, stderr=subprocess.STDOUT)
        cluster.wait_for(lambda: job.poll() is not None or events(log, ev.CheckpointWritten), 200.0, "a checkpoint")
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        before = events(log, ev.StepsCommitted)
        print(f"kill -9 of the driver after step {before[-1].first_step + len(before[-1].times) - 1}", flush=True)

        print("second start", flush=True)
        job = cluster.spark_submit(HERE / "train_digits.py", *arguments, stdout=subprocess.PIPE, stderr=output)
        told, _ = job.communicate(timeout=300)

    if job.returncode != 0:
        print(f"the second start ended with exit code {job.returncode}; see {output.name}")
        return 1
    result = json.loads(next(line for line in told.splitlines() if line.startswith('{"run_id"')))
    starts = events(log, ev.JobStarted)
    print(f"resumed at step {result['resumed_step']} from {result['resumed_from']}, finished at step {result['steps']}")
    print(f"rows: {result['rows_once']:,} once, {result['rows_twice']} twice, {result['rows_never']} never")
    print(f"accuracy on held-out images: {result['val_accuracy']:.1%}; MLflow run {result['run_id']}")
    promises = {
        "it resumed from a checkpoint": result["resumed_from"] is not None and result["resumed_step"] > 0,
        "it is the same MLflow run": len({start.run_id for start in starts}) == 1,
        "each row was trained once an epoch": result["rows_twice"] == result["rows_never"] == 0,
        "it finished": result["status"] == "FINISHED",
    }
    broken = [promise for promise, kept in promises.items() if not kept]
    print(*(f"NOT AS PROMISED: {promise}" for promise in broken), *([] if broken else ["all as promised"]), sep="\n")
    return 1 if broken else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--work-dir", default=".elastic_spark", help="everything is written below it")
    return parser.parse_args()


def events(log: Path, kind: type[ev.Event]) -> list:
    """All events of this kind so far."""
    if not log.exists():
        return []
    with log.open(encoding="utf-8") as lines:
        return [event for event in ev.read_log(lines) if isinstance(event, kind)]


if __name__ == "__main__":
    sys.exit(main())
