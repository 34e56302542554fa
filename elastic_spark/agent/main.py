"""The agent: the Spark task that hosts one worker for as long as the job wants it.

It decides nothing. It connects to the driver, starts and kills worker processes when told to, and reports what it sees:
a heartbeat with each worker's processor time, output, exits. When the driver is gone or says stop, everything that it
started is gone a moment later, and the task ends.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_spark.agent.cache import default_cache_dir
from elastic_spark.agent.forkserver import ForkServer, Started
from elastic_spark.agent.process import MARK, WorkerProcess, sweep, worker_environment
from elastic_spark.errors import ProtocolError
from elastic_spark.notices import Watch
from elastic_spark.transport import Channel

HEARTBEAT_S = 0.5


@dataclass(frozen=True)
class Launch:
    """What an agent needs to know; travels in the task's closure, inside Spark.

    payload: broadcast variable, or the bytes themselves, of the pickled function and arguments, handed on unopened.
    notices: name of the source of notices that the machine will go; None: there is none.
    """

    job_id: str
    address: tuple[str, int]
    key: bytes = field(repr=False)
    payload: Any = field(repr=False)
    worker: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    notices: str | None = None

    def payload_bytes(self) -> bytes:
        data = self.payload if isinstance(self.payload, bytes) else self.payload.value
        assert isinstance(data, bytes)
        return data


def run_agent(launch: Launch, slot: int, attempt: int, resources: dict[str, list[str]]) -> Iterator[str]:
    """The body of the task. Yields one line when it ends in good order."""
    hello = {
        "role": "agent",
        "slot": slot,
        "attempt": attempt,
        "host": socket.gethostname(),
        "executor": executor_id(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "executable": sys.executable,
    }
    channel = Channel.connect(launch.address, launch.key, hello)
    place, mark = places(launch, slot)
    sweep(place)  # what a killed attempt of this same slot, or a driver before, may have left on this machine
    with contextlib.closing(_Memory()) as memory:  # Spark may keep this process, and start an agent in it again
        agent = _Agent(launch, channel, resources, mark, memory)
        try:
            yield agent.serve()
        finally:
            agent.stop()


def places(launch: Launch, slot: int) -> tuple[str, str]:
    """How the mark of every process begins that any agent of this slot has started, and that of this agent's own."""
    place = f"{launch.job_id}/slot-{slot}/"
    return place, f"{place}{secrets.token_hex(4)}/"


