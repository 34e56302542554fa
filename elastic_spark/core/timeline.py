"""The story of a job as things to draw: who was there when, how fast it went, what was reported. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic_spark.core import events as ev


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


def timeline(events: Iterable[ev.Event], bins: int = 120) -> Timeline:
    """What a log says, with the speed as the mean over ``bins`` equal stretches of time."""
    out = Timeline()
    bars: dict[str, Bar] = {}
    commits: list[tuple[float, float]] = []
    rows = 0
    first = True
    for event in events:
        out.begin = event.at if first else min(out.begin, event.at)
        out.end = event.at if first else max(out.end, event.at)
        first = False
        if isinstance(event, ev.StepsCommitted):
            rows += event.rows
            commits += [(at, event.rows / len(event.times)) for at in event.times]
        elif isinstance(event, ev.MetricsReported):
            for name, value in event.values.items():
                out.series.setdefault(name, []).append((event.step, float(value)))
        elif isinstance(event, ev.GenerationFormed):
            out.sizes.append((event.at, len(event.members)))
            for worker in event.members:
                bar = bars.setdefault(worker, Bar(worker, "", event.at))
                bar.joined = event.at if bar.joined is None else bar.joined
        else:
            _live(event, bars)
        out.marks += [(event.at, *mark) for mark in _mark(event)]
    out.bars = list(bars.values())
    out.unit = "rows/s" if rows else "steps/s"
    out.speed = speed([(at, amount if rows else 1.0) for at, amount in commits], bins)
    return out


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
    if len(commits) < 2 or commits[-1][0] <= commits[0][0]:
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
