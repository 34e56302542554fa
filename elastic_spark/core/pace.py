"""How fast each worker is, and when other shares of the work are worth a change of the world. Pure.

A step takes as long as its slowest worker. Each worker times its *own* part of every step: all but the wait for others
and for data (`elastic_spark.worker.pace`). Its speed is the median of its rows by the median of its own seconds, over
the last `WINDOW` steps of a generation, so that single slow steps say nothing. Lanes in proportion to speed make all
own times equal. They do so too where a part of the own time does not depend on the rows: the rule, applied to what is
measured then, stands still only where the times are equal.

*Hysteresis*, so that noise moves no lane. Speeds count only where equal shares would waste `MIN_GAIN` of the time. A
change just for them needs a prediction, from measured times and for the very lanes that would be owned, that the whole
step gets shorter by `MIN_GAIN`; a generation that ran for `SETTLE_S`; and `REST_S` since the last such change, twice as
much after each further one among the same workers. A change for another reason uses the speeds that are known then.

*A change for speed is a trial.* Where workers share the cores of a machine, or something else slows them in turns, one
looks slow because another one is fast, and other shares help nothing. So a change after which steps are no shorter than
before is undone, and equal shares stay for `LONGEST_REST_S`, or until the workers are others.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from elastic_spark.core import events as ev
from elastic_spark.core.lanes import assign_lanes
from elastic_spark.core.ledger import Report

#: Steps of a generation that are looked at, and how many of every member it takes.
WINDOW, ENOUGH = 50, 10
#: Shorter steps by this share are worth a change.
MIN_GAIN = 0.15
#: Seconds of a generation before it is judged, and from one look to the next.
SETTLE_S, LOOK_S = 5.0, 1.0
#: Seconds from one change for the sake of speed to the next: first, at most.
REST_S, LONGEST_REST_S = 30.0, 600.0

#: data set -> worker -> lanes that it owns.
Ownership = Mapping[str, Mapping[str, Sequence[int]]]


class Pace:
    """Not thread-safe: the controller's own. ``lanes``: number of lanes of each data set."""

    def __init__(self, lanes: Mapping[str, int]) -> None:
        self._lanes = dict(lanes)
        self._generation = 0
        self._began = self._looked = 0.0
        self._owned: Ownership = {}
        self._recent: dict[str, deque[Report]] = {}
        self._speeds: dict[str, float] = {}
        self._asked = False
        self._asked_at = float("-inf")
        self._rest_s = REST_S
        self._before_s: float | None = None  # time of a step before the change for speed that is on trial
        self._even_until = float("-inf")

    def begin(self, generation: int, members: Sequence[str], owned: Ownership, now: float) -> None:
        """A generation starts with these owners. What was measured of its members before stays until it is again."""
        same = set(members) == self._recent.keys()
        self._before_s = self._step_s() if same and self._asked and now >= self._even_until else None
        if not same:
            self._rest_s, self._even_until = REST_S, float("-inf")
        elif self._asked:
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        self._speeds = {worker: speed for worker, speed in self._measured().items() if worker in members}
        self._generation, self._began, self._owned, self._asked = generation, now, owned, False
        self._recent = {worker: deque(maxlen=WINDOW) for worker in members}

    def report(self, worker: str, generation: int, reports: Iterable[Report]) -> None:
        """Take down what a member reports; strangers and other generations are passed over."""
        if generation == self._generation and worker in self._recent:
            self._recent[worker].extend(item for item in reports if item.rows and item.own_s > 0)

    def weights(self, members: Sequence[str], now: float) -> dict[str, float]:
        """Rows per second of the members of which it is known; none where equal shares are good enough for them."""
        if now < self._even_until and set(members) == self._recent.keys():
            return {}
        known = {worker: speed for worker, speed in self._measured().items() if worker in members}
        if not known or 1 - len(known) * min(known.values()) / sum(known.values()) < MIN_GAIN:
            return {}
        return known

    def unbalanced(self, now: float) -> ev.LanesUnbalanced | None:
        """Whether other owners are worth a change now: the fact that says so, once a generation."""
        measured = len(self._recent) > 1 and all(len(recent) >= ENOUGH for recent in self._recent.values())
        if self._asked or not measured or now - self._began < SETTLE_S or now - self._looked < LOOK_S:
            return None
        self._looked = now
        step_s = self._step_s()
        if self._before_s is not None and step_s > 0:
            gain, self._before_s = 1 - self._before_s / step_s, None
            if gain < 0:
                return None
            self._even_until = now + LONGEST_REST_S
        else:
            gain = self._gain(now)
            if gain < MIN_GAIN or now - self._asked_at < self._rest_s:
                return None
        self._asked, self._asked_at = True, now
        return ev.LanesUnbalanced(at=now, generation=self._generation, rows_per_s=self._measured(), gain=gain)

    def _gain(self, now: float) -> float:
        """Share of a step's time that other owners would save: (longest own time - longest one then) / time of a step.

        A worker's own time then is that of now, by the number of its lanes.
        """
        dataset = next((name for recent in self._recent.values() for name in recent[-1].cursors), "")
        if dataset not in self._lanes:
            return 0.0
        members, owned = list(self._recent), self._owned[dataset]
        then = assign_lanes(self._lanes[dataset], members, owned, self.weights(members, now))
        own_s = {worker: median(item.own_s for item in recent) for worker, recent in self._recent.items()}
        own_s_then = [own_s[worker] * len(then[worker]) / max(1, len(owned[worker])) for worker in members]
        step_s = self._step_s()
        return (max(own_s.values()) - max(own_s_then)) / step_s if step_s > 0 else 0.0

    def _step_s(self) -> float:
        """Seconds from one step to the next: the median for the worker for which it is longest."""
        return max(median(_gaps(recent)) for recent in self._recent.values())

    def _measured(self) -> dict[str, float]:
        """Rows per second of each worker: measured in this generation, else in an earlier one."""
        fresh = {
            worker: median(item.rows for item in recent) / median(item.own_s for item in recent)
            for worker, recent in self._recent.items()
            if len(recent) >= ENOUGH
        }
        return {**self._speeds, **fresh}


def _gaps(recent: Iterable[Report]) -> list[float]:
    """Seconds from each commit to the next, by the steps of that one; 0 where there is but one commit."""
    steps = Counter(item.at for item in recent)
    return [(b - a) / steps[b] for a, b in itertools.pairwise(steps)] or [0.0]
