"""The worker's side of Horovod: every init goes through the driver, and no failed collective blocks for long.

Elastic Horovod expects its own driver behind ``hvd.init``. Ours decides worlds elsewhere, so `install` wraps the two
native functions that all of Horovod's Python goes through, whichever name the user calls them by (``hvd.init``,
``hvd.shutdown``, the pair bound inside ``horovod.torch.elastic``)::

    hvd.init()  ->  ask the session for an Assignment  ->  set the environment  ->  native init
                        ^                                                              |
                        +------------- init_failed, native shutdown  <-- failed -------+---> initialised

So a stock function under ``@hvd.elastic.run`` takes part in any number of worlds without knowing.

The life of a world in this process, and what `abort` does in each phase::

    IDLE --assignment--> STARTING --native init--> RUNNING --hvd.shutdown--> STOPPING --> IDLE
    remember             remember                  break the mesh            break the mesh

A Horovod built with `elastic_spark.build_horovod` has ``horovod_interrupt``, which ends every wait of Gloo in any
phase. On a stock one the mesh's sockets are shut down (`elastic_spark.worker.abort`), but never while STARTING: there,
any exception ends the process with SIGABRT. In both cases the driver cancels the rendezvous, which ends an init that
waits for addresses, and a remembered abort turns an init that succeeded all the same into a failed one.

Horovod's own change notices are not used: they carry whole seconds, reach rank 0 alone, and come through a server that
unpickles. `notify_hosts_updated` gives the notice within the process, with stamps that always grow, and never as
"removals only", which would make Horovod skip the sync of states.
"""

from __future__ import annotations

import atexit
import ctypes
import enum
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_spark.worker.abort import break_mesh


@dataclass(frozen=True)
class Assignment:
    """A place in one world. ``env`` is set before the native init; ``body`` is whatever else the driver sent along."""

    generation: int
    rank: int
    size: int
    env: Mapping[str, str]
    body: Mapping[str, Any]


