"""Who owns which lanes of each data set, by who is there and how fast they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from elastic_spark.core import events as ev
from elastic_spark.core.lanes import LanePlan, assign_lanes
from elastic_spark.core.ledger import Report
from elastic_spark.core.pace import Pace

#: data set -> worker -> lanes that it owns.
Owned: TypeAlias = dict[str, Mapping[str, tuple[int, ...]]]


class Lanes:
    """Lanes as they are now. Without ``balance`` all members own equally many, whatever their speed."""

    def __init__(self, plans: Mapping[str, LanePlan], *, balance: bool) -> None:
        self._plans = plans
        self._pace = Pace({name: plan.lanes for name, plan in plans.items()}) if balance else None
        self._owned: Owned = {}

    def report(self, worker: str, generation: int, steps: Iterable[Report]) -> None:
        """A member's steps tell how fast it is."""
        if self._pace is not None:
            self._pace.report(worker, generation, steps)

    def begin(self, generation: int, members: Sequence[str], now: float) -> Owned:
        """The lanes of a new generation: as many as possible stay with whom they were."""
        weights = self._pace.weights(members, now) if self._pace is not None else None
        self._owned = {
            name: assign_lanes(plan.lanes, members, self._owned.get(name, {}), weights)
            for name, plan in self._plans.items()
        }
        if self._pace is not None:
            self._pace.begin(generation, members, self._owned, now)
        return self._owned

    def unbalanced(self, now: float) -> ev.LanesUnbalanced | None:
        """The fact that other lanes would make steps shorter, where it is worth a change of the world."""
        return self._pace.unbalanced(now) if self._pace is not None else None
