"""Starting workers: by fork where that works, by a new interpreter where not, and knowing how each of them ended."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_spark.agent.forkserver import Forked, ForkServer, Interpreter, Started
from elastic_spark.agent.main import Launch, places, run_agent
from elastic_spark.agent.process import MARK, sweep, worker_environment
from elastic_spark.errors import ProtocolError
from elastic_spark.transport import Connection, Server

LIMIT_S = 90.0
MEMORY = os.memfd_create("now"), os.memfd_create("before")


@pytest.fixture
def server() -> Iterator[ForkServer]:
    running = ForkServer({**worker_environment(), "OMP_NUM_THREADS": "1"}, (MARK, f"test-{os.getpid()}/"))
    yield running
    running.close()


def started(server: ForkServer, *names: str) -> list[Started]:
    """Start workers and wait for them, as the agent does."""
    for name in names:
        server.start(name, MEMORY)
    deadline, found = time.monotonic() + LIMIT_S, []
    while len(found) < len(names):
        assert time.monotonic() < deadline, f"only {found} of {names} started"
        select.select(server.descriptors(), [], [], 0.5)
        found += server.poll()
    assert [name for name, _ in found] == list(names)
    return [process for _, process in found]


def ended(process: Started) -> int | None:
    assert select.select([process.pidfd], [], [], LIMIT_S)[0], "it did not end"
    return process.wait()


def let_fail(process: Started) -> str:
    """Its output when its configuration cannot be read."""
    process.stdin.write(b"no json\n")
    process.stdin.close()
    return process.stdout.read().decode()


def test_workers_are_forked_with_a_session_and_pipes_of_their_own(server):
    first, second = started(server, "w1", "w2")
    assert isinstance(first, Forked)
    assert server.refused is None
    deadline = time.monotonic() + LIMIT_S
    while os.getsid(second.pid) != second.pid:
        assert time.monotonic() < deadline
    assert "JSONDecodeError" in let_fail(first)
    assert ended(first) == 1
    assert not select.select([second.pidfd], [], [], 0)[0]
    os.kill(second.pid, signal.SIGKILL)
    assert ended(second) == -signal.SIGKILL


def test_a_fork_is_quick_once_the_server_is_there(server):
    process = started(server, "w1")[0]
    began = time.monotonic()
    again = started(server, "w2")[0]
    assert time.monotonic() - began < 1.0
    for one in (process, again):
        let_fail(one)


def test_workers_outlive_their_server_and_the_next_one_comes_from_a_new_server(server):
    process = started(server, "w1")[0]
    os.kill(server._server.pid, signal.SIGKILL)
    server._server.wait()
    assert not select.select([process.pidfd], [], [], 0)[0]
    again = started(server, "w2")[0]
    assert isinstance(again, Forked)
    let_fail(again)
    assert ended(again) == 1
    let_fail(process)
    assert select.select([process.pidfd], [], [], LIMIT_S)[0]
    assert process.wait() is None  # it was the old server's child: nobody can tell


def test_a_server_that_dies_while_it_imports_is_replaced_by_interpreters(server):
    server.start("w1", MEMORY)
    os.kill(server._server.pid, signal.SIGKILL)
    process = started(server)
    deadline = time.monotonic() + LIMIT_S
    while not process:
        assert time.monotonic() < deadline
        select.select(server.descriptors(), [], [], 0.5)
        process = [one for _, one in server.poll()]
    assert isinstance(process[0], Interpreter)
    assert server.refused == "the fork server has ended"
    assert "JSONDecodeError" in let_fail(process[0])
    assert ended(process[0]) == 1


def test_no_fork_where_an_import_has_started_a_thread(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import sys, threading
        if "elastic_spark.worker.forkserver" in sys.orig_argv:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        """)
    )
    env = worker_environment()
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    server = ForkServer(env, (MARK, f"test-{os.getpid()}/"))
    process = started(server, "w1")[0]
    assert isinstance(process, Interpreter)
    assert "threads" in str(server.refused)
    os.kill(process.pid, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    server.close()


def test_an_agent_of_a_driver_before_ends_nothing_of_its_successor():
    """Two drivers of one job, the first one still alive, both with an agent of the same slot on this machine."""
    job = f"test-{os.getpid()}-turns"
    first, second = (Launch(job, ("", 0), b"", None, {}, {}) for _ in range(2))
    agents, sleepers = [], []
    for launch in (first, second):
        place, mark = places(launch, 0)
        agents.append((place, mark))
        sleepers.append(subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark}))
    try:
        assert sweep(agents[0][1]) == [sleepers[0].pid], "its end"
        assert sweep(agents[1][0]) == [sleepers[1].pid], "the next one's beginning"
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_a_guard_kills_a_stopped_group_when_its_owner_is_killed():
    group = subprocess.Popen(["sleep", "600"], start_new_session=True)
    script = (
        "import signal, sys; from elastic_spark.agent.guard import Guard; guard = Guard(int(sys.argv[1])); "
        "print('on', flush=True); signal.pause()"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(group.pid)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"on\n"
        group.send_signal(signal.SIGSTOP)
        owner.kill()
        assert group.wait(20.0) == -signal.SIGKILL
    finally:
        group.kill()
        owner.kill()
        owner.wait()


class Driver:
    """One that has a worker started, and when it has, ends the agent: by a word, or by going."""

    def __init__(self, *, tells: bool) -> None:
        self._tells = tells
        self._loop = asyncio.new_event_loop()
        calls = {"opened": self._opened, "received": self._received, "closed": lambda _: None}
        self._server = Server("127.0.0.1", b"k" * 32, **calls)
        self.address = self._loop.run_until_complete(self._server.start())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def _opened(self, connection: Connection) -> None:
        connection.send({"type": "spawn", "worker": "w1"})

    def _received(self, connection: Connection, message: dict, _blob: bytes) -> None:
        if message["type"] == "spawned" and self._tells:
            connection.send({"type": "stop", "reason": "all is done"})
        elif message["type"] == "spawned":
            connection.close()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()


def snapshots() -> list[str]:
    """The memory for snapshots that this process holds."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            names.append(os.readlink(entry))
        except OSError:
            continue
    return [name for name in names if name.startswith("/memfd:elastic_spark ")]


@pytest.mark.parametrize("end", ["a word", "the driver goes", "Spark ends the task"])
def test_an_agent_that_has_stopped_leaves_no_memory_in_the_process_which_spark_keeps(end):
    driver = Driver(tells=end != "the driver goes")
    launch = Launch(f"test-{os.getpid()}-memory", driver.address, b"k" * 32, b"", {}, {"ELASTIC_SPARK_FORK": "0"})
    before = snapshots()
    try:
        for attempt in range(2):
            task = run_agent(launch, 0, attempt, {})
            if end == "the driver goes":
                with pytest.raises(ProtocolError):
                    next(task)
            else:
                assert next(task) == "all is done"
                assert len(snapshots()) == len(before) + 2
                task.close() if end == "Spark ends the task" else list(task)
            assert snapshots() == before
    finally:
        driver.close()
