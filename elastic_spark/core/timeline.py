"""The story of a job as things to draw: who was there when, how fast it went, what was reported. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from elastic_spark.core import events as ev

_Point = tuple[float, ...]


@dataclass
class Bar:
    """One worker's life. Times are unix seconds; ``joined`` is None for one that never became a member."""

    worker: str
    host: str
    spawned: float
    joined: float | None = None
    ended: float | None = None
    #: ``lost``, ``left``, or "" while it lives and at the end of the job.
    end: str = ""
    why: str = ""


@dataclass
class Timeline:
    """``sizes``: (at, workers). ``speed``: (begin, end, rate) in ``unit``. ``marks``: (at, kind, words)."""

    begin: float = 0.0
    end: float = 0.0
    bars: list[Bar] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    speed: list[tuple[float, float, float]] = field(default_factory=list)
    unit: str = "steps/s"
    marks: list[tuple[float, str, str]] = field(default_factory=list)
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


class Story:
    """The timeline, event by event; `result` may be asked at any time.

    Args:
        most: commits, marks and points of a metric that are kept, about; None: all. Beyond it commits and points are
            put together, so that the curves grow coarser instead of longer, and the oldest marks go.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._out = Timeline()
        self._bars: dict[str, Bar] = {}
        self._commits = _Curve(most, lambda a, b: (max(a[0], b[0]), a[1] + b[1], a[2] + b[2]))
        self._series: dict[str, _Curve] = {}
        self._rows = 0
        self._first = True

    def add(self, event: ev.Event) -> None:
        """Takes in the next event of the log."""
        out = self._out
        out.begin = event.at if self._first else min(out.begin, event.at)
        out.end = event.at if self._first else max(out.end, event.at)
        self._first = False
        if isinstance(event, ev.StepsCommitted):
            self._rows += event.rows
            for at in event.times:
                self._commits.add((at, event.rows / len(event.times), 1.0))
        elif isinstance(event, ev.MetricsReported):
            for name, value in event.values.items():
                curve = self._series.setdefault(name, _Curve(self._most, lambda _, later: later))
                curve.add((event.step, float(value)))
        elif isinstance(event, ev.GenerationFormed):
            out.sizes.append((event.at, len(event.members)))
            for worker in event.members:
                bar = self._bars.setdefault(worker, Bar(worker, "", event.at))
                bar.joined = event.at if bar.joined is None else bar.joined
        else:
            _live(event, self._bars)
        out.marks += [(event.at, *mark) for mark in _mark(event)]
        if self._most is not None and len(out.marks) > 2 * self._most:
            del out.marks[: self._most]

    def result(self, bins: int = 120) -> Timeline:
        """What the log says so far, with the speed as the mean over ``bins`` equal stretches of time."""
        out = self._out
        out.bars = list(self._bars.values())
        out.unit = "rows/s" if self._rows else "steps/s"
        commits = self._commits.items()
        out.speed = speed([(at, rows if self._rows else steps) for at, rows, steps in commits], bins)
        out.series = {name: [(int(step), value) for step, value in c.items()] for name, c in self._series.items()}
        return out


def timeline(events: Iterable[ev.Event], bins: int = 120) -> Timeline:
    """What a log says, with the speed as the mean over ``bins`` equal stretches of time."""
    story = Story()
    for event in events:
        story.add(event)
    return story.result(bins)


class _Curve:
    """Points in order. Past ``2 * most`` of them each stands for twice as many as before, all for equally many; the
    first stays as it is, for it starts the clock, and the newest is always there.

    ``merge(earlier, later)`` makes one point of two.
    """

    def __init__(self, most: int | None, merge: Callable[[_Point, _Point], _Point]) -> None:
        self._most, self._merge = most, merge
        self._kept: list[_Point] = []
        self._open: _Point | None = None
        self._count, self._stride = 0, 1

    def add(self, point: _Point) -> None:
        if not self._kept:
            self._kept.append(point)
            return
        self._open = point if self._open is None else self._merge(self._open, point)
        self._count += 1
        if self._count == self._stride:
            self._kept.append(self._open)
            self._open, self._count = None, 0
        if self._most is not None and len(self._kept) > 2 * self._most:
            pairs = zip(self._kept[1::2], self._kept[2::2], strict=True)
            self._kept[1:] = [self._merge(earlier, later) for earlier, later in pairs]
            self._stride *= 2

    def items(self) -> list[_Point]:
        return [*self._kept, *([] if self._open is None else [self._open])]


def _live(event: ev.Event, bars: dict[str, Bar]) -> None:
    if isinstance(event, ev.WorkerSpawned):
        bars[event.worker] = Bar(event.worker, event.host, event.at)
    elif isinstance(event, (ev.WorkerLost, ev.WorkerLeft)) and event.worker in bars:
        bar = bars[event.worker]
        bar.ended = event.at
        bar.end = "lost" if isinstance(event, ev.WorkerLost) else "left"
        bar.why = event.cause if isinstance(event, ev.WorkerLost) else event.reason
    elif isinstance(event, ev.JobStarted):  # workers of an earlier driver are gone with it
        for bar in bars.values():
            if bar.ended is None:
                bar.ended, bar.end, bar.why = event.at, "lost", "driver lost"


def _mark(event: ev.Event) -> list[tuple[str, str]]:
    if isinstance(event, ev.CheckpointWritten):
        return [("checkpoint", f"checkpoint at step {event.step:,}")]
    if isinstance(event, ev.StepsRolledBack):
        return [("roll-back", f"steps {event.to_step + 1:,} to {event.from_step:,} undone: {event.cause}")]
    if isinstance(event, ev.UserFailed):
        return [("failure", f"{event.worker}: {event.error}")]
    return []


def speed(commits: Sequence[tuple[float, float]], bins: int) -> list[tuple[float, float, float]]:
    """``(begin, end, amount per second)`` over equal stretches from the first to the last commit ``(at, amount)``.

    A stretch without a commit has speed 0: a pause is seen as one. The first commit starts the clock and adds nothing.
    """
    commits = sorted(commits)
    if len(commits) < 2 or commits[-1][0] - commits[0][0] < 1e-6:  # less than the times can tell
        return []
    begin, end = commits[0][0], commits[-1][0]
    bins = max(1, min(bins, (len(commits) - 1) // 8))
    width = (end - begin) / bins
    sums = [0.0] * bins
    for at, amount in commits[1:]:
        sums[min(bins - 1, int((at - begin) / width))] += amount
    return [(begin + i * width, begin + (i + 1) * width, total / width) for i, total in enumerate(sums)]


def thin(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most about ``most`` of the points, evenly chosen, first and last among them; those that are not finite go."""
    finite = [(step, value) for step, value in points if value - value == 0]
    if len(finite) <= most:
        return finite
    stride = (len(finite) - 1) / (most - 1)
    return [finite[round(i * stride)] for i in range(most)]