class Leave(SystemExit):
    """The driver has no place for this worker any more: leave in good order, with exit code 0."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(0)
        self.reason = reason


class Session(Protocol):
    """The driver, as seen from here. Called from the thread that calls ``hvd.init``."""

    def next_assignment(self, reason: str) -> Assignment:
        """Blocks until the driver gives a place. ``reason`` is one of `REASONS`. Raises `Leave`."""

    def initialised(self, assignment: Assignment, seconds: float) -> None:
        """Horovod runs in this place. ``seconds`` is the time in the native init."""

    def init_failed(self, assignment: Assignment, error: str) -> None:
        """The native init failed or was aborted; the next assignment will be asked for."""


#: Why an assignment is asked for: the process is new; a notice at a commit, or ``hvd.shutdown`` by the user; a
#: HorovodInternalError; an init that failed.
REASONS = ("start", "reset", "collective failed", "init failed")


class _Phase(enum.Enum):
    IDLE = enum.auto()
    STARTING = enum.auto()
    RUNNING = enum.auto()
    STOPPING = enum.auto()


class _World:
    """This process's part in Horovod's worlds, one after the other. ``lock`` guards what `abort` reads and writes."""

    def __init__(self, session: Session, basics: Any) -> None:
        library = basics.MPI_LIB_CTYPES
        self.session = session
        self.basics = basics
        self.native_init: Callable[..., bool] = library.horovod_init
        self.native_shutdown: Callable[[], None] = library.horovod_shutdown
        library.horovod_init.restype = ctypes.c_bool  # ctypes assumes int and would read undefined bits
        library.horovod_init, library.horovod_shutdown = self.init, self.shutdown
        self.interrupt, self.init_error = _mends(library)
        self.lock = threading.Lock()
        self.phase = _Phase.IDLE
        self.assignment: Assignment | None = None
        self.aborted = -1  # the newest generation that was aborted; generations only grow
        self.addresses: Collection[tuple[str, int]] = ()  # of the assignment's mesh, known once it is aborted
        self.reason = "start"
        self.collective_error: str | None = None
        self.watch: tuple[Callable[[], None], Callable[[], None]] | None = None
        self.waiting_since: float | None = None  # monotonic; while the main thread waits in a collective

    def init(self, *arguments: Any) -> bool:
        """In place of ``horovod_init``: true once a world runs. Raises what the session raises."""
        atexit.unregister(self.basics.shutdown)  # every hvd.init registers it once more
        atexit.register(self.basics.shutdown)
        if self.phase is _Phase.RUNNING:
            return True
        while True:
            assignment = self.session.next_assignment(self.reason)
            started = time.perf_counter()
            error = self._start(assignment, arguments)
            if error is None:
                self.session.initialised(assignment, time.perf_counter() - started)
                return True
            self.shutdown()
            self.reason = "init failed"
            self.session.init_failed(assignment, error)

    def _start(self, assignment: Assignment, arguments: tuple[Any, ...]) -> str | None:
        """Brings Horovod up in ``assignment``; says why where it fails."""
        os.environ.update(assignment.env)
        with self.lock:
            if assignment.generation <= self.aborted:
                return "aborted before init"
            self.phase, self.assignment, self.addresses = _Phase.STARTING, assignment, ()
        if not self.native_init(*arguments):
            return self.init_error()
        with self.lock:
            if assignment.generation > self.aborted:
                self.phase, self.reason, self.collective_error = _Phase.RUNNING, "reset", None
                return None
        break_mesh(self.addresses)
        return "aborted during init"

    def shutdown(self) -> None:
        """In place of ``horovod_shutdown``. It waits for Horovod's thread, which an abort may have to set free."""
        with self.lock:
            self.phase = _Phase.STOPPING
        self.native_shutdown()
        with self.lock:
            self.phase, self.assignment = _Phase.IDLE, None

    def abort(self, generation: int, addresses: Collection[tuple[str, int]]) -> bool:
        with self.lock:  # held while the mesh is broken, so that no other world can begin meanwhile
            self.aborted = max(self.aborted, generation)
            if self.assignment is None or self.assignment.generation != generation:
                return False
            self.addresses = tuple(addresses)
            if self.interrupt is not None:
                self.interrupt()
                return True
            return self.phase is not _Phase.STARTING and break_mesh(addresses) > 0

    def note_error(self, text: str) -> None:
        self.collective_error = text
        self.reason = "collective failed"


_world: _World | None = None


def install(session: Session) -> None:
    """Puts ``session`` behind every ``hvd.init`` of this process. Once a process, before Horovod is initialised.

    Raises:
        RuntimeError: installed before, or Horovod is initialised already.
    """
    global _world
    import horovod.common.elastic
    import horovod.torch.mpi_ops

    basics = horovod.torch.mpi_ops._basics
    if _world is not None or basics.is_initialized():
        raise RuntimeError("the collective seam must be installed once, before hvd.init()")
    _world = _World(session, basics)
    horovod.common.elastic.notification_manager.init = lambda *_args, **_kwargs: None
    _record_errors(_world)
    _wrap_waits(_world)


def current() -> Assignment | None:
    """The place that Horovod runs in, or None where it does not run."""
    world = _installed()
    with world.lock:
        return world.assignment if world.phase is _Phase.RUNNING else None


def in_native_init() -> bool:
    """Whether some thread is inside Horovod's native init."""
    return _installed().phase is _Phase.STARTING


def abort(generation: int, addresses: Collection[tuple[str, int]]) -> bool:
    """Makes whatever waits for another member of ``generation`` fail at once. Safe from any thread at any time.

    ``addresses`` are the (ip, port) pairs published at the rendezvous of that generation. A later generation than the
    current one is not even begun when it is assigned; an earlier one is over. Returns whether something was broken
    now: on a stock Horovod an abort during init is remembered until init returns.
    """
    return _installed().abort(generation, addresses)


