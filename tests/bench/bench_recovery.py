"""`make bench-recovery`: how long training stands still when an executor, a worker or a machine's time goes away.

One standalone cluster of one-core executors, one long job of a small MLP (256-512-512-10, batch 32 a worker, SGD with
momentum, 20 ms of sleep a step to stand for compute, one thread a worker), and one fault after the other:

    kill_executor   kill -9 of the executor's JVM          kill_worker   kill -9 of the Horovod process
    frozen          SIGSTOP of the Horovod process         drain         Spark decommissions a worker node
    join            the newcomer that follows each loss    spare         as kill_worker, with a warm spare at hand
    second_fault    a second worker killed 0 to 300 ms after the first (of four)
    newcomer        a newcomer killed between its being called and its first step
    peer            kill -9 of an executor's JVM under horovod.spark.run_elastic, once, in a cluster of its own, on the
                    Horovod that is installed: one that is mended here spares the peer Gloo's time-out, too

A pause is the longest gap between two committed steps around the fault, from the job's event log; rto90 is the time
from the fault to the first step of a world as large as before, so with all of its throughput. ``step_ratio`` compares
the median step of three undisturbed workers with the peer's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import elastic_spark as es
from elastic_spark.core import events as ev
from elastic_spark.tail import Tail
from elastic_spark.testing import StandaloneCluster

STEP_SLEEP_S = 0.02


def train(ctx: Any, stop: str) -> int:
    """The workload; ends when the file ``stop`` is there."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = es.ElasticState(model=model, optimizer=optimizer, last=False)
    loss_fn = torch.nn.CrossEntropyLoss()

    @hvd.elastic.run
    def loop(state: Any) -> int:
        while not state.last:
            # All ranks must leave after the same step: rank 0 looks every 50 steps, and tells.
            if state.step % 50 == 0:
                last = hvd.broadcast(torch.tensor([int(os.path.exists(stop))]), root_rank=0, name="last")
                state.last = bool(last.item())
            optimizer.zero_grad()
            loss_fn(model(torch.randn(32, 256)), torch.randint(0, 10, (32,))).backward()
            optimizer.step()
            time.sleep(STEP_SLEEP_S)
            state.commit()
        return int(state.step)

    return loop(state)


class Story:
    """The event log of the running job."""

    def __init__(self, path: Path) -> None:
        self._tail, self._events = Tail(path), list[ev.Event]()

    def events(self, *kinds: type[ev.Event]) -> list[Any]:
        self._events += self._tail.read()
        return [event for event in self._events if isinstance(event, kinds)]

    def world(self) -> tuple[str, ...]:
        """Members of the world that runs undisturbed, or ()."""
        formed, running, ending = (
            self.events(kind) for kind in (ev.GenerationFormed, ev.GenerationRunning, ev.GenerationEnding)
        )
        if not running or formed[-1].generation != running[-1].generation:
            return ()
        return () if ending and ending[-1].generation == formed[-1].generation else tuple(formed[-1].members)

    def spawned(self, worker: str) -> ev.WorkerSpawned:
        return next(event for event in self.events(ev.WorkerSpawned) if event.worker == worker)

    def times(self) -> list[float]:
        return sorted(at for event in self.events(ev.StepsCommitted) for at in event.times)

    def gap(self, since: float, until: float) -> float:
        """The longest gap between two committed steps that ends after ``since`` and begins before ``until``."""
        times = self.times()
        return max((b - a for a, b in itertools.pairwise(times) if b > since and a < until), default=0.0)


@contextmanager
def job(cluster: StandaloneCluster, folder: Path, name: str, **options: Any) -> Iterator[Story]:
    """``es.run`` beside the faults."""
    stop = folder / f"{name}.stop"
    failed: list[BaseException] = []

    def body() -> None:
        try:
            es.run(
                train,
                args=(str(stop),),
                tracking=False,
                verbose=0,
                work_dir=str(folder),
                job_name=name,
                min_num_proc=1,
                stdout=open(folder / f"{name}.txt", "a"),  # noqa: SIM115
                **options,
            )
        except BaseException as error:
            failed.append(error)

    cluster.session("bench-recovery")
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield Story(folder / name / "events.jsonl")
    finally:
        stop.touch()
        thread.join(120)
    if failed or thread.is_alive():
        raise RuntimeError(f"the job of {name} did not end well") from (failed[0] if failed else None)


