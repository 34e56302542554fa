"""Ranks of Horovod as plain processes, and a rendezvous server that can hold them at a chosen point.

For tests of the Horovod build itself: nothing of elastic_spark is involved but the build. A `Rank` is this file run as
a program that obeys one JSON command a line; its answers are read with a limit.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

LIMIT_S = 60.0


class Rendezvous(http.server.ThreadingHTTPServer):
    """A key-value store over HTTP as Horovod's Gloo controller uses it. ``on_request(method, path)`` may block."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values: dict[str, bytes] = {}
        self.on_request: Callable[[str, str], None] = lambda method, path: None
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Rendezvous

    def _reply(self, body: bytes | None) -> None:
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def do_GET(self) -> None:
        self.server.on_request("GET", self.path)
        self._reply(self.server.values.get(self.path))

    def do_PUT(self) -> None:
        self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.on_request("PUT", self.path)
        self._reply(b"")

    def do_DELETE(self) -> None:
        self._reply(b"")

    def log_message(self, *arguments: Any) -> None:
        pass


class Rank:
    """One process that obeys commands. Use as a context manager: it is gone afterwards."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.errors: list[str] = []
        self.mends = 0
        self.threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for thread in self.threads:
            thread.start()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        for thread in self.threads:
            thread.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.answers.put(json.loads(line))
        self.answers.put({"gone": True})
        self.process.stdout.close()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)
        self.process.stderr.close()

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        try:
            got = self.answers.get(timeout=limit_s)
        except queue.Empty:
            raise AssertionError(f"no answer within {limit_s} s; stderr: {''.join(self.errors)[-2000:]}") from None
        assert "gone" not in got, f"process gone, exit {self.process.wait()}; stderr: {''.join(self.errors)[-2000:]}"
        return got

    def ask(self, do: str, limit_s: float = LIMIT_S, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.answer(limit_s)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Pool:
    """Warm ranks that several tests use one after the other: a rank that was not killed is used again."""

    def __init__(self) -> None:
        self.idle: list[Rank] = []

    @contextlib.contextmanager
    def ranks(self, count: int) -> Iterator[list[Rank]]:
        """``count`` ranks that are not initialised. Those that live afterwards go back, unless the block raised."""
        taken, self.idle = self.idle[:count], self.idle[count:]
        fresh = [Rank() for _ in range(count - len(taken))]
        taken += fresh
        try:
            for rank in fresh:
                rank.mends = rank.answer()["mends"]
            yield list(taken)
            for rank in taken:
                if rank.process.poll() is None:
                    rank.ask("shutdown")
                    self.idle.append(rank)
        finally:
            for rank in taken:
                if rank not in self.idle:
                    rank.__exit__()

    def close(self) -> None:
        for rank in self.idle:
            rank.__exit__()


def world(server: Rendezvous | None, rank: int, size: int, timeout_s: int = 30) -> dict[str, str]:
    """The environment of one rank; scopes are told apart by the port, so that each world needs a server of its own."""
    environment = {
        "HOROVOD_RANK": rank, "HOROVOD_SIZE": size, "HOROVOD_LOCAL_RANK": rank, "HOROVOD_LOCAL_SIZE": size,
        "HOROVOD_CROSS_RANK": 0, "HOROVOD_CROSS_SIZE": 1, "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": timeout_s,
    }  # fmt: skip
    if server is not None:
        environment |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": server.port}
    return {name: str(value) for name, value in environment.items()}


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _obey(command: dict[str, Any], hvd: Any, torch: Any) -> dict[str, Any]:
    do = command["do"]
    started = time.monotonic()
    try:
        if do == "init":
            os.environ.pop("HOROVOD_GLOO_RENDEZVOUS_ADDR", None)
            os.environ.pop("HOROVOD_GLOO_RENDEZVOUS_PORT", None)
            os.environ.update(command["env"])
            hvd.init()
            return {"rank": hvd.rank(), "size": hvd.size(), "seconds": time.monotonic() - started}
        if do == "shutdown":
            hvd.shutdown()
            return {"descriptors": len(os.listdir("/proc/self/fd"))}
        if do == "allreduce":
            total = hvd.allreduce(torch.full((command.get("numbers", 4),), float(command["value"])), op=hvd.Sum)
            return {"value": float(total[0])}
        if do == "train":  # steps of several collectives in flight, as in a backward pass, until one fails
            steps = 0
            ones = [torch.ones(command.get("numbers", 1000)) for _ in range(command.get("tensors", 1))]
            while True:
                handles = [hvd.allreduce_async(each, op=hvd.Sum, name=f"t{i}") for i, each in enumerate(ones)]
                for handle in handles:
                    hvd.synchronize(handle)
                steps += 1
                if steps == 5:
                    _say(training=True)
        raise AssertionError(do)
    except Exception as error:
        return {
            "error": type(error).__name__, "text": str(error), "at": time.time(), "seconds": time.monotonic() - started,
        }  # fmt: skip


def main() -> None:
    import horovod.torch as hvd
    import torch
    from horovod.torch import mpi_ops

    torch.set_num_threads(1)
    library = mpi_ops._basics.MPI_LIB_CTYPES
    commands: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "interrupt":
                library.horovod_interrupt()
            else:
                commands.put(command)
        commands.put(None)

    threading.Thread(target=read, daemon=True).start()
    mends = getattr(library, "horovod_elastic_spark_mends", None)
    _say(ready=True, mends=mends() if mends else 0)
    while (command := commands.get()) is not None:
        _say(**_obey(command, hvd, torch))


if __name__ == "__main__":
    main()
