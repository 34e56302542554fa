"""Worlds of real Horovod processes without Spark, for tests of the collective seam.

A `Template` process imports torch and Horovod once and forks workers on request, so a warm worker costs 20 ms. Each
worker installs the seam, whose session talks JSON lines with its `World` over a socket pair, and runs one of `JOBS`:
most train a small model with stock ``hvd.elastic.run`` and ``hvd.elastic.TorchState`` until they are told to leave.
`World` forms generations with the real `Rendezvous`; its decisions are those of a driver, in thirty lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("plain", "grouped", "sparse", "compressed", "two_passes")  # kinds of `DistributedOptimizer`


class Template:
    """The process that forks workers. A context manager; ends all workers it still has."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __enter__(self) -> Template:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        env = {**os.environ, "PYTHONPATH": path, "HOROVOD_GLOO_IFACE": "lo", "OMP_NUM_THREADS": "1"}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=log,
                env=env,
            )
        theirs.close()
        self.mended = json.loads(self.control.recv(65536))["mended"]
        self.control.setblocking(False)
        return self

    def __exit__(self, *_exc: object) -> None:
        self.control.close()
        self.process.wait(10)


@dataclass(frozen=True)
class Step:
    generation: int
    rank: int
    size: int
    step: int
    digest: str
    at: float  # time.monotonic(), which all processes of a machine share


