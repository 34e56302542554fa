"""Calls into code that may never return."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: How soon a new deadline is seen.
LOOK_S = 0.25


class Bounded:
    """Runs each call in a daemon thread of its own and waits for it, up to a limit.

    A call that does not return in time is left behind: its thread ends when the call does. While ``most_left`` of them
    are alive no new one is begun, so a store that swallows requests costs a handful of threads, not one per request.

    Attributes:
        deadline: of the monotonic clock; no call is waited for beyond it. It may be set while one is.
    """

    def __init__(self, most_left: int = 4, name: str = "elastic-spark-call") -> None:
        self.deadline = math.inf
        self._most_left, self._name = most_left, name
        self._left: list[threading.Thread] = []

    def __call__(self, call: Callable[[], T], limit_s: float) -> T:
        """The value of ``call()``, or what it raises.

        Raises:
            TimeoutError: no answer within ``limit_s`` seconds or before the deadline, or too many earlier calls hang.
        """
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= self._most_left:
            raise TimeoutError(f"{len(self._left)} earlier requests have not come back")
        values: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                values.append(call())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        begin = time.monotonic()
        thread.start()
        while thread.is_alive():
            now = time.monotonic()
            left = min(begin + limit_s, self.deadline) - now
            if left <= 0:
                self._left.append(thread)
                raise TimeoutError(f"no answer within {now - begin:.1f} s")
            thread.join(min(left, LOOK_S))
        if errors:
            raise errors[0]
        return values[0]
