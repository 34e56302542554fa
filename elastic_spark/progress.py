"""What a terminal shows while a job runs: one line, kept up to date, or plain lines where nothing can be updated.

On a terminal the line is rewritten in place, at most once per ``interval_s``, and changes, checkpoints that fail and
warnings are printed above it. Elsewhere (a log file, a notebook's driver log) those are plain lines too, and the state
of the training is one more plain line every `PLAIN_EVERY` intervals. Nothing here may disturb the job: give it an
`Outlet`.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from typing import TextIO

from elastic_spark.core import events as ev
from elastic_spark.core.guard import told
from elastic_spark.core.metrics import PauseMeter, RateMeter
from elastic_spark.core.verdict import seconds
from elastic_spark.outlet import Outlet

PLAIN_EVERY = 5


class Progress:
    """Reads events and writes lines to ``stream``. Time is the events' own: no clock, no thread.

    Args:
        stream: where to write; a terminal when its ``isatty()`` says so.
        interval_s: least time between two updates of the line, in seconds.
    """

    def __init__(self, stream: TextIO | Outlet, *, interval_s: float = 1.0) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._interval = interval_s if self._terminal else PLAIN_EVERY * interval_s
        self._drawn_at = -math.inf
        self._width = 0
        self._rates = RateMeter()
        self._pauses = PauseMeter()
        self._members = 0
        self._wanted = 0
        self._step = 0
        self._epoch: tuple[int, int, int] | None = None
        self._batches: dict[str, int] = {}
        self._values: Mapping[str, float] = {}
        self._checkpoint: tuple[float, int] | None = None
        self._change = ""

    def publish(self, event: ev.Event) -> None:
        """Takes in an event and writes what it changes."""
        for pause in self._pauses.add(event):
            self._change = f"{self._change.split(', pause')[0]}, pause {seconds(pause.seconds)}"
            self._say(event.at, f"training goes on after {seconds(pause.seconds)}")
        self._take(event)
        text = _notable(event)
        if isinstance(event, ev.GenerationFormed):
            self._change = text = self._formed(event)
        if text:
            self._say(event.at, text)
        if self._step and event.at - self._drawn_at >= self._interval:
            self._draw(event.at)
        if isinstance(event, ev.JobFinished):
            self._end(event)

    def _take(self, event: ev.Event) -> None:
        if isinstance(event, ev.StepsCommitted) and event.times:
            self._rates.add(event)
            self._step = event.first_step + len(event.times) - 1
            for name, (epoch, offset) in event.cursors.items():
                self._epoch = (epoch, offset + len(event.times), self._batches.get(name, 0))
        elif isinstance(event, ev.MetricsReported):
            self._values = event.values
        elif isinstance(event, ev.JobStarted):
            self._wanted = event.num_proc
        elif isinstance(event, ev.DatasetFrozen):
            self._batches[event.dataset] = event.steps_per_epoch
        elif isinstance(event, ev.CheckpointWritten):
            self._checkpoint = (event.at, event.step)
        elif isinstance(event, ev.StepsRolledBack):
            self._step = event.to_step

    def _formed(self, event: ev.GenerationFormed) -> str:
        before, self._members = self._members, len(event.members)
        sizes = f"{before} -> {self._members}" if before else f"{self._members}"
        return f"generation {event.generation}: {sizes} workers ({event.cause})"

    def line(self, now: float) -> str:
        """The state in one line, at ``now`` (unix seconds)."""
        parts = []
        if self._epoch is not None:
            epoch, batch, of = self._epoch
            parts.append(f"epoch {epoch + 1} batch {batch}" + (f"/{of}" if of else ""))
        parts.append(f"step {self._step:,}")
        parts += [f"{name} {_number(value)}" for name, value in list(self._values.items())[:3]]
        if self._rates.rows_s:
            parts.append(f"{self._rates.rows_s:,.0f} rows/s")
        elif self._rates.steps_s:
            parts.append(f"{self._rates.steps_s:.1f} steps/s")
        parts.append(f"{self._members} workers" + (f" of {self._wanted}" if self._members < self._wanted else ""))
        if self._change:
            parts.append(self._change)
        if self._checkpoint is not None:
            parts.append(f"checkpoint {seconds(max(0.0, now - self._checkpoint[0]))} ago")
        return " | ".join(parts)

    def _draw(self, now: float) -> None:
        self._drawn_at = now
        if not self._terminal:
            self._stream.write(f"{_clock(now)} {self.line(now)}\n")
            return
        room = max(20, shutil.get_terminal_size((120, 24)).columns - 1)
        text = self.line(now)[:room]
        self._stream.write("\r" + text.ljust(self._width))
        self._width = len(text)

    def _say(self, now: float, text: str) -> None:
        """A line that stays."""
        clear = "\r" + " " * self._width + "\r" if self._terminal and self._width else ""
        self._stream.write(f"{clear}{_clock(now)} {text}\n")
        self._width = 0
        self._drawn_at = -math.inf if self._terminal else self._drawn_at

    def _end(self, event: ev.JobFinished) -> None:
        if self._step:
            self._draw(event.at)
        self._stream.write("\n" if self._terminal and self._width else "")
        self._width = 0
        self._say(event.at, event.status + (f": {event.error.strip().splitlines()[-1]}" if event.error.strip() else ""))


def _notable(event: ev.Event) -> str:
    """What is said once, whatever the line shows."""
    if isinstance(event, ev.WorkerLost):
        return f"worker {event.worker} lost: {event.cause}" + (f" ({event.detail})" if event.detail else "")
    if isinstance(event, ev.WorkerDraining):
        return f"worker {event.worker} will leave: {event.reason}"
    if isinstance(event, ev.StepsRolledBack):
        return f"steps {event.to_step + 1:,} to {event.from_step:,} undone: {event.cause}"
    if isinstance(event, ev.GuardAlarm):
        return f"guard: {told(event)}"
    if isinstance(event, ev.CheckpointRejected):
        return f"checkpoint {event.uri} not used: {event.reason}"
    if isinstance(event, ev.CheckpointSkipped):
        return f"checkpoint at step {event.step:,} skipped: {event.reason}"
    if isinstance(event, ev.Warned):
        return f"warning: {event.message}"
    if isinstance(event, ev.UserFailed):
        return (
            f"the training function raised on {event.worker} (rank {event.rank}) at step {event.step:,}: {event.error}"
        )
    if isinstance(event, ev.JobStarted) and event.resumed_from:
        return f"resumed from {event.resumed_from} at step {event.resumed_step:,}"
    return ""


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