@dataclass
class Worker:
    name: str
    writer: asyncio.StreamWriter
    pid: int = 0
    alive: bool = True
    asking: str | None = None
    steps: list[Step] = field(default_factory=list)
    inits: list[tuple[int, float]] = field(default_factory=list)
    failed_inits: list[tuple[int, str]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None

    def noted(self, kind: str) -> list[dict[str, Any]]:
        return [note for note in self.notes if note["kind"] == kind]


class World:
    """``async with World(template, first=3) as world``: workers by name, generations in order.

    The first generation waits for ``first`` workers; a later one for all members that are left, and takes in whoever
    else asks. All attributes belong to the event loop.
    """

    def __init__(self, template: Template, first: int = 1, job: str = "train", **options: Any) -> None:
        from elastic_spark.driver.rendezvous import Rendezvous

        self.rendezvous = Rendezvous("127.0.0.1")
        self.workers: dict[str, Worker] = {}
        self.generation = 0
        self.members: list[str] = []
        self.ended = True
        self.formed_at: dict[int, float] = {}
        self.first = first
        self.assigned = asyncio.Event()
        self._template, self._job, self._options = template, job, options
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> World:
        asyncio.get_running_loop().add_reader(self._template.control.fileno(), self._hear_template)
        self._spawn(self._notify())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for worker in self.workers.values():
            if worker.exit_code is None and worker.pid:
                self.kill(worker.name)
        try:
            await self.until(lambda: all(worker.exit_code is not None for worker in self.workers.values()))
        finally:
            asyncio.get_running_loop().remove_reader(self._template.control.fileno())
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.rendezvous.close_all()
            for worker in self.workers.values():
                worker.writer.close()

    # ---- what is done to it

    async def add(self, *names: str, job: str | None = None, **options: Any) -> None:
        """Forks workers. They ask at once, and join with the next generation."""
        for name in names:
            ours, theirs = socket.socketpair()
            request = {"name": name, "job": job or self._job, "options": {**self._options, **options}}
            reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
            self.workers[name] = Worker(name, writer)
            socket.send_fds(self._template.control, [json.dumps(request).encode()], [theirs.fileno()])
            theirs.close()
            self._spawn(self._hear_worker(self.workers[name], reader))
            await self.until(lambda name=name: self.workers[name].pid)

    def kill(self, name: str, signum: int = signal.SIGKILL) -> float:
        """Sends a signal and returns the time of it."""
        at = time.monotonic()
        os.kill(self.workers[name].pid, signum)
        return at

    def send(self, name: str, **message: object) -> None:
        if not self.workers[name].writer.is_closing():
            self.workers[name].writer.write(json.dumps(message).encode() + b"\n")

    async def lose(self, name: str) -> None:
        """Declares a worker lost, whatever its process does."""
        self.workers[name].alive, self.workers[name].asking = False, None
        if name in self.members and not self.ended:
            self.end()
        await self._consider()

    def end(self) -> None:
        """The current generation cannot go on: whoever waits for one of its members is set free."""
        self.ended = True
        self.rendezvous.cancel(self.generation)
        addresses = self.rendezvous.addresses(self.generation)
        for name in self.members:
            if self.workers[name].alive:
                self.send(name, kind="abort", generation=self.generation, addresses=addresses)

    # ---- what is seen of it

    async def until(self, condition: Callable[[], object], limit: float = 30.0) -> None:
        """Waits for a condition about this object. AssertionError past the limit, with what the workers last did."""
        try:
            async with asyncio.timeout(limit), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            seen = {w.name: (w.alive, w.asking, w.steps[-1:], w.exit_code) for w in self.workers.values()}
            awaited = self.rendezvous.waited_for(self.generation)
            raise AssertionError(
                f"not within {limit} s: generation {self.generation} of {self.members}, ended={self.ended}, "
                f"awaited={awaited}, {seen}\n{self._template.log.read_text(errors='replace')[-3000:]}"
            ) from None

    def alive(self) -> list[str]:
        return [worker.name for worker in self.workers.values() if worker.alive]

    async def progress(self, size: int | None = None, steps: int = 2, limit: float = 30.0) -> None:
        """Waits until every living worker is in one generation, of ``size``, and has made ``steps`` steps in it."""

        def made() -> bool:
            recent = [self.workers[name].steps[-steps:] for name in self.members]
            return (
                not self.ended
                and sorted(self.members) == sorted(self.alive())
                and size in (None, len(self.members))
                and all(len(last) == steps and last[0].generation == self.generation for last in recent)
            )

        await self.until(made, limit)

    def pause_after(self, at: float) -> float:
        """Seconds from ``at`` until the last of the current members has made a step again, in the current generation."""
        steps = [step for name in self.members for step in self.workers[name].steps]
        again = [step.at for step in steps if step.generation == self.generation and step.at > at]
        first = {name: min(s.at for s in self.workers[name].steps if s.at in again) for name in self.members}
        return max(first.values()) - at

    def check_equal_states(self) -> None:
        """Every rank has the same parameters after the same step of a generation."""
        seen: dict[tuple[int, int], set[str]] = {}
        for worker in self.workers.values():
            for step in worker.steps:
                seen.setdefault((step.generation, step.step), set()).add(step.digest)
        assert seen
        assert not {key: digests for key, digests in seen.items() if len(digests) > 1}

    # ---- decisions

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hear_template(self) -> None:
        message = json.loads(self._template.control.recv(65536) or b"{}")
        worker = self.workers.get(message.get("name", ""))  # an exit may belong to the test before
        if worker is not None and "pid" in message:
            worker.pid = message["pid"]
        elif worker is not None and worker.pid == message["exited"]:
            worker.exit_code = message["code"]
        self._spawn(self._consider())

    async def _hear_worker(self, worker: Worker, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._hear(worker, json.loads(line))
                await self._consider()
        await self.lose(worker.name)

    def _hear(self, worker: Worker, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "step":
            worker.steps.append(Step(**message))
        elif kind == "ask" and worker.alive:
            worker.asking = message["reason"]
            worker.notes.append({"kind": "asked", **message})
            if worker.name in self.members and not self.ended and worker.asking != "reset":
                self.end()
        elif kind == "init":
            worker.inits.append((message["generation"], message["seconds"]))
        elif kind == "init_failed":
            worker.failed_inits.append((message["generation"], message["error"]))
        else:
            worker.notes.append({"kind": kind, **message})

    async def _consider(self) -> None:
        asking = [worker.name for worker in self.workers.values() if worker.alive and worker.asking]
        left = [name for name in self.members if self.workers[name].alive]
        enough = len(asking) >= (self.first if self.generation == 0 else 1)
        if enough and all(name in asking for name in left):
            members = [*left, *(name for name in asking if name not in left)]
            self.generation, self.members, self.ended = self.generation + 1, members, False
            for name in members:
                self.workers[name].asking = None
            await self._begin(self.generation, members)
        async with self._changed:
            self._changed.notify_all()

    async def _begin(self, generation: int, members: list[str]) -> None:
        self.rendezvous.close(generation - 1)
        await self.rendezvous.open(generation, members)
        self.formed_at[generation] = time.monotonic()
        if self.ended:  # a member was lost while the server was started
            self.rendezvous.cancel(generation)
        for rank, env in enumerate(self.rendezvous.environment(generation)):
            self.send(members[rank], kind="assign", generation=generation, rank=rank, size=len(members), env=env)
        if self.ended:
            self.end()
        self.assigned.set()

    async def _notify(self) -> None:
        """Horovod drops notices when it resets, so they are repeated while somebody waits to join."""
        while True:
            await asyncio.sleep(0.1)
            if any(w.alive and w.asking and w.name not in self.members for w in self.workers.values()):
                for name in self.members if not self.ended else ():
                    self.send(name, kind="notify")


# ---- the worker process


class PipeSession:
    """The seam's session: JSON lines to and from `World`."""

    def __init__(self, connection: socket.socket) -> None:
        self.commands: queue.Queue[str] = queue.Queue()
        self.hold = threading.Event()
        self._connection = connection
        self._sending = threading.Lock()
        self._assignments: queue.Queue[Any] = queue.Queue()

    def send(self, kind: str, **message: object) -> None:
        with self._sending:
            self._connection.sendall(json.dumps({"kind": kind, **message}).encode() + b"\n")

    def listen(self) -> None:
        from elastic_spark.worker import collective

        for line in self._connection.makefile("rb"):
            message = json.loads(line)
            kind = message.pop("kind")
            if kind == "assign":
                self._assignments.put(collective.Assignment(**message, body={}))
            elif kind == "leave":
                self._assignments.put(None)
            elif kind == "abort":
                started = time.perf_counter()
                acted = collective.abort(message["generation"], [(ip, port) for ip, port in message["addresses"]])
                self.send("aborted", acted=acted, seconds=time.perf_counter() - started)
            elif kind == "notify":
                collective.notify_hosts_updated()
            elif kind == "hold":
                self.hold.set()
            else:
                self.commands.put(kind)
        os._exit(3)

    def pass_gate(self) -> None:
        """Stops here when told to hold, until told to go on."""
        if self.hold.is_set():
            self.send("held")
            self.commands.get()
            self.hold.clear()

    def next_assignment(self, reason: str) -> Any:
        from elastic_spark.worker import collective

        self.send("ask", reason=reason, error=collective.last_collective_error())
        assignment = self._assignments.get()
        if assignment is None:
            raise collective.Leave("told to")
        return assignment

    def initialised(self, assignment: Any, seconds: float) -> None:
        self.send("init", generation=assignment.generation, seconds=seconds)

    def init_failed(self, assignment: Any, error: str) -> None:
        self.send("init_failed", generation=assignment.generation, error=error)

    def report(self, model: Any, step: int) -> None:
        from elastic_spark.worker import collective

        place = collective.current()
        digest = float(sum(p.detach().double().sum() for p in model.parameters())).hex()
        where = {"generation": place.generation, "rank": place.rank, "size": place.size}
        self.send("step", **where, step=step, digest=digest, at=time.monotonic())


def model_and_optimizer(role: str) -> tuple[Any, Any, Callable[[], Any]]:
    """A model, its distributed optimizer of a kind, and a function that gives a loss."""
    import horovod.torch as hvd
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    if role == "sparse":
        model = torch.nn.Sequential(
            torch.nn.EmbeddingBag(50, 16, sparse=True, mode="sum"), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
    extra: dict[str, Any] = {
        "plain": {},
        "grouped": {"groups": 2},
        "sparse": {"sparse_as_dense": False},
        "compressed": {"compression": hvd.Compression.fp16},
        "two_passes": {"backward_passes_per_step": 2},
    }[role]
    local = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if role == "sparse" else 0.9)
    optimizer = hvd.DistributedOptimizer(local, named_parameters=model.named_parameters(), **extra)

    def loss() -> Any:
        batch = torch.randint(0, 50, (8, 4)) if role == "sparse" else torch.randn(8, 16)
        return model(batch).square().mean()

    return model, optimizer, loss


def train(session: PipeSession, name: str, pause: float = 0.0) -> None:
    """Stock elastic Horovod."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(hvd.rank())
    model, optimizer, loss = model_and_optimizer("plain")
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while True:
            optimizer.zero_grad()
            session.pass_gate()
            loss().backward()
            optimizer.step()
            state.step += 1
            session.report(model, state.step)
            time.sleep(pause)
            state.commit()

    loop(state)


JOBS: dict[str, Callable[..., None]] = {"train": train}


def work(connection: socket.socket, name: str, job: str, options: dict[str, Any]) -> None:
    from elastic_spark.worker import collective

    session = PipeSession(connection)
    collective.install(session)
    threading.Thread(target=session.listen, daemon=True).start()
    JOBS[job](session, name, **options)


def serve(control: socket.socket) -> None:
    """The template: forks a worker for each request, tells their exits, ends with its parent's end."""
    import horovod.torch as hvd
    import torch

    parameter = torch.zeros(1)
    torch.optim.SGD([parameter]).step()  # imports what an optimizer needs, once
    control.send(json.dumps({"mended": hasattr(hvd.mpi_ops._basics.MPI_LIB_CTYPES, "horovod_interrupt")}).encode())
    names: dict[int, str] = {}
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is control and not fork_one(control, names, (woken, wake, selector)):
                    signal.set_wakeup_fd(-1)
                    return
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            while names and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = ended[0], os.waitstatus_to_exitcode(ended[1])
                control.send(json.dumps({"name": names.pop(pid), "exited": pid, "code": code}).encode())


def fork_one(control: socket.socket, names: dict[int, str], inherited: tuple[Any, ...]) -> bool:
    data, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
    if not data:
        return False
    request = json.loads(data)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (control, *inherited):
            other.close()
        work(socket.socket(fileno=descriptors[0]), **request)
        sys.exit(0)
    os.close(descriptors[0])
    names[pid] = request["name"]
    control.send(json.dumps({"name": request["name"], "pid": pid}).encode())
    return True


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
