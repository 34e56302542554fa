"""Blocking calls from an event loop, one after the other."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    """One daemon thread: a call that never returns holds up those behind it, and not the end of the process."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def __call__(self, work: Callable[[], T], limit_s: float | None = None) -> T:
        """The value of ``work()``, or what it raises. One that is not begun when the wait for it ends never is.

        Raises:
            TimeoutError: it has not ended within ``limit_s`` seconds, the wait for those before it included.
        """
        future: Future[T] = Future()
        self._queue.put((future, work))
        return await asyncio.wait_for(asyncio.wrap_future(future), limit_s)

    def close(self) -> None:
        """No call comes any more; what is under way is not waited for."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, work  # what they hold is not kept until the next one comes
