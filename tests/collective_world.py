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
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
#: Kinds of `DistributedOptimizer`.
ROLES = ("plain", "grouped", "sparse", "compressed", "two_passes")


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
    leaving: bool = False
    asking: str | None = None
    steps: list[Step] = field(default_factory=list)
    inits: list[dict[str, Any]] = field(default_factory=list)
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
        self.mended: bool = template.mended
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

    async def leave(self, name: str) -> None:
        """Lets a worker leave in good order, which takes it to its next commit."""
        self.workers[name].leaving = True
        await self.until(lambda: self.workers[name].exit_code == 0)

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

        await self.until(lambda: self.has_progress(size, steps), limit)

    def has_progress(self, size: int | None = None, steps: int = 2) -> bool:
        recent = [self.workers[name].steps[-steps:] for name in self.members]
        return (
            not self.ended
            and sorted(self.members) == sorted(self.alive())
            and size in (None, len(self.members))
            and all(len(last) == steps and last[0].generation == self.generation for last in recent)
        )

    def pause_after(self, at: float) -> float:
        """Seconds from ``at`` until all current members have made a step in the current generation."""
        steps = {name: self.workers[name].steps for name in self.members}
        return max(min(s.at for s in made if s.generation == self.generation) for made in steps.values()) - at

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
            worker.inits.append(message)
        elif kind == "init_failed":
            worker.failed_inits.append((message["generation"], message["error"]))
        else:
            worker.notes.append({"kind": kind, **message})

    async def _consider(self) -> None:
        for worker in self.workers.values():
            if worker.leaving and worker.asking:
                self.send(worker.name, kind="leave")
                worker.alive, worker.asking = False, None
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

    async def _notify(self) -> None:
        """Horovod drops notices when it resets, so they are repeated while somebody wants to join or to leave."""
        while True:
            await asyncio.sleep(0.1)
            joining = any(w.alive and w.asking and w.name not in self.members for w in self.workers.values())
            if joining or any(w.alive and w.leaving for w in self.workers.values()):
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
        resources = {"fds": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
        self.send("init", generation=assignment.generation, seconds=seconds, **resources, rss=resident_bytes())

    def init_failed(self, assignment: Any, error: str) -> None:
        self.send("init_failed", generation=assignment.generation, error=error)

    def report(self, model: Any, step: int) -> None:
        from elastic_spark.worker import collective

        place = collective.current()
        digest = float(sum(p.detach().double().sum() for p in model.parameters())).hex()
        where = {"generation": place.generation, "rank": place.rank, "size": place.size}
        self.send("step", **where, step=step, digest=digest, at=time.monotonic())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def model_and_optimizer(role: str, momentum: float = 0.9) -> tuple[Any, Any, Callable[[], Any]]:
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
    local = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
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


def train_among_strangers(session: PipeSession, name: str, port: int) -> None:
    """Trains while threads open, use and close connections of their own to an echo server at ``port``."""
    from elastic_spark.worker import collective

    collective._world.interrupt = None  # by the sockets, also on a mended Horovod

    def talk(connection: socket.socket) -> None:
        connection.sendall(b"x" * 100)
        received = 0
        while received < 100:
            data = connection.recv(100)
            if not data:
                raise ConnectionError("closed")
            received += len(data)

    def converse(lasting: list[socket.socket]) -> None:
        count = 0
        try:
            while True:
                with socket.create_connection(("127.0.0.1", port)) as brief:
                    for connection in (brief, *lasting, brief):
                        talk(connection)
                count += 1
                if count % 20 == 0:
                    session.send("conversed", count=count)
                time.sleep(0.001)
        except OSError as error:
            session.send("stranger_broken", error=str(error))

    for _ in range(4):
        lasting = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        threading.Thread(target=converse, args=[lasting], daemon=True).start()
    train(session, name)


def go_on_without_restore(session: PipeSession, name: str, role: str, reset: bool = True) -> None:
    """A loop of the user's own: after a failed collective the optimizer is reset, and nothing is restored."""
    import horovod.torch as hvd
    import torch
    from horovod.common.exceptions import HorovodInternalError

    from elastic_spark.worker import collective

    hvd.init()
    torch.manual_seed(1)
    model, optimizer, loss = model_and_optimizer(role, momentum=0.0)
    step, synced = 0, 0
    while True:
        try:
            if synced != collective.current().generation:
                step = hvd.broadcast_object(step, root_rank=0)
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
                synced = collective.current().generation
            optimizer.zero_grad()
            loss().backward()
            session.pass_gate()
            if role == "two_passes":
                loss().backward()
            optimizer.step()
            step += 1
            session.report(model, step)
        except HorovodInternalError:
            hvd.shutdown()
            hvd.init()
            if reset:
                collective.reset_optimizer_handles(optimizer)
        except AssertionError as error:
            session.send("stale", error=str(error))
            session.commands.get()


def mismatch(session: PipeSession, name: str) -> None:
    """A mistake of the user's: shapes that differ between ranks."""
    import horovod.torch as hvd
    import torch
    from horovod.common.exceptions import HorovodInternalError

    from elastic_spark.worker import collective

    hvd.init()
    assert collective.last_collective_error() is None
    with contextlib.suppress(HorovodInternalError):
        hvd.allreduce(torch.zeros(2 + hvd.rank()), name="shape")
    session.send("error", text=collective.last_collective_error())
    hvd.shutdown()
    hvd.init()
    session.send("after", text=collective.last_collective_error())
    session.commands.get()


def init_again(session: PipeSession, name: str) -> None:
    """``hvd.init`` and ``hvd.shutdown`` in every order and number that users call them."""
    import horovod.torch as hvd
    import torch

    from elastic_spark.worker import collective

    hvd.shutdown()
    for _ in range(3):
        hvd.init()
        hvd.elastic.init()
        place = collective.current()
        assert (hvd.rank(), hvd.size()) == (place.rank, place.size)
        assert not collective.in_native_init()
        session.send("sum", value=float(hvd.allreduce(torch.ones(1), op=hvd.Sum)))
        hvd.shutdown()
        hvd.shutdown()
        assert collective.current() is None
    session.send("done")
    session.commands.get()


def reset_often(session: PipeSession, name: str, times: int) -> None:
    """Resets without a fault, with one small collective in each world."""
    import horovod.torch as hvd
    import torch

    for _ in range(times):
        hvd.init()
        hvd.allreduce(torch.ones(1))
        hvd.shutdown()
    session.send("done")
    session.commands.get()


def aborted_while_starting(session: PipeSession, name: str) -> None:
    """The driver's abort comes while the native init is on its way to success."""
    import horovod.torch as hvd

    from elastic_spark.worker import collective

    world = collective._world
    native = world.native_init
    times = []

    def init(*arguments: Any) -> bool:
        succeeded = native(*arguments)
        if not times:
            assert collective.in_native_init()
            collective.abort(world.assignment.generation, [("127.0.0.1", 1)])
            collective.abort(world.assignment.generation + 1, [("127.0.0.1", 1)])
        times.append(1)
        return succeeded

    world.native_init = init
    hvd.init()
    session.send("done", size=hvd.size())
    session.commands.get()


def process_sets(session: PipeSession, name: str) -> None:
    """A process set that is added, removed and added again."""
    import horovod.torch as hvd
    import torch

    hvd.init(process_sets="dynamic")
    for _ in range(3):
        pair = hvd.add_process_set([0, 2])
        if hvd.rank() != 1:
            value = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair)
            session.send("sum", value=float(value))
        assert hvd.remove_process_set(pair)
    session.send("done")
    session.commands.get()


