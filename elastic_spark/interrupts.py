"""Ctrl-C and SIGTERM, from the first thing that a job leaves behind to the last: they end it in good order, once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from elastic_spark.errors import JobCancelled

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context, in the main thread; elsewhere it does nothing, because Python lets only that one handle signals.

    First a signal raises, as KeyboardInterrupt or `JobCancelled`. After `cancel_by` it calls what was given, which ends
    the job. After `hold` it does nothing: what follows takes seconds, and leaves a lie behind where it is cut short.

    Attributes:
        interrupted: Ctrl-C was pressed; to be raised at the end, whatever became of the job.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._cancel: Callable[[str], None] | None = None
        self._holds = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def cancel_by(self, cancel: Callable[[str], None]) -> None:
        """From now on ``cancel(why)`` is called."""
        self._cancel = cancel

    def hold(self) -> None:
        """From now on nothing happens."""
        self._holds = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        by_key = number == signal.SIGINT
        why = "interrupted by Ctrl-C" if by_key else "terminated by SIGTERM"
        self.interrupted |= by_key
        if self._holds:
            return
        if self._cancel is not None:
            self._cancel(why)
        elif by_key:
            raise KeyboardInterrupt
        else:
            raise JobCancelled(why)