class _Agent:
    def __init__(
        self, launch: Launch, channel: Channel, resources: dict[str, list[str]], mark: str, memory: _Memory
    ) -> None:
        self._launch, self._channel, self._mark, self._memory = launch, channel, mark, memory
        env = {**worker_environment(), **launch.env}
        if "gpu" in resources:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(resources["gpu"])
        self._forks = ForkServer(env, (MARK, mark), refused=_why_not_fork(launch, resources))
        self._awaited: set[str] = set()
        self._processes: dict[int, WorkerProcess] = {}
        self._ticks: dict[str, int | None] = {}
        self._watch = Watch(launch.notices, self._report_notice, self._report_trouble) if launch.notices else None

    def serve(self) -> str:
        heartbeat_at = 0.0
        while True:
            now = time.monotonic()
            if now >= heartbeat_at:
                heartbeat_at = now + HEARTBEAT_S
                self._heartbeat()
            wait_s = max(0.0, heartbeat_at - time.monotonic())
            awaited = [self._channel.fileno(), *self._forks.descriptors(), *self._processes]
            ready, _, _ = select.select(awaited, [], [], wait_s)
            for worker, started in self._forks.poll():
                self._take_over(worker, started)
            for descriptor in ready:
                if descriptor in self._processes:
                    self._report_exit(descriptor)
            while (frame := self._channel.receive(0.0)) is not None:
                reason = self._obey(frame[0])
                if reason is not None:
                    return reason

    def _obey(self, message: dict[str, Any]) -> str | None:
        kind = message["type"]
        if kind == "spawn":
            self._awaited.add(message["worker"])
            self._forks.start(message["worker"], self._memory.for_next())
        elif kind == "kill":
            self._awaited.discard(message["worker"])
            for process in self._processes.values():
                if process.worker == message["worker"]:
                    process.kill()
        elif kind == "stop":
            return str(message["reason"])
        return None

    def _take_over(self, worker: str, started: Started) -> None:
        """A worker has started: watch it, tell it what it is. One that was to be killed meanwhile, is."""
        config = {
            **self._launch.worker,
            "cache_dir": self._launch.worker.get("cache_dir") or default_cache_dir(os.environ),
            "address": list(self._launch.address),
            "key": self._launch.key.hex(),
            "worker": worker,
            "job_id": self._launch.job_id,
        }
        process = WorkerProcess(worker, started, config, self._launch.payload_bytes(), self._report_lines)
        self._processes[process.pidfd] = process
        if worker in self._awaited:
            self._awaited.discard(worker)
            self._channel.send({"type": "spawned", "worker": worker, "pid": process.pid})
        else:
            process.kill()

    def _heartbeat(self) -> None:
        busy = []
        for process in self._processes.values():
            ticks = process.cpu_ticks()
            if ticks is not None and ticks != self._ticks.get(process.worker):
                busy.append(process.worker)
            self._ticks[process.worker] = ticks
        self._channel.send({"type": "heartbeat", "busy": busy})

    def _report_lines(self, worker: str, lines: tuple[str, ...]) -> None:
        with contextlib.suppress(ProtocolError):  # the driver is gone: `serve` ends by it
            self._channel.send({"type": "output", "worker": worker, "lines": lines})

    def _report_notice(self, reason: str) -> None:
        with contextlib.suppress(ProtocolError):
            self._channel.send({"type": "notice", "reason": reason})

    def _report_trouble(self, text: str) -> None:
        with contextlib.suppress(ProtocolError):
            self._channel.send({"type": "warning", "text": text})

    def _report_exit(self, pidfd: int) -> None:
        process = self._processes.pop(pidfd)
        self._ticks.pop(process.worker, None)
        code, tail = process.wait()
        self._channel.send({"type": "exited", "worker": process.worker, "code": code, "tail": tail})
        process.clean_up()

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
            process.clean_up()
        self._processes.clear()
        self._forks.close()
        sweep(self._mark)
        self._channel.close()


class _Memory:
    """The memory of the worker, and of the last one before it that has left a snapshot there."""

    def __init__(self) -> None:
        self._now, self._before = os.memfd_create("elastic_spark"), os.memfd_create("elastic_spark")

    def for_next(self) -> tuple[int, int]:
        """Descriptors for the next worker: its own memory, and its predecessor's; both stay this side's."""
        fresh = os.memfd_create("elastic_spark")
        used = os.pread(self._now, 8, 0).strip(b"\0")
        os.close(self._before if used else self._now)
        if used:
            self._before = self._now
        self._now = fresh
        return self._now, self._before

    def close(self) -> None:
        """Give it up, with what was left in it."""
        os.close(self._now)
        os.close(self._before)


def _why_not_fork(launch: Launch, resources: dict[str, list[str]]) -> str | None:
    """CUDA does not work in a child of a process that has looked at it; other reasons only the user knows."""
    if "gpu" in resources or Path("/dev/nvidiactl").exists():
        return "this machine has a GPU"
    if launch.env.get("ELASTIC_SPARK_FORK", "1") == "0":
        return "ELASTIC_SPARK_FORK=0"
    return None


def executor_id() -> str:
    """Spark's id of the executor above this process, read from the executor's command line; "driver" in local mode."""
    pid = os.getpid()
    while pid > 1:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        found = re.search(r"--executor-id (\S+)", command)
        if found:
            return found.group(1)
        pid = int(status.rpartition(")")[2].split()[1])
    return os.environ.get("SPARK_EXECUTOR_ID", "driver")
