"""Ctrl-C and SIGTERM, from the first thing that a job leaves behind to the last: they end it in good order, once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(BaseException):
    """SIGTERM on its way out of foreign code, whose ``except Exception`` must not take it for an error of its own."""


class Interrupts:
    """A context, in the main thread; elsewhere it does nothing, because Python lets only that one handle signals.

    First a signal raises, as KeyboardInterrupt or `Terminated`; what foreign code swallows is raised again by
    `check`. After `cancel_by` it calls what was given, which ends the job. After `hold` it does nothing: what follows
    takes seconds, and leaves a lie behind where it is cut short.

    Attributes:
        interrupted: Ctrl-C was pressed; to be raised at the end, whatever became of the job.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._why = ""
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

    def check(self) -> None:
        """Raises where a signal has come: whoever was to pass it on may have swallowed it."""
        if self._why:
            raise KeyboardInterrupt if self.interrupted else Terminated(self._why)

    def cancel_by(self, cancel: Callable[[str], None]) -> None:
        """From now on ``cancel(why)`` is called; at once where a signal has come."""
        self._cancel = cancel
        if self._why:
            cancel(self._why)

    def hold(self) -> None:
        """From now on nothing happens."""
        self._holds = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        by_key = number == signal.SIGINT
        self._why = "interrupted by Ctrl-C" if by_key else "terminated by SIGTERM"
        self.interrupted |= by_key
        if self._holds:
            return
        if self._cancel is not None:
            self._cancel(self._why)
        else:
            self.check()
