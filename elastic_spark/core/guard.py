"""The guard: numbers that are not finite, and a loss or a gradient norm that jumps when the world changes. Pure.

It reads the committed values of the event log (`MetricsReported`: means over the ranks, so one rank's NaN makes the
mean NaN) and gives a `GuardAlarm` with the numbers. What follows (``guard`` = warn, rollback, stop) is decided in
`core.job`.

*Not finite* is any committed value, at any step. It is told once and then again only after a finite one.

*A jump* is looked for in the first `AFTER` steps of a new world, for values whose name ends in ``loss`` or speaks of a
gradient norm: that is where a resize shows that goes wrong without an error, as by a learning rate that was scaled
twice, an optimizer's state that was lost, or a mean taken with the wrong weights. From the last `BEFORE` values of the
world before, with their median m and their MAD = median(abs(v - m)), the limit is

    max(max(v), m + max(SPREADS * 1.4826 * MAD, FLOOR * abs(m)))

and an alarm is raised when the median of `RUN` values in a row lies above it. Why so: median and MAD do not move for
a few wild batches, as mean and deviation do (1.4826 * MAD estimates the deviation of normal noise); the largest value
before keeps noise with heavy tails from being called a jump; ``FLOOR`` does so for values that hardly vary; a median of
three needs two, so that one hard batch is none. Only upwards: a loss that falls is what training is for.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from elastic_spark.core import events as ev

POLICIES = ("warn", "rollback", "stop")
BEFORE, LEAST, AFTER, RUN = 32, 16, 64, 3
SPREADS, FLOOR = 6.0, 0.05
_WATCHED = re.compile(r"(?:^|[^a-z])loss$|grad\w*norm", re.IGNORECASE)


@dataclass(frozen=True)
class Usual:
    """What a value was like before: its median, its median absolute deviation, and the limit of the usual."""

    median: float
    mad: float
    limit: float


def usual(before: Sequence[float]) -> Usual | None:
    """The formula of this module for finite values; None for fewer than `LEAST`, which say too little."""
    if len(before) < LEAST:
        return None
    middle = median(before)
    mad = median([abs(value - middle) for value in before])
    limit = middle + max(SPREADS * 1.4826 * mad, FLOOR * abs(middle))
    return Usual(middle, mad, max(limit, max(before)))


class _Series:
    """One value over the steps."""

    def __init__(self) -> None:
        self.finite = True
        self.recent: deque[tuple[int, float]] = deque(maxlen=BEFORE)
        self.usual: Usual | None = None
        self.run: deque[float] = deque(maxlen=RUN)
        self.jumped = False

    def begin(self) -> None:
        """A new world. Where a roll-back has left too few values, what was usual before stays the measure."""
        self.usual = usual([value for _, value in self.recent]) or self.usual
        self.run.clear()
        self.jumped = False


class Guard:
    """Follows the facts of one driver. Not thread-safe."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        self._generation = 0
        self._formed_step = 0

    def add(self, event: ev.Event) -> list[ev.GuardAlarm]:
        """The alarms that a fact raises."""
        if isinstance(event, ev.MetricsReported):
            found = (self._judge(event, key, float(value)) for key, value in event.values.items())
            return [alarm for alarm in found if alarm is not None]
        if isinstance(event, ev.StepsRolledBack):
            for series in self._series.values():
                kept = [item for item in series.recent if item[0] <= event.to_step]
                series.finite, series.recent = True, deque(kept, maxlen=BEFORE)
        elif isinstance(event, ev.GenerationFormed):
            self._generation, self._formed_step = event.generation, event.step
            for series in self._series.values():
                series.begin()
        return []

    def _judge(self, event: ev.MetricsReported, key: str, value: float) -> ev.GuardAlarm | None:
        series = self._series.setdefault(key, _Series())
        if not math.isfinite(value):
            first, series.finite = series.finite, False
            return self._alarm(event, key, value, "not finite", event.step) if first else None
        series.finite = True
        series.recent.append((event.step, value))
        series.run.append(value)
        over = event.step > self._formed_step + AFTER
        if series.usual is None or series.jumped or over or not _WATCHED.search(key) or len(series.run) < RUN:
            return None
        series.jumped = median(series.run) > series.usual.limit
        if not series.jumped:
            return None
        return self._alarm(event, key, median(series.run), "jump", self._formed_step + 1, series.usual)

    def _alarm(
        self, event: ev.MetricsReported, key: str, value: float, kind: str, since: int, was: Usual | None = None
    ) -> ev.GuardAlarm:
        return ev.GuardAlarm(
            at=event.at,
            generation=self._generation,
            step=event.step,
            key=key,
            kind=kind,
            value=value,
            suspect_from=since,
            median=was.median if was else None,
            mad=was.mad if was else None,
            limit=was.limit if was else None,
        )


def told(alarm: ev.GuardAlarm) -> str:
    """An alarm in words."""
    if alarm.kind == "not finite":
        return f"{alarm.key} is {alarm.value} at step {alarm.step}"
    return (
        f"{alarm.key} jumped to {alarm.value:.4g} at step {alarm.step}, after the change of the world at step "
        f"{alarm.suspect_from - 1}; before: median {alarm.median:.4g}, MAD {alarm.mad:.4g}, limit {alarm.limit:.4g}"
    )
