"""What the training thread waits for outside of collectives, and since when nothing of it has come.

A read that never returns raises nothing, and the thread that sends the heartbeat lives on: so the heartbeat says it,
and the driver decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_what = ""
_since = 0.0


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Inside it ``what`` is waited for."""
    global _what
    before = _what
    moved()
    _what = what
    try:
        yield
    finally:
        _what = before


def moved() -> None:
    """Something has come. From any thread."""
    global _since
    _since = time.monotonic()


def stalled() -> tuple[str, float]:
    """What is waited for, and the seconds since something came; "" and 0 where nothing is."""
    return (_what, time.monotonic() - _since) if _what else ("", 0.0)