def freeze_at_init(session: PipeSession, name: str) -> None:
    """Has its place in the world, and stops before it publishes an address."""
    import horovod.torch as hvd

    from elastic_spark.worker import collective

    collective._world.native_init = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    hvd.init()


JOBS: dict[str, Callable[..., None]] = {
    job.__name__: job
    for job in (
        train,
        train_among_strangers,
        go_on_without_restore,
        mismatch,
        init_again,
        reset_often,
        aborted_while_starting,
        freeze_at_init,
        process_sets,
    )
}


def work(connection: socket.socket, name: str, job: str, options: dict[str, Any]) -> None:
    from elastic_spark.worker import collective

    if job == "worker":
        run_worker(Path(options["start"]))
    session = PipeSession(connection)
    collective.install(session)
    threading.Thread(target=session.listen, daemon=True).start()
    JOBS[job](session, name, **options)


def run_worker(start: Path) -> NoReturn:
    """A worker as an agent starts it, with what it would be told on its standard input in the file ``start``."""
    from elastic_spark.worker import main

    with open(start) as sys.stdin:
        code = main.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(control: socket.socket) -> None:
    """The template: forks a worker for each request, tells their exits, ends with its parent's end."""
    import horovod.torch as hvd
    import torch

    import elastic_spark.worker.context
    import elastic_spark.worker.data
    import elastic_spark.worker.main
    import elastic_spark.worker.state  # noqa: F401

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
