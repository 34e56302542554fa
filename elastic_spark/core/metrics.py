"""Every figure of a job, computed from its event log and from nothing else.

One small function (or meter) per figure; its docstring is the definition; those about rows are in `core.audit`.
`Summary` feeds them event by event and keeps 24 bytes per step; `summarise` is the same for a whole log.
Times are the log's own: unix seconds in, seconds out.

Words: a *commit* is the end of one step, by ``StepsCommitted.times``. The *final history* is what is left of all
commits after every roll-back. A *change* is every generation but the first one of the log.

A driver that takes up a job again (`JobStarted` with ``resumed_step``) rolls back to that step whatever an earlier
driver had committed beyond it in the same log. What that checkpoint holds and the log does not tell (a driver that was
killed had not written its last lines; or the log is a later driver's own) is *inherited*: this log can neither prove
nor doubt it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from elastic_spark.core import events as ev
from elastic_spark.core.audit import History, audit_rows, expected_rows
from elastic_spark.core.guard import told

#: Gaps looked at for the level of throughput before a change, and after it.
BEFORE, AFTER = 20, 5
#: A job is *back* at this share of its throughput before a change.
BACK = 0.9


def summarise(events: Iterable[ev.Event]) -> dict[str, Any]:
    """All figures of a log: see `Summary.result`."""
    summary = Summary()
    for event in events:
        summary.add(event)
    return summary.result()


# --- one function per figure -----------------------------------------------------------------------------------------


def percentile(values: Sequence[float], q: float) -> float | None:
    """Nearest rank: the smallest value with at least the share ``q`` of all values at or below it. None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def recovery_time(times: Sequence[float], stop: int, end: int, capacity: float) -> float | None:
    """RTO in seconds: from the last commit before the pause until throughput is back; None if not before ``end``.

    ``times`` are all commits in order and ``times[stop]`` is the last one before the pause, so the unknown moment of
    the fault is taken at its earliest. Back at commit j when
    ``1 / mean(next AFTER gaps) >= BACK * capacity / median(last BEFORE gaps)``, and RTO = ``times[j] - times[stop]``.
    ``capacity`` is ``min(1, workers after / workers before)`` for the RTO per surviving capacity, 1 for the absolute.
    """
    before = [
        b - a
        for a, b in zip(times[max(0, stop - BEFORE) : stop], times[max(0, stop - BEFORE) + 1 : stop + 1], strict=True)
    ]
    if not before:
        return None
    limit = median(before) / (BACK * capacity)
    for j in range(stop + 1, end - AFTER):
        if times[j + AFTER] - times[j] <= AFTER * limit:
            return times[j] - times[stop]
    return None


