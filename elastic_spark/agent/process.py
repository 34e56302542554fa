"""One worker process: watched, ended, with all that it started itself.

The worker leads a session of its own, so its process group is it and its children (data loaders).
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_spark.agent.forkserver import Started
from elastic_spark.agent.guard import Guard

TAIL_LINES = 60
LINE_LIMIT = 4096
BLOCK = 1 << 16
MARK = "ELASTIC_SPARK_PROCESS"


class WorkerProcess:
    """A running worker.

    Args:
        worker: its id.
        started: the process itself.
        config: sent to the process on its standard input, as one line of JSON: addresses, key, options.
        payload: bytes that follow it: the user's function.
        on_lines: called with lines of its output, from a thread.
    """

    def __init__(
        self,
        worker: str,
        started: Started,
        config: Mapping[str, Any],
        payload: bytes,
        on_lines: Callable[[str, tuple[str, ...]], None],
    ) -> None:
        self.worker = worker
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._on_lines = on_lines
        self._process = started
        self.pid, self.pidfd = started.pid, started.pidfd
        self._guard = Guard(self.pid)
        self._reader = threading.Thread(target=self._read, name=f"output of {worker}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._feed, args=(config, payload), name=f"start of {worker}", daemon=True).start()

    def _feed(self, config: Mapping[str, Any], payload: bytes) -> None:
        with contextlib.suppress(OSError):  # it may die before it has read its configuration: its exit tells
            self._process.stdin.write(json.dumps(config).encode() + b"\n" + payload)
            self._process.stdin.close()

    def _read(self) -> None:
        """As many lines at a time as are there. A line that does not end is cut at `LINE_LIMIT`."""
        rest = b""
        while block := os.read(self._process.stdout.fileno(), BLOCK):
            *lines, rest = (rest + block).split(b"\n")
            while len(rest) > LINE_LIMIT:
                lines.append(rest[:LINE_LIMIT])
                rest = rest[LINE_LIMIT:]
            self._take(lines)
        self._take([rest] if rest else [])

    def _take(self, lines: list[bytes]) -> None:
        told = tuple(line.decode(errors="replace")[:LINE_LIMIT] for line in lines)
        self.tail.extend(told)
        if told:
            self._on_lines(self.worker, told)

    def cpu_ticks(self) -> int | None:
        """Processor time used so far, None when stopped or gone: tells a busy process from a frozen one."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "TtZX" else int(fields[11]) + int(fields[12])

    def kill(self) -> None:
        """SIGKILL the process and its group. Returns at once; ``pidfd`` tells when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)  # it may not be a group of its own yet
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> tuple[int | None, str]:
        """``(exit code, last lines of output)`` once it has ended. A negative code is a signal, None is unknown. The
        output is at its end already, unless children of the process hold it open: for these nobody waits."""
        code = self._process.wait()
        self._reader.join(timeout=0.02)
        return code, "\n".join(self.tail)

    def clean_up(self) -> None:
        """After its end: kill what is left of its group, take in the last lines of output, end the guard."""
        self.kill()
        self._reader.join(timeout=1.0)
        self._guard.close()
        os.close(self.pidfd)


#: What a worker inherits of the executor's environment. The driver's environment never reaches it.
_PASSED = frozenset(("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "HOSTNAME", "VIRTUAL_ENV", "CONDA_PREFIX"))
_PASSED_PREFIXES = (
    *("ELASTIC_SPARK_", "LC_", "LD_", "SPARK_", "PYSPARK_", "PYTHON", "JAVA_", "HADOOP_", "COVERAGE_"),
    *("CUDA", "NVIDIA_", "NCCL_", "OMP_", "MKL_", "OPENBLAS_", "GLOO_", "HOROVOD_"),
)
_WITHHELD = ("SECRET", "TOKEN", "PASSWORD", "CREDENTIAL", "PYTHON_WORKER_FACTORY")


def worker_environment() -> dict[str, str]:
    """The allow-listed part of this process's environment, with the task's import path (``--py-files``, archives)."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if (name in _PASSED or name.startswith(_PASSED_PREFIXES)) and not any(word in name for word in _WITHHELD)
    }
    passed["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return passed


def sweep(mark_prefix: str) -> list[int]:
    """Kill processes of this user whose mark starts with ``mark_prefix``: leftovers of a task that was killed, and what
    a training function has started in a session of its own."""
    wanted = f"{MARK}={mark_prefix}".encode()
    swept = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                marks = [item for item in (entry / "environ").read_bytes().split(b"\0") if item.startswith(wanted)]
                if marks:
                    os.kill(int(entry.name), signal.SIGKILL)
                    swept.append(int(entry.name))
            except OSError:
                continue
    return swept
