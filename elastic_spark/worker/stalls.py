"""What this process waits for outside of collectives, and since when nothing of it has come.

A read that never returns raises nothing, and the thread that sends the heartbeat lives on: so the heartbeat says it,
and the driver decides.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_waits: dict[int, str] = {}  # by thread
_since: dict[int, float] = {}


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Inside it this thread waits for ``what``."""
    thread = threading.get_ident()
    _since[thread], _waits[thread] = time.monotonic(), what
    try:
        yield
    finally:
        _waits.pop(thread, None)


def moved() -> None:
    """Something has come, for whichever thread. From any thread."""
    now = time.monotonic()
    for thread in list(_waits):
        _since[thread] = now


def stalled() -> tuple[str, float]:
    """What has been waited for longest, and the seconds since something came; "" and 0 where nothing is."""
    now = time.monotonic()
    waits = [(now - _since[thread], what) for thread, what in list(_waits.items())]
    seconds, what = max(waits, default=(0.0, ""))
    return what, seconds
