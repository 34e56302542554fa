"""``elastic-spark chaos``: a training function on a real cluster that is broken under it, and a verdict.

The job runs as any other, in the calling thread; a second thread follows its event log, and strikes each blow of a
`churn.schedule` when the steps for it are committed and a world of at least two runs. Everything that the verdict says
is read from the log afterwards.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_spark.core import events as ev
from elastic_spark.core.metrics import summarise
from elastic_spark.errors import ElasticSparkError
from elastic_spark.tail import Tail
from elastic_spark.testing.churn import Blow
from elastic_spark.testing.cluster import StandaloneCluster

LOOK_S, LEAVE_S = 0.1, 20.0


@dataclass
class Outcome:
    """What became of it. ``promises``: in words, and whether it was kept; ``struck`` of ``due`` blows fell."""

    due: int
    struck: int = 0
    error: ElasticSparkError | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    promises: dict[str, bool] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        return all(self.promises.values())


def chaos(
    function: Callable[..., Any],
    blows: Sequence[Blow],
    machines: int,
    options: Mapping[str, Any],
    *,
    conf: Mapping[str, str],
    say: Callable[[str], None],
) -> Outcome:
    """Run ``function`` under ``blows`` on a cluster of ``machines`` with one core each.

    Args:
        options: of `elastic_spark.run`; ``job_name`` and ``work_dir`` must be among them.
        conf: further settings of Spark.
        say: called with a line for each blow, from another thread.
    """
    from elastic_spark.api import run

    log = Path(options["work_dir"]).absolute() / options["job_name"] / "events.jsonl"
    told = Tail(log, from_end=True)  # a job that is taken up again has a past, which was not struck
    outcome = Outcome(len(blows))
    with StandaloneCluster(workers=machines) as cluster:
        cluster.session("elastic_spark chaos", **conf)
        churn = _Churn(cluster, log, blows, say)
        churn.start()
        try:
            run(function, **options)
        except ElasticSparkError as error:
            outcome.error = error
        finally:
            churn.end()
        events = list(told.read())
        outcome.struck, outcome.summary = churn.struck, summarise(Tail(log).read())
        kept = _promises(events, outcome.summary, churn.victims, outcome.error)
        outcome.promises = {**kept, **_nothing_left(cluster, events)}
        if churn.failure is not None:
            raise churn.failure
    return outcome


@dataclass
class _Victims:
    """Whom the blows struck: ``workers``, and all those of ``executors``, from when they are gone."""

    workers: set[str] = field(default_factory=set)
    executors: set[str] = field(default_factory=set)


class _Churn(threading.Thread):
    """Strikes blow after blow until the job ends."""

    def __init__(
        self, cluster: StandaloneCluster, log: Path, blows: Sequence[Blow], say: Callable[[str], None]
    ) -> None:
        super().__init__(name="elastic_spark churn", daemon=True)
        self._cluster, self._blows, self._say = cluster, blows, say
        self._log, self._seen = Tail(log, from_end=True), _Seen()
        self._over = threading.Event()
        self.struck = 0
        self.victims = _Victims()
        self.failure: Exception | None = None

    def end(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        try:
            since = 0
            while self.struck < len(self._blows):
                blow = self._blows[self.struck]
                seen = self._wait(since + blow.after_steps)
                if seen is None:
                    return
                told = self._strike(blow, seen)
                if told:  # else the victim went by itself in this moment: the next one, then
                    since = seen.commits
                    self.struck += 1
                    self._say(f"blow {self.struck} of {len(self._blows)} at step {seen.step:,}: {told}")
        except Exception as failure:  # a defect here must not end as a verdict about the job
            self.failure = failure

    def _wait(self, commits: int) -> _Seen | None:
        """Until so many commits are made and a world of two runs, or None when the job has ended."""
        while not self._over.wait(LOOK_S):
            seen = self._seen
            for event in self._log.read():
                seen.add(event)
            if seen.commits >= commits and len(seen.world) >= 2:
                return seen
        return None

    def _strike(self, blow: Blow, seen: _Seen) -> str | None:
        """What was done, in words; None where the victim was gone already."""
        cluster = self._cluster
        if blow.kind == "add machine":
            return f"{cluster.add_worker().name} comes"
        victim = seen.world[int(blow.pick * len(seen.world))]
        executor = next((item for item in cluster.executors() if item.id == victim.executor), None)
        machine = next((item for item in cluster.workers if executor and item.name == executor.worker), None)
        if executor is None or machine is None:
            return None
        try:
            if blow.kind == "kill worker":
                os.kill(victim.pid, signal.SIGKILL)
                self.victims.workers.add(victim.worker)
                return f"kill -9 of the process of {victim.worker}"
            if blow.kind == "kill executor":
                cluster.kill_executor(executor.id)
                told = f"kill -9 of executor {executor.id}, which hosts {victim.worker}"
            elif blow.kind == "decommission":
                cluster.decommission(machine)
                told = f"{machine.name}, which hosts {victim.worker}, will go: a spot notice"
            else:
                cluster.remove_worker(machine)
                told = f"{machine.name}, which hosts {victim.worker}, is gone"
        except (LookupError, ProcessLookupError):
            return None
        self.victims.executors.add(victim.executor)
        return told


class _Seen:
    """What a log says so far: commits made, the newest step, and the members of the world if it runs."""

    def __init__(self) -> None:
        self.commits = self.step = 0
        self._spawned: dict[str, ev.WorkerSpawned] = {}
        self._formed: tuple[str, ...] = ()
        self._runs = False

    @property
    def world(self) -> tuple[ev.WorkerSpawned, ...]:
        return tuple(self._spawned[name] for name in self._formed if name in self._spawned) if self._runs else ()

    def add(self, event: ev.Event) -> None:
        if isinstance(event, ev.StepsCommitted):
            self.commits += len(event.times)
            self.step = event.first_step + len(event.times) - 1
        elif isinstance(event, ev.WorkerSpawned):
            self._spawned[event.worker] = event
        elif isinstance(event, ev.GenerationFormed):
            self._formed, self._runs = event.members, False
        elif isinstance(event, ev.GenerationRunning):
            self._runs = True
        elif isinstance(event, (ev.GenerationEnding, ev.JobFinished)):
            self._runs = False
        elif isinstance(event, (ev.WorkerLost, ev.WorkerDraining, ev.WorkerLeft)):
            self._formed = tuple(name for name in self._formed if name != event.worker)


def _promises(
    events: Sequence[ev.Event], summary: Mapping[str, Any], victims: _Victims, error: ElasticSparkError | None = None
) -> dict[str, bool]:
    """The guarantees that a log can show, in words, and whether each was kept. ``error``: what the job ended with."""
    once = f"each row once an epoch: {summary['rows_once']:,} once, {summary['rows_twice']:,} twice, "
    once += f"{summary['rows_never']:,} never"
    status, why = summary["status"], summary["error"]
    if error is not None:  # perhaps before there was a log
        status, why = type(error).__name__, str(error)
    out = {f"the job finished: {status} {why[:300]}".rstrip(): status == "FINISHED"}
    if summary["datasets"]:
        out[once] = not summary["rows_twice"] and not summary["rows_never"]
    undone, excused = _undone(events, victims)
    told = f" ({excused:,} more when nobody was left who held them)" if excused else ""
    out[f"no committed step was lost: {undone:,} were undone{told}"] = not undone
    failed = [event for event in events if isinstance(event, ev.UserFailed)]
    out[f"no fault was taken for one of the function: {len(failed)} were"] = not failed
    return out


def _undone(events: Sequence[ev.Event], victims: _Victims) -> tuple[int, int]:
    """Steps that were undone: those that were not to be, and those for which there was no help, as each member of the
    world that had made them was struck: what they held is gone, and the newest checkpoint, if there was time for one,
    is what is left. A newcomer holds nothing before its first commit. A guard goes back on purpose."""
    undone = excused = back = 0
    formed: tuple[str, ...] = ()
    held: set[str] = set()
    executor_of: dict[str, str] = {}
    gone = set(victims.workers)
    for event in events:
        if isinstance(event, ev.WorkerSpawned):
            executor_of[event.worker] = event.executor
        elif isinstance(event, (ev.WorkerLost, ev.WorkerLeft)) and executor_of.get(event.worker) in victims.executors:
            gone.add(event.worker)
        elif isinstance(event, ev.StepsRolledBack):
            back = event.from_step - event.to_step
        elif isinstance(event, ev.StepsCommitted) and event.missing < len(formed):
            held = set(formed)
        elif isinstance(event, ev.GenerationFormed):
            formed = tuple(event.members)
            if event.cause.startswith("guard:") or held <= gone:
                excused += back
            else:
                undone += back
            back = 0
    return undone, excused


def _nothing_left(cluster: StandaloneCluster, events: Sequence[ev.Event]) -> dict[str, bool]:
    """Whether the workers' processes end with the job."""
    pids = {event.pid for event in events if isinstance(event, ev.WorkerSpawned)}

    def living() -> set[int]:
        return pids & {process.pid for process in cluster.processes()}

    try:
        cluster.wait_for(lambda: not living(), LEAVE_S, "the workers' end")
    except TimeoutError:
        return {f"no process was left behind: {len(living())} were": False}
    return {"no process was left behind": True}
