"""`make demo`: the main job on a cluster of three executors, one of which is killed in the middle of an epoch.

Starts a real standalone cluster, submits `jobs/train_flights.py` to it, waits until the second epoch is half done,
sends ``kill -9`` to an executor's JVM, lets Spark bring another one, and reports from the job's event log.
Ends with exit code 1, and says why, when anything is not as promised: a row lost or trained twice, a committed step
undone, no return to three workers, a model that learned nothing, not exactly one MLflow run, a process left behind.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

from elastic_spark.core import events as ev
from elastic_spark.core.metrics import Summary
from elastic_spark.tail import Tail
from elastic_spark.testing import StandaloneCluster

HERE = Path(__file__).resolve().parent
WORKERS = 3
LEAST_AUC = 0.70


def main() -> int:
    options = parse_options()
    work_dir = Path(options.work_dir).resolve()
    job_name = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    job_dir = work_dir / job_name
    job_dir.mkdir(parents=True)
    tracking_uri = f"sqlite:///{work_dir}/mlflow.db"
    log = EventLog(job_dir / "events.jsonl")

    say(f"starting a Spark cluster: 1 master, {WORKERS} one-core workers")
    with StandaloneCluster(workers=WORKERS) as cluster, open(job_dir / "spark-submit.log", "w") as output:
        say(f"submitting train_flights.py to {cluster.master_url}; its output: {shown(output.name)}")
        job = cluster.spark_submit(
            HERE / "train_flights.py",
            *("--epochs", str(options.epochs), "--num-proc", str(WORKERS), "--max-num-proc", str(WORKERS)),
            *("--job-name", job_name, "--work-dir", str(work_dir), "--tracking-uri", tracking_uri),
            cwd=job_dir,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        killed = watch(cluster, job, log, options)
        left = leftovers(cluster) if job.poll() is not None else []

    if job.returncode != 0 or killed is None:
        print(Path(output.name).read_text()[-3000:])
    report(log, tracking_uri)
    problems = broken_promises(log, job.returncode, options.epochs, killed, left, tracking_uri)
    for problem in problems:
        say(f"NOT AS PROMISED: {problem}")
    if not problems:
        say("all as promised: each row once, no step undone, 3 workers again, a model that learned, one MLflow run")
    return 1 if problems else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--work-dir", default=".elastic_spark", help="logs, checkpoints and the MLflow database")
    parser.add_argument("--kill-rank", type=int, default=1, help="rank of the worker whose executor is killed")
    parser.add_argument("--limit-s", type=float, default=900.0, help="the demo is given up after this time")
    return parser.parse_args()


# -- while the job runs -----------------------------------------------------------------------------------------------


class EventLog:
    """Follows a job's event log while it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.summary = Summary()
        self.step = 0
        self.size = 0
        self.rows = 0.0
        self.started_at = 0.0
        self.frozen: dict[str, ev.DatasetFrozen] = {}
        self.metrics: dict[str, float] = {}
        self.killed_at = 0.0
        self._tail = Tail(path)

    def poll(self) -> None:
        """Take in what was added."""
        for event in self._tail.read():
            self._add(event)

    def _add(self, event: ev.Event) -> None:
        self.summary.add(event)
        if isinstance(event, ev.DatasetFrozen):
            self.frozen[event.dataset] = event
        elif isinstance(event, ev.JobStarted):
            self.started_at = event.at
        elif isinstance(event, ev.GenerationFormed):
            self.size = len(event.members)
        elif isinstance(event, ev.StepsCommitted):
            self.step = event.first_step + len(event.times) - 1
        elif isinstance(event, ev.MetricsReported):
            self.metrics.update(event.values)

    @property
    def steps_per_epoch(self) -> int:
        return self.frozen["train"].steps_per_epoch if "train" in self.frozen else 0


def watch(
    cluster: StandaloneCluster, job: subprocess.Popen[str], log: EventLog, options: argparse.Namespace
) -> str | None:
    """Show progress until the job ends, and kill an executor on the way. Returns the executor's id."""
    deadline = time.monotonic() + options.limit_s
    killed = None
    shown_at = 0.0
    while job.poll() is None and time.monotonic() < deadline:
        log.poll()
        middle = log.steps_per_epoch * 1.5
        if killed is None and middle and log.step >= middle and log.size == WORKERS:
            rank_of = cluster.ranks(log.path)
            killed = next(executor for executor, rank in rank_of.items() if rank == options.kill_rank)
            log.killed_at = time.time()
            victim = cluster.kill_executor(killed)
            say(f"kill -9 {victim.pid}: executor {killed}, hosting rank {options.kill_rank}, in mid-epoch 2")
        if time.monotonic() - shown_at >= (0.5 if sys.stdout.isatty() else 5.0):
            shown_at = time.monotonic()
            say(progress(log, options.epochs), passing=True)
        time.sleep(0.1)
    log.poll()
    if job.poll() is None:
        say(f"giving up after --limit-s {options.limit_s:.0f}: the job is still running")
    return killed