class Faults:
    """Makes one fault after the other and measures what follows."""

    def __init__(self, cluster: StandaloneCluster, story: Story, size: int, rng: random.Random) -> None:
        self.cluster, self.story, self.size, self.rng = cluster, story, size, rng
        self.pauses: dict[str, list[float]] = {}
        self.back: dict[str, list[float]] = {}
        self.survived: dict[str, list[bool]] = {}

    def ready(self, ready_workers: int = 0) -> tuple[str, ...]:
        """A full world that has run for a second (and so many warm spares)."""

        def full() -> tuple[str, ...]:
            world, times = self.story.world(), self.story.times()
            running = self.story.events(ev.GenerationRunning)
            if len(world) < self.size or not times or times[-1] - running[-1].at < 1.0:
                return ()
            warm = {event.worker for event in self.story.events(ev.WorkerReady)} - set(world)
            gone = {event.worker for event in self.story.events(ev.WorkerLost)}
            return world if len(warm - gone) >= ready_workers else ()

        return self.cluster.wait_for(full, 120, "a full world")

    def after(self, kind: str, at: float, gone: set[str], limit_s: float = 40.0) -> None:
        """Wait until a world without ``gone`` has made steps; note the pause."""

        def on() -> bool:
            world = self.story.world()
            running = self.story.events(ev.GenerationRunning)
            return (
                bool(world)
                and not gone & set(world)
                and bool([t for t in self.story.times() if t > running[-1].at + 0.3])
            )

        try:
            self.cluster.wait_for(on, limit_s, f"life after {kind}")
        except TimeoutError:
            self.survived.setdefault(kind, []).append(False)
            raise
        self.survived.setdefault(kind, []).append(True)
        self.pauses.setdefault(kind, []).append(self.story.gap(at, at + 6.0))

    def full_again(self, kind: str, at: float) -> None:
        """Note the time from the fault to the first step of a world of full size."""

        def full() -> float | None:
            formed = [e for e in self.story.events(ev.GenerationFormed) if e.at > at and len(e.members) == self.size]
            worlds = {event.generation for event in formed}
            steps = [e for e in self.story.events(ev.StepsCommitted) if e.generation in worlds]
            return steps[0].times[0] if steps else None

        self.back.setdefault(kind, []).append(self.cluster.wait_for(full, 90, f"a full world after {kind}") - at)

    def kill_worker(self, kind: str = "kill_worker") -> None:
        victim = self.rng.choice(self.ready(1 if kind == "spare" else 0))
        at = time.time()
        os.kill(self.story.spawned(victim).pid, signal.SIGKILL)
        self.after(kind, at, {victim})
        self.full_again(kind, at)

    def kill_executor(self) -> None:
        victim = self.rng.choice(self.ready())
        executor = self.story.spawned(victim).executor
        at = time.time()
        self.cluster.kill_executor(executor)
        self.after("kill_executor", at, {victim})
        self.full_again("kill_executor", at)

    def freeze(self) -> None:
        victim = self.rng.choice(self.ready())
        at = time.time()
        self.cluster.freeze(self.story.spawned(victim).pid)
        self.after("frozen", at, {victim})

    def second_fault(self) -> None:
        first, second = self.rng.sample(self.ready(), 2)
        pids = [self.story.spawned(worker).pid for worker in (first, second)]
        at = time.time()
        os.kill(pids[0], signal.SIGKILL)
        threading.Event().wait(self.rng.uniform(0.0, 0.3))  # the fault is the delay
        os.kill(pids[1], signal.SIGKILL)
        self.after("second_fault", at, {first, second})

    def kill_newcomer(self) -> None:
        """Kill one, wait for its successor to be called, and kill that too, before its first step."""
        victim = self.rng.choice(self.ready())
        before = len(self.story.events(ev.GenerationFormed))
        os.kill(self.story.spawned(victim).pid, signal.SIGKILL)
        limit, called = time.monotonic() + 60, list[str]()
        while not called:
            if time.monotonic() > limit:
                raise TimeoutError("waited 60 s for a newcomer")
            formed = self.story.events(ev.GenerationFormed)[before:]
            called = [worker for event in formed for worker in event.joined]
        newcomer, at = called[0], time.time()
        os.kill(self.story.spawned(newcomer).pid, signal.SIGKILL)
        self.after("newcomer_killed", at, {newcomer})

    def drain(self) -> None:
        victim = self.rng.choice(self.ready())
        executor = self.story.spawned(victim).executor
        node = next(item.worker for item in self.cluster.executors() if item.id == executor)
        at = time.time()
        self.cluster.decommission(next(worker for worker in self.cluster.workers if worker.name == node))
        self.after("drain", at, {victim})
        self.cluster.add_worker()


