"""The agent's side of `elastic_spark.worker.forkserver`: workers by fork where that works, else by a new interpreter.

The interface of both is `Started`: what `elastic_spark.agent.process` needs of a process. The agent must be heard while
the server imports torch, so nothing here waits; a server that ends or does not answer in time is killed, and from then
on interpreters take its place.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from elastic_spark.agent.guard import Guard

#: For the first worker the server imports torch and Horovod meanwhile: as long as a worker may take to be ready.
ANSWER_S = 120.0
#: From the end of a process until the server has told its exit code.
CODE_S = 1.0


class Started(Protocol):
    """A process that was started. ``stdin`` and ``stdout`` are this side's ends of its pipes; ``pidfd`` is ready to be
    read once it has ended, and is the caller's to close."""

    pid: int
    pidfd: int
    stdin: IO[bytes]
    stdout: IO[bytes]

    def wait(self) -> int | None:
        """Its exit code, negative for a signal; None where nobody can tell. Called after its end was seen."""


class Interpreter:
    """A worker in an interpreter of its own."""

    def __init__(self, env: Mapping[str, str], memory: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "elastic_spark.worker.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**env, "ELASTIC_SPARK_MEMORY": ",".join(map(str, memory))},
            pass_fds=memory,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid, self.stdin, self.stdout = self._process.pid, self._process.stdin, self._process.stdout
        self.pidfd = os.pidfd_open(self.pid)

    def wait(self) -> int | None:
        return self._process.wait()


class Forked:
    """A worker that the fork server has forked."""

    def __init__(self, server: ForkServer, pid: int, pidfd: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.pidfd, self.stdin, self.stdout, self._server = pid, pidfd, stdin, stdout, server

    def wait(self) -> int | None:
        return self._server.code(self.pid, CODE_S)


@dataclass
class _Request:
    """A worker that was asked for: its memory, this side's ends of its pipes, until when the answer may come."""

    name: str
    memory: Sequence[int]
    stdin: IO[bytes]
    stdout: IO[bytes]
    deadline: float


class ForkServer:
    """Starts workers, without ever waiting: `start` asks, `poll` returns who has started since.

    Args:
        env: environment of the server and of the workers.
        mark: name and value of the variable by which leftovers of this agent are known.
        refused: why workers must not be forked, where they must not.

    Attributes:
        refused: why workers are not forked; None as long as they are.
    """

    def __init__(self, env: Mapping[str, str], mark: tuple[str, str], refused: str | None = None) -> None:
        self._env = {**env, mark[0]: mark[1]}
        self._mark = mark
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._guard: Guard | None = None
        self._requests: collections.deque[_Request] = collections.deque()
        self._started: list[tuple[str, Started]] = []
        self._codes: dict[int, int] = {}
        self.refused = refused

    def descriptors(self) -> list[int]:
        """To wait on for news."""
        return [self._control.fileno()] if self._control is not None else []

    def start(self, name: str, memory: Sequence[int]) -> None:
        """Ask for a new worker process.

        Args:
            name: of the worker.
            memory: two descriptors, for its snapshots and of its predecessor's; to stay open until the next `start`.
        """
        if self.refused is not None:
            self._interpret(name, memory)
            return
        try:
            if self._server is None or self._server.poll() is not None:
                self._launch()
            self._ask(name, memory)
        except OSError as error:
            self._refuse(str(error))
            self._interpret(name, memory)

    def poll(self) -> list[tuple[str, Started]]:
        """``(name, process)`` of those that have started since the last call."""
        self._take_in()
        if self._requests and time.monotonic() > self._requests[0].deadline:
            self._refuse(f"the fork server did not answer within {ANSWER_S:g} s")
        started, self._started = self._started, []
        return started

    def code(self, pid: int, limit_s: float) -> int | None:
        """The exit code of a worker that has ended; None where the server is gone or silent."""
        deadline = time.monotonic() + limit_s
        while pid not in self._codes and self._control is not None:
            if not select.select([self._control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                break
            self._take_in()
        return self._codes.pop(pid, None)

    def close(self) -> None:
        """End the server. Workers that it forked are not touched."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _launch(self) -> None:
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-u", "-m", "elastic_spark.worker.forkserver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what fails in it fails again, and is told, in an interpreter of its own
                env=self._env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control, self._guard = ours, Guard(self._server.pid)

    def _ask(self, name: str, memory: Sequence[int]) -> None:
        assert self._control is not None
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        deadline = time.monotonic() + ANSWER_S
        request = _Request(name, memory, os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb"), deadline)
        try:
            message = json.dumps({"mark": self._mark[1] + name}).encode()
            socket.send_fds(self._control, [message], [theirs_in, theirs_out, *memory])
        except OSError:
            request.stdin.close()
            request.stdout.close()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._requests.append(request)

    def _take_in(self) -> None:
        """What the server has said by now. Its answers come in the order of the requests."""
        while self._control is not None and select.select([self._control], [], [], 0.0)[0]:
            try:
                message, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
                answer = json.loads(message or b"{}")
            except OSError:
                answer = {}
            if "code" in answer:
                self._codes[answer["pid"]] = answer["code"]
            elif "pid" in answer:
                request = self._requests.popleft()
                forked = Forked(self, answer["pid"], fds[0], request.stdin, request.stdout)
                self._started.append((request.name, forked))
            else:
                self._refuse(answer.get("refused", "the fork server has ended"))

    def _refuse(self, why: str) -> None:
        """From now on interpreters, also for those that were asked for."""
        self.refused = why
        self.close()
        while self._requests:
            request = self._requests.popleft()
            request.stdin.close()
            request.stdout.close()
            self._interpret(request.name, request.memory)

    def _interpret(self, name: str, memory: Sequence[int]) -> None:
        self._started.append((name, Interpreter({**self._env, self._mark[0]: self._mark[1] + name}, memory)))
