"""The process that workers are forked from: it has imported torch and Horovod once, and a fork takes milliseconds.

So a worker that died is replaced in a tenth of a second on an executor that lives, where a new interpreter takes two or
three seconds. Started by the agent as ``python -m elastic_spark.worker.forkserver FD``, where FD is one end of a
`SOCK_SEQPACKET` pair. A request is one message ``{"mark": ...}`` with four descriptors: the worker's standard input,
its output, the memory for its snapshots, and that of its predecessor. The answer is ``{"pid": ...}`` with the worker's
pidfd, later followed by ``{"pid": ..., "code": ...}`` when that worker has ended.

Only the thread that calls fork lives on in a child, so this process must have no other but those of libraries that are
written for that: where an import has started one, it answers ``{"refused": why}``, and the agent starts an interpreter
for each worker instead.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

#: Arrow's allocator: jemalloc stops this thread before a fork and starts it again after, on both sides.
FORK_SAFE = frozenset(("jemalloc_bg_thd",))


def main(descriptor: int) -> None:
    """Serve until the agent closes its end."""
    import horovod.torch  # noqa: F401
    import numpy as np

    from elastic_spark.worker import context, data, state  # noqa: F401
    from elastic_spark.worker.main import main as worker_main
    from elastic_spark.worker.main import warm_up

    warm_up()
    gc.freeze()  # what is shared with the children stays shared: their collector does not touch it
    control = socket.socket(fileno=descriptor)
    children: dict[int, int] = {}  # pid by pidfd
    while True:
        ready, _, _ = select.select([descriptor, *children], [], [])
        for one in ready:
            if one != descriptor:
                _reap(control, one, children.pop(one))
                continue
            request, fds, _, _ = socket.recv_fds(control, 4096, 4)
            if not request:
                return
            if threads := _threads():
                _answer(control, {"refused": f"imports have started threads: {threads}"})
                _close(fds)
                continue
            pid = os.fork()
            if pid == 0:
                control.close()
                _close(list(children))
                np.random.seed()
                _become_worker(json.loads(request)["mark"], fds, worker_main)
            _close(fds)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            _answer(control, {"pid": pid}, [pidfd])


def _threads() -> list[str]:
    """The names of the other threads that would be missing in a child."""
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    return [name for task in others if (name := (task / "comm").read_text().strip()) not in FORK_SAFE]


def _reap(control: socket.socket, pidfd: int, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    _answer(control, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _answer(control: socket.socket, message: dict[str, object], fds: Sequence[int] = ()) -> None:
    with contextlib.suppress(OSError):  # the agent is gone: the next receive says so
        socket.send_fds(control, [json.dumps(message).encode()], fds)


def _become_worker(mark: str, fds: list[int], worker_main: Callable[[], int]) -> NoReturn:
    """In the child: a session, an input and an output of its own, then a worker's life."""
    code = 1
    try:
        os.setsid()
        os.environ["ELASTIC_SPARK_PROCESS"] = mark
        os.dup2(fds[0], 0)
        os.dup2(fds[1], 1)
        os.dup2(fds[1], 2)
        _close(fds[:2])
        os.environ["ELASTIC_SPARK_MEMORY"] = f"{fds[2]},{fds[3]}"
        code = worker_main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    main(int(sys.argv[1]))