def joins(story: Story) -> list[float]:
    """The pause of each generation that only took newcomers in."""
    pauses = []
    for event in story.events(ev.GenerationFormed):
        if event.generation > 1 and event.joined and not event.lost and not event.left:
            pauses.append(story.gap(event.at, event.at + 1.0))
    return pauses


def steady_step_s(story: Story) -> float:
    """Median time of a step of the first full world, before any fault."""
    first = story.events(ev.GenerationFormed)[0].generation
    times = [at for e in story.events(ev.StepsCommitted) if e.generation == first for at in e.times]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def measure_peer(folder: Path) -> dict[str, float | None]:
    """``peer_pause_s`` (None: no step within 150 s of the kill) and ``peer_step_s`` of horovod.spark.run_elastic."""
    folder.mkdir()
    script = Path(__file__).with_name("peer_run_elastic.py")

    def steps() -> list[tuple[float, int, int, int]]:
        """``(time, pid, rank, size)`` of every step."""
        lines = [(path.stem, line.split()) for path in folder.glob("*.steps") for line in path.read_text().splitlines()]
        return sorted((float(at), int(pid), int(rank), int(size)) for pid, (at, rank, size) in lines)

    def of_rank_0() -> list[float]:
        return [at for at, _, rank, _ in steps() if rank == 0]

    with StandaloneCluster(workers=3) as cluster:
        command = [sys.executable, str(script), cluster.master_url, str(folder)]
        with open(folder / "driver.txt", "w") as log:
            env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
            driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env)
        try:
            try:
                full = cluster.wait_for(
                    lambda: [s for s in steps() if s[3] == 3][600:], 90, "three workers of the peer"
                )
            except TimeoutError:
                say(f"the peer did not start:\n{(folder / 'driver.txt').read_text()[-3000:]}")
                return {"peer_pause_s": None, "peer_step_s": None}
            step_s = statistics.median(b - a for a, b in itertools.pairwise(of_rank_0()))
            at = time.time()
            os.kill(_executor_of(max(full, key=lambda step: step[2])[1]), signal.SIGKILL)
            try:
                # the orphan of the killed JVM may go on for a while, so the pause may begin some seconds later
                cluster.wait_for(lambda: [t for t in of_rank_0() if t > at + 50][20:], 150, "the peer to go on")
                pause = max(b - a for a, b in itertools.pairwise(of_rank_0()) if b > at and a < at + 20)
            except TimeoutError:
                pause = None
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
            for pid in {pid for _, pid, _, _ in steps()}:  # it leaves its workers behind
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return {"peer_pause_s": pause and round(pause, 3), "peer_step_s": round(step_s, 5)}


def _executor_of(pid: int) -> int:
    while "CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_text():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def lost_steps(story: Story) -> int:
    return max((event.from_step - event.to_step for event in story.events(ev.StepsRolledBack)), default=0)