def last_collective_error() -> str | None:
    """The text of the last HorovodInternalError since the current world began, or None.

    A lost member reads as a closed connection or a shutdown, a mistake of the user's (shapes, types or sizes that do
    not match between ranks) as "Mismatched ...".
    """
    return _installed().collective_error


def notify_hosts_updated() -> None:
    """Tells the elastic states of this process to reset at their next commit. Only rank 0's notice counts in Horovod.

    To be repeated until the worker asks for an assignment: a state drops its notices when it is reset.
    """
    from horovod.common.elastic import notification_manager
    from horovod.runner.elastic.worker import HostUpdateResult

    listeners = tuple(notification_manager._listeners)
    seen = [getattr(listener, "_last_updated_timestamp", 0) for listener in listeners]
    stamp = max([time.time_ns(), *(last + 1 for last in seen)])  # another rank's clock may be ahead of this one's
    for listener in listeners:
        listener.on_hosts_updated(stamp, HostUpdateResult.mixed)


def reset_optimizer_handles(optimizer: Any) -> None:
    """Makes a ``DistributedOptimizer`` usable after a collective failed under it.

    A failed step leaves handles of operations that will never end, and counters of gradients that were sent. Horovod
    clears them in ``load_state_dict`` alone, which costs a copy of the state. Gradients are not touched: call
    ``zero_grad`` next. An optimizer that is not Horovod's is left as it is.
    """
    if not hasattr(optimizer, "_allreduce_delay"):
        return
    optimizer._handles.clear()
    optimizer._synchronized = False
    optimizer._should_synchronize = True
    for parameter in optimizer._allreduce_delay:
        optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
    for group in getattr(optimizer, "_group_counts", {}):
        optimizer._group_counts[group] = 0


def watch_waits(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls ``before`` and ``after`` around every wait for a collective: for the optimizer's gradients, which travel
    while the backward pass goes on, and in ``hvd.allreduce`` and its like. ``after`` is left out where the wait fails.

    Takes the place of an earlier watch.
    """
    _installed().watch = before, after


def waits_s() -> float:
    """For how long, in seconds, this process has been waiting in the collective that it waits in now; else 0."""
    since = _installed().waiting_since
    return time.monotonic() - since if since is not None else 0.0


def _wrap_waits(world: _World) -> None:
    """Every collective that waits does so in one function, which several modules hold by name."""
    import horovod.torch.mpi_ops

    waiting = horovod.torch.mpi_ops.synchronize

    @functools.wraps(waiting)
    def synchronize(handle: Any) -> Any:
        before, after = world.watch or (_nothing, _nothing)
        before()
        world.waiting_since = time.monotonic()
        try:
            result = waiting(handle)
        finally:
            world.waiting_since = None
        after()
        return result

    for name, module in list(sys.modules.items()):
        if name.startswith("horovod.torch") and getattr(module, "synchronize", None) is waiting:
            setattr(module, "synchronize", synchronize)  # noqa: B010


def _nothing() -> None:
    pass


def _installed() -> _World:
    if _world is None:
        raise RuntimeError("the collective seam is not installed")
    return _world


def _record_errors(world: _World) -> None:
    """Notes every HorovodInternalError where it is made: Horovod raises it in a dozen places."""
    from horovod.common.exceptions import HorovodInternalError

    def noting(error: Exception, *arguments: object) -> None:
        RuntimeError.__init__(error, *arguments)
        world.note_error(str(arguments[0]) if arguments else "")

    HorovodInternalError.__init__ = noting


def _mends(library: Any) -> tuple[Callable[[], None] | None, Callable[[], str]]:
    """What a mended Horovod offers: an interrupt, and the reason why the last init failed."""
    unknown = "Horovod's native init failed"
    if not hasattr(library, "horovod_elastic_spark_mends"):
        return None, lambda: unknown
    reason = library.horovod_last_init_error
    reason.restype = ctypes.c_char_p
    library.horovod_interrupt.restype = None
    return library.horovod_interrupt, lambda: (reason() or b"").decode(errors="replace") or unknown
