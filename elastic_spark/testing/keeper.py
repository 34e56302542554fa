"""The process that clears up after a test cluster, also when its owner is killed.

Run as ``python keeper.py MARKER DIRECTORY`` with a pipe as standard input. When the pipe reaches its end, or the parent
is gone, it kills every process that carries the environment variable MARKER and removes DIRECTORY. The marker's name
is random for each cluster and handed down by `fork`, so it finds the cluster's own processes and no others, orphans and
processes in sessions of their own included.

Why not PR_SET_PDEATHSIG: it is sent when the parent's *thread* ends, and only to children, not to theirs.
Standard library only, since it is run by path without the package.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

POLL_S = 0.5
SWEEP_LIMIT_S = 10.0


def marked(marker: str) -> dict[int, frozenset[str]]:
    """Living processes with ``marker`` in their environment, each with its variables whose names begin with it.

    Zombies have no environment any more and are left out.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            names = (item.partition(b"=")[0] for item in (entry / "environ").read_bytes().split(b"\0"))
            ours = frozenset(name.decode() for name in names if name.startswith(marker.encode()))
            if marker in ours:
                found[int(entry.name)] = ours
    return found


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []


def sweep(marker: str, limit_s: float = SWEEP_LIMIT_S) -> list[int]:
    """Kill all marked processes, again and again until none is left; returns those that outlived ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while (pids := [pid for pid in marked(marker) if pid != os.getpid()]) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return pids


def main() -> int:
    marker, directory = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owner = os.getppid()
    while os.getppid() == owner:
        ready, _, _ = select.select([0], [], [], POLL_S)
        if ready and not os.read(0, 1):
            break
    left = sweep(marker)
    shutil.rmtree(directory, ignore_errors=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
