"""Checkpoints written beside the training: one thread, one write in flight, nothing queued behind it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from elastic_spark.checkpoint.manifest import JSON, WrittenPart
from elastic_spark.checkpoint.store import CheckpointStore

#: Of the writing thread, where cores are short.
NICE = 10
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriteOutcome:
    """How a write ended: exactly one of ``part`` and ``error`` is set. ``seconds`` of wall time, ``bytes`` written;
    ``nan`` names the first tensor that holds a NaN, if one does."""

    step: int
    token: str
    part: WrittenPart | None
    error: Exception | None
    seconds: float
    bytes: int
    nan: str = ""


class Readiness(Protocol):
    """Of tensors that are still being filled."""

    def wait(self) -> None:
        """Return when they are; raise where they never will be."""


@dataclass(frozen=True)
class _Order:
    step: int
    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, JSON]
    token: str
    part: int
    parts: int
    ready: Readiness | None


class BackgroundWriter:
    """Writes parts to ``store`` in a daemon thread; ``on_done`` is called in that thread with each outcome.

    Slow storage never makes a queue: while a write is in flight `submit` refuses, and the caller says that it skipped.
    """

    def __init__(self, store: CheckpointStore, on_done: Callable[[WriteOutcome], None]) -> None:
        self._store = store
        self._on_done = on_done
        self._changed = threading.Condition()
        self._order: _Order | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a write is in flight, its callback included."""
        return self._order is not None

    def submit(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        meta: Mapping[str, JSON],
        token: str,
        *,
        part: int = 0,
        parts: int = 1,
        ready: Readiness | None = None,
    ) -> bool:
        """Begin to write; False where a write is in flight or the writer is closed. ``tensors`` are a snapshot: from
        when they are ``ready`` nobody changes them before the callback. Returns at once."""
        with self._changed:
            if self._closed or self._order is not None:
                return False
            self._order = _Order(step, tensors, meta, token, part, parts, ready)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def close(self, timeout_s: float) -> bool:
        """Refuse new writes and wait for the one in flight; True where it ended within ``timeout_s``. A write that did
        not goes on in its daemon thread: it dies with the process, and what it leaves has no manifest."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone, and of those that it starts: training goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._order is not None or self._closed)
                order = self._order
            if order is None:
                return
            outcome = self._write(order)
            try:
                self._on_done(outcome)
            except Exception:
                _log.exception("the callback of the checkpoint of step %d failed", order.step)
            del order
            with self._changed:
                self._order = None
                self._changed.notify_all()

    def _write(self, order: _Order) -> WriteOutcome:
        part: WrittenPart | None = None
        error: Exception | None = None
        nan = ""
        started = time.monotonic()
        try:
            if order.ready is not None:
                order.ready.wait()
                started = time.monotonic()
            nan = _first_nan(order.tensors)
            part = self._store.write_part(
                order.step, order.tensors, order.meta, token=order.token, part=order.part, parts=order.parts
            )
        except Exception as failure:  # whatever it is, training goes on and the driver is told
            error = failure
        seconds = time.monotonic() - started
        return WriteOutcome(order.step, order.token, part, error, seconds, part.bytes if part else 0, nan)


_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _first_nan(tensors: Mapping[str, torch.Tensor]) -> str:
    """A sum is NaN where a summand is, and reads each byte once; infinities of one sign, as masks hold, are none."""
    with torch.no_grad():
        return next((name for name, item in tensors.items() if item.dtype in _SUMMED and item.sum().isnan()), "")