KINDS: dict[str, Callable[[Faults], None]] = {
    "kill_executor": Faults.kill_executor,
    "kill_worker": Faults.kill_worker,
    "frozen": Faults.freeze,
    "newcomer": Faults.kill_newcomer,
    "drain": Faults.drain,
    "second_fault": Faults.second_fault,
    "spare": lambda faults: faults.kill_worker("spare"),
}


def measure(trials: int, folder: Path, seed: int, wanted: frozenset[str]) -> dict[str, Any]:
    rng = random.Random(seed)
    figures: dict[str, Any] = {"trials": trials, "seed": seed}
    pauses: dict[str, list[float]] = {}
    survived: dict[str, list[bool]] = {}
    back: dict[str, list[float]] = {}
    lost = 0
    plan: list[tuple[str, int, dict[str, Any], tuple[str, ...]]] = [
        ("three", 3, {"num_proc": 3}, ("kill_executor", "kill_worker", "frozen", "newcomer", "drain")),
        ("four", 4, {"num_proc": 4}, ("second_fault",)),
        ("spare", 3, {"num_proc": 3, "spares": 1}, ("spare",)),
    ]
    for name, size, options, of_these in plan:
        kinds = [KINDS[kind] for kind in of_these if kind in wanted]
        if not kinds:
            continue
        with StandaloneCluster(workers=size + options.get("spares", 0)) as cluster:
            with job(cluster, folder, name, **options) as story:
                faults = Faults(cluster, story, size, rng)
                if name == "three":
                    faults.ready()
                    cluster.wait_for(lambda story=story: story.times()[400:], 60, "400 undisturbed steps")
                    figures["step_s"] = round(steady_step_s(story), 5)
                for kind in kinds:
                    for trial in range(trials):
                        kind(faults)
                        last = {kind: round(values[-1], 3) for kind, values in faults.pauses.items()}
                        say(f"{name}: trial {trial + 1} of {trials}: {last}")
                faults.ready()
            pauses.update(faults.pauses)
            survived.update(faults.survived)
            back.update(faults.back)
            pauses.setdefault("join", []).extend(joins(story))
            lost = max(lost, lost_steps(story))
            figures.setdefault("drain_lost_steps", lost_steps(story))
    for kind, values in pauses.items():
        figures[f"{kind}_pause_s_p50"] = round(statistics.median(values), 3)
        figures[f"{kind}_pause_s_p95"] = round(sorted(values)[min(len(values) - 1, int(0.95 * len(values)))], 3)
        figures[f"{kind}_pauses"] = len(values)
    for name, kind in (("spare_rto", "spare"), ("kill_worker_rto", "kill_worker"), ("rto90", "kill_executor")):
        if kind in back:
            figures[f"{name}_s_p50"] = round(statistics.median(back[kind]), 3)
    figures["lost_committed_steps_max"] = lost
    figures.update({f"{kind}_ok": statistics.mean(values) for kind, values in survived.items()})
    if "peer" in wanted:
        figures.update(measure_peer(folder / "peer"))
    if figures.get("peer_step_s") and "step_s" in figures:
        figures["step_ratio"] = round(figures["step_s"] / figures["peer_step_s"], 4)
    if figures.get("peer_pause_s") and "kill_executor" in wanted:
        figures["ratio_to_peer"] = round(figures["peer_pause_s"] / figures["kill_executor_pause_s_p50"], 1)
    return figures


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="3 trials of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join([*KINDS, "peer"]), help="kinds of fault, by comma; default: all")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - {*KINDS, "peer"}:
        parser.error(f"--only: no {sorted(unknown)}; there are {[*KINDS, 'peer']}")
    with tempfile.TemporaryDirectory(prefix="bench-recovery-", ignore_cleanup_errors=True) as folder:
        wanted = frozenset(options.only.split(","))
        figures = measure(3 if options.quick else options.trials, Path(folder), options.seed, wanted)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