def progress(log: EventLog, epochs: int) -> str:
    if not log.step:
        return "Spark prepares the data" if not log.frozen else "workers are starting"
    total = log.steps_per_epoch * epochs
    epoch = min(epochs, (log.step - 1) // log.steps_per_epoch + 1)
    loss = f"loss {log.metrics['loss']:.4f}" if "loss" in log.metrics else ""
    return f"epoch {epoch}/{epochs}  step {min(log.step, total)}/{total}  {log.size} workers  {loss}"


def leftovers(cluster: StandaloneCluster) -> list[str]:
    """Processes of the job that outlive it by 10 seconds; executors may take a moment to end."""
    deadline = time.monotonic() + 10
    while (left := cluster.processes(daemons=False)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"{process.pid} {process.command[:80]}" for process in left]


# -- after it ---------------------------------------------------------------------------------------------------------


def report(log: EventLog, tracking_uri: str) -> None:
    figures = log.summary.result()
    print("\nworld size over time")
    if figures["world_sizes"]:
        at, size = figures["world_sizes"][0]
        print(f"  {at - log.started_at:6.1f} s  {size} workers  start")
    for change in figures["changes"]:
        seconds, size = change["at"] - log.started_at, change["to_size"]
        cause = change["cause"] if change["lost"] or not change["joined"] else f"{', '.join(change['joined'])} joined"
        pause = "no step after it" if change["pause_s"] is None else f"pause {change['pause_s']:.2f} s"
        print(f"  {seconds:6.1f} s  {size} workers  {cause}; {pause}")
    print(
        f"rows            {figures['rows_once']:,} trained once, {figures['rows_twice']:,} twice, "
        f"{figures['rows_never']:,} never\n"
        f"committed steps {figures['steps']:,} (one behind the last batch, of the validation), of which "
        f"{figures['steps_lost']} had to be done again\n"
        f"validation AUC  {log.metrics.get('val_auc', float('nan')):.4f}\n"
        f"event log       {shown(log.path)}\n"
        f"MLflow run      {figures['run_id']}\n"
        f"look at it with {shown(sys.executable)} -m mlflow ui --backend-store-uri {tracking_uri} --port 5000\n"
    )


def broken_promises(
    log: EventLog, exit_code: int | None, epochs: int, killed: str | None, left: list[str], tracking_uri: str
) -> list[str]:
    """What is not as the README promises; empty when all is well."""
    figures = log.summary.result()
    worlds = [size for at, size in figures["world_sizes"] if at >= log.killed_at]
    sizes = [size for size, _ in itertools.groupby(worlds)]  # lanes may have changed owners in between
    due = epochs * log.frozen["train"].rows if "train" in log.frozen else -1
    auc = log.metrics.get("val_auc", 0.0)
    runs = finished_runs(tracking_uri, figures["job_name"])
    checks = {
        f"the job ended with exit code {exit_code}": exit_code == 0,
        f"the job's status is {figures['status']}: {figures['error']}": figures["status"] == "FINISHED",
        "no executor was killed: the job ended before": killed is not None,
        f"{figures['rows_twice']} rows were trained twice": figures["rows_twice"] == 0,
        f"{figures['rows_never']} rows were never trained": figures["rows_never"] == 0,
        f"{figures['rows_once']} rows were trained once, {due} were due": figures["rows_once"] == due,
        f"{figures['steps_lost']} committed steps were undone": figures["steps_lost"] == 0,
        f"sizes after the kill: {sizes}; not {WORKERS - 1} and then {WORKERS}": sizes[:2] == [WORKERS - 1, WORKERS],
        f"validation AUC {auc:.4f} is below {LEAST_AUC}": auc >= LEAST_AUC,
        f"MLflow holds {runs}, not one finished run with the AUC": runs == [("FINISHED", True)],
        f"processes left behind: {left}": not left,
    }
    return [problem for problem, fine in checks.items() if not fine]


def finished_runs(tracking_uri: str, job_name: str) -> list[tuple[str, bool]]:
    """(status, whether the AUC is in it) of each MLflow run of the job."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = [run for run in client.search_runs(experiments) if job_name in (run.info.run_name or "")]
    return [(run.info.status, "val_auc" in run.data.metrics) for run in runs]


def shown(path: str | Path) -> str:
    """Relative to here where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def say(text: str, passing: bool = False) -> None:
    """One line with the time; on a terminal a ``passing`` one is overwritten by the next."""
    line = f"[{time.monotonic() - STARTED:5.1f} s] {text}"
    if sys.stdout.isatty():
        line = f"\r\x1b[K{line}"
    print(line, end="" if passing and sys.stdout.isatty() else "\n", flush=True)


STARTED = time.monotonic()

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; the cluster is gone, the run is marked as killed")
        sys.exit(130)