def ideal_rates(gaps: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Steps per second that each world size sustains: ``1 / median`` of the gaps between two commits of one generation.

    ``gaps[size]`` are those gaps in seconds. Fewer than three, or a median of 0, say nothing: left out.
    """
    medians = {size: median(values) for size, values in gaps.items() if len(values) >= 3}
    return {size: 1 / gap for size, gap in medians.items() if gap > 0}


def goodput(
    steps: int, sizes: Sequence[tuple[float, int]], begin: float, end: float, rates: Mapping[int, float]
) -> float | None:
    """Committed rows / integral of the ideal rate of the capacity that was present, over ``begin`` .. ``end``.

    With a fixed global batch rows are proportional to steps, so this is ``steps / integral of rate(size(t)) dt``.
    ``steps`` are those of the final history made in that time, ``sizes`` the world sizes ``(at, size)`` in order,
    ``rates`` from `ideal_rates`; for a size without a rate of its own, its workers times the best rate per worker.
    About 1 for a job without pauses and roll-backs; None where no rate is known.
    """
    if not rates:
        return None
    per_worker = max(rate / size for size, rate in rates.items())
    ideal = 0.0
    for (at, size), (until, _) in zip(sizes, [*sizes[1:], (end, 0)], strict=True):
        ideal += rates.get(size, size * per_worker) * max(0.0, min(until, end) - max(at, begin))
    return steps / ideal if ideal > 0 else None


def waiting(wait_s: float, begin: float | None, end: float | None) -> float | None:
    """Share of the time in which a step waited for data: the sum over the steps of the longest wait of any rank / the
    time from the first world that ran to the last commit. None where there is no such time."""
    return wait_s / (end - begin) if begin is not None and end is not None and end > begin else None


# --- meters: figures that are also wanted while the job runs ---------------------------------------------------------


@dataclass(frozen=True)
class Pause:
    """The pause of the change to ``generation``: ``seconds = resumed_at - stopped_at``, both being commits."""

    key: tuple[int, int]
    seconds: float
    stopped_at: float
    resumed_at: float

    @property
    def generation(self) -> int:
        return self.key[1]


class _Open:
    """A change under way: since ``begin``; ``key`` is set once its generation is formed."""

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.key: tuple[int, int] | None = None
        self.longest: tuple[float, float, float] | None = None


class PauseMeter:
    """Pause of a change: the longest gap between two consecutive commits from ``GenerationEnding`` (else
    ``GenerationFormed``) to the first commit of the new generation, that gap included.

    Two changes within one gap (a second fault before the first commit) both have that gap as their pause.
    """

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._driver = 0
        self._last: float | None = None
        self._formed_any = False

    @property
    def driver(self) -> int:
        """Number of drivers seen so far: generations of different drivers may have the same number."""
        return self._driver

    def add(self, event: ev.Event) -> list[Pause]:
        """The pauses that this event closes."""
        if isinstance(event, ev.JobStarted):
            self._driver += 1
        elif isinstance(event, ev.GenerationEnding):
            if not any(change.key is None for change in self._open):
                self._open.append(_Open(event.at))
        elif isinstance(event, ev.GenerationFormed):
            self._form(event)
        elif isinstance(event, ev.StepsCommitted) and event.times:
            return self._commit(event)
        return []

    def _form(self, event: ev.GenerationFormed) -> None:
        waiting = next((change for change in self._open if change.key is None), None)
        if waiting is None and self._formed_any:
            waiting = _Open(event.at)
            self._open.append(waiting)
        if waiting is not None:
            waiting.key = (self._driver, event.generation)
        self._formed_any = True

    def _commit(self, event: ev.StepsCommitted) -> list[Pause]:
        closed = []
        key = (self._driver, event.generation)
        for at in event.times if self._open else event.times[-1:]:
            for change in self._open:
                if self._last is not None and at >= change.begin:
                    gap = (at - self._last, self._last, at)
                    change.longest = max(change.longest or gap, gap)
                if change.key is not None and change.key <= key and change.longest is not None:
                    closed.append(Pause(change.key, *change.longest))
            self._open = [change for change in self._open if change.key is None or change.key > key]
            self._last = at if self._last is None else max(self._last, at)
        return closed


class RateMeter:
    """Rows and steps per second over the last ``window_s`` seconds of commits: sum in the window / its length.

    The window reaches from the oldest to the newest commit kept, so a pause in it lowers the rate as it should.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._kept: deque[tuple[float, int, int]] = deque()

    def add(self, event: ev.StepsCommitted) -> None:
        if event.times:
            self._kept.append((event.times[-1], len(event.times), event.rows))
            while len(self._kept) > 2 and self._kept[-1][0] - self._kept[0][0] > self._window_s:
                self._kept.popleft()

    @property
    def steps_s(self) -> float | None:
        return self._rate(1)

    @property
    def rows_s(self) -> float | None:
        return self._rate(2)

    def _rate(self, column: int) -> float | None:
        span = self._kept[-1][0] - self._kept[0][0] if self._kept else 0.0
        return sum(item[column] for item in list(self._kept)[1:]) / span if span > 0 else None


# --- all of it -------------------------------------------------------------------------------------------------------


class Summary:
    """The figures of a job, event by event. `result` may be asked at any time."""

    def __init__(self) -> None:
        self._job: ev.JobStarted | None = None
        self._end: ev.JobFinished | None = None
        self._first_at: float | None = None
        self._last_at = 0.0
        self._resumed_from: str | None = None
        self._frozen: dict[str, ev.DatasetFrozen] = {}
        self._history = History()
        self._pauses = PauseMeter()
        self._sizes: list[tuple[float, int]] = []
        self._size_of: dict[tuple[int, int], int] = {}
        self._changes: dict[tuple[int, int], dict[str, Any]] = {}
        self._closed: dict[tuple[int, int], Pause] = {}
        self._times = array("d")
        self._previous: tuple[tuple[int, int], float] | None = None
        self._gaps: dict[int, array[float]] = {}
        self._checkpoints: list[dict[str, Any]] = []
        self._safe_from: float | None = None  # all before it is in a checkpoint, or was when this driver began
        self._rpo_s: float | None = None
        self._alarms: list[str] = []
        self._losses: Counter[str] = Counter()
        self._rows_reported = self._rows_unreported = self._rows_unexplained = 0
        self._counts: Counter[str] = Counter()
        self._wait_s = 0.0
        self._ran_at: float | None = None

    def add(self, event: ev.Event) -> None:
        """Takes in the next event of the log."""
        self._first_at = event.at if self._first_at is None else self._first_at
        self._last_at = max(self._last_at, event.at)
        self._counts[type(event).__name__] += 1
        for pause in self._pauses.add(event):
            self._closed[pause.key] = pause
        if isinstance(event, ev.StepsCommitted):
            self._add_steps(event)
        elif isinstance(event, ev.JobStarted):
            self._add_start(event)
        elif isinstance(event, ev.GenerationFormed):
            self._add_generation(event)
        elif isinstance(event, ev.GenerationRunning):
            self._ran_at = event.at if self._ran_at is None else self._ran_at
            self._safe_from = event.at if self._safe_from is None else self._safe_from
            change = self._changes.get((self._pauses.driver, event.generation))
            if change is not None:
                change["form_s"] = event.seconds
        elif isinstance(event, ev.DatasetFrozen):
            self._frozen[event.dataset] = event
        elif isinstance(event, ev.StepsRolledBack):
            self._history.roll_back(event.from_step, event.to_step, self._frozen)
        elif isinstance(event, ev.CheckpointWritten):
            fields = ("at", "step", "uri", "digest", "bytes", "seconds", "world_size")
            self._checkpoints.append({name: getattr(event, name) for name in fields})
            if self._safe_from is not None:
                self._rpo_s = max(self._rpo_s or 0.0, event.at - self._safe_from)
            self._safe_from = event.at - event.seconds
        elif isinstance(event, ev.GuardAlarm):
            self._alarms.append(told(event))
        elif isinstance(event, ev.WorkerLost):
            self._losses[event.cause] += 1
        elif isinstance(event, ev.JobFinished):
            self._end = event

    def _add_start(self, event: ev.JobStarted) -> None:
        self._job, self._end, self._safe_from = event, None, None
        self._resumed_from = event.resumed_from
        if self._history.top > event.resumed_step:
            self._history.roll_back(self._history.top, event.resumed_step, self._frozen)
        self._history.assume(event.resumed_step, event.resumed_cursors)

    def _add_generation(self, event: ev.GenerationFormed) -> None:
        key, size = (self._pauses.driver, event.generation), len(event.members)
        if self._sizes:
            self._changes[key] = {
                "generation": event.generation,
                "cause": "resumed" if event.cause == "start" else event.cause,  # another driver's first world
                "at": event.at,
                "from_size": self._sizes[-1][1],
                "to_size": size,
                "joined": list(event.joined),
                "lost": list(event.lost),
                "left": list(event.left),
                "restored_from": event.restored_from,
                "form_s": None,
            }
        self._sizes.append((event.at, size))
        self._size_of[key] = size

    def _add_steps(self, event: ev.StepsCommitted) -> None:
        self._history.add(event)
        self._times.extend(event.times)
        key = (self._pauses.driver, event.generation)
        for at in event.times:
            if self._previous is not None and self._previous[0] == key and key in self._size_of:
                self._gaps.setdefault(self._size_of[key], array("d")).append(max(0.0, at - self._previous[1]))
            self._previous = (key, at)
        self._rows_reported += event.rows
        self._wait_s += event.wait_s
        if all(name in self._frozen for name in event.cursors):
            steps = range(len(event.times))
            expected = sum(
                expected_rows(self._frozen[d], first + i) for d, (_, first) in event.cursors.items() for i in steps
            )
            unreported = max(0, expected - event.rows) if event.cursors and event.missing else 0
            self._rows_unreported += unreported
            self._rows_unexplained += abs(expected - event.rows - unreported) if event.cursors else 0

    def result(self) -> dict[str, Any]:
        """The figures, in plain JSON types. Beside those defined in this module's functions:

        * ``status`` (RUNNING without an end), ``error``, ``wall_s`` (first to last event), ``steps`` (the job's count)
        * ``world_sizes`` as ``(at, size)``; ``losses``: workers lost, by cause
        * ``changes``: with ``pause_s``, ``form_s`` (formed to running), ``rto_s`` and ``rto_absolute_s``
        * ``epochs``: see `core.audit.audit_epoch`, and ``digest``, that of what was trained in the epoch so far, None
          where this log does not tell it all
        * ``steps_lost``, ``rows_lost``, ``seconds_lost``: the RPO, summed over roll-backs
        * ``rpo_s_max``: what a total loss could have cost at the worst moment: the longest time from the state of a
          checkpoint (its manifest's time less the seconds of writing), or from the first step, to the next manifest
        * ``rows_reported``: what workers said; ``rows_unreported``: rows by plan of which nobody spoke because a rank
          died before its report; ``rows_unexplained``: any other |reported - rows by plan|, summed over events
        """
        times = sorted(self._times)
        changes = self._changes_with_times(times)
        pauses = [change["pause_s"] for change in changes if change["pause_s"] is not None]
        digests = self._history.digests()
        epochs = [
            {**epoch, "digest": None if epoch["rows_inherited"] else digests.get((epoch["dataset"], epoch["epoch"]))}
            for epoch in audit_rows(self._frozen, self._history.batches(), self._history.inherited())
        ]
        made = sum(len(segment.times) for segment in self._history.segments)
        job = self._job
        return {
            "job_name": job.job_name if job else "",
            "job_id": job.job_id if job else "",
            "run_id": job.run_id if job else "",
            "status": self._end.status if self._end else "RUNNING",
            "error": self._end.error if self._end else "",
            "started_at": self._first_at,
            "wall_s": self._last_at - self._first_at if self._first_at is not None else 0.0,
            "resumed_from": self._resumed_from,
            "resumed_step": job.resumed_step if job else 0,
            "world_sizes": list(self._sizes),
            "changes": changes,
            "losses": dict(self._losses),
            "pause_s_p50": percentile(pauses, 0.5),
            "pause_s_p95": percentile(pauses, 0.95),
            "pause_s_max": max(pauses, default=None),
            "rto_s_p50": percentile([c["rto_s"] for c in changes if c["rto_s"] is not None], 0.5),
            **{
                name: sum(epoch[name] for epoch in epochs)
                for name in ("rows_total", "rows_once", "rows_twice", "rows_never", "rows_open", "rows_inherited")
            },
            "rows_reported": self._rows_reported,
            "rows_unreported": self._rows_unreported,
            "rows_unexplained": self._rows_unexplained,
            "epochs": epochs,
            "steps": self._history.top,
            "steps_lost": self._history.steps_lost,
            "rows_lost": self._history.rows_lost,
            "seconds_lost": self._history.seconds_lost,
            "goodput": goodput(made - 1, self._sizes, times[0], times[-1], ideal_rates(self._gaps)) if times else None,
            "data_wait_fraction": waiting(self._wait_s, self._ran_at, times[-1] if times else None),
            "checkpoints": list(self._checkpoints),
            "rpo_s_max": self._rpo_s,
            "checkpoints_skipped": self._counts["CheckpointSkipped"],
            "checkpoints_rejected": self._counts["CheckpointRejected"],
            "guard_alarms": list(self._alarms),
            "warnings": self._counts["Warned"],
            "datasets": {name: {"rows": item.rows, "digest": item.digest} for name, item in self._frozen.items()},
        }

    def _changes_with_times(self, times: Sequence[float]) -> list[dict[str, Any]]:
        """The changes with pause and RTO; the search for the RTO of one ends where the pause of the next begins."""
        stops = {key: bisect_left(times, pause.stopped_at) for key, pause in self._closed.items()}
        out = []
        for key, change in self._changes.items():
            pause = self._closed.get(key)
            rto = absolute = None
            if pause is not None:
                end = min((stop for stop in stops.values() if stop > stops[key]), default=len(times) - 1) + 1
                ratio = min(1.0, change["to_size"] / change["from_size"])
                rto = recovery_time(times, stops[key], end, ratio)
                absolute = recovery_time(times, stops[key], end, 1.0)
            seconds = pause.seconds if pause else None
            out.append({**change, "pause_s": seconds, "rto_s": rto, "rto_absolute_s": absolute})
        return out
