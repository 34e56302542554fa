"""The ledger of committed steps: reports of the ranks in, facts out. Pure.

Every rank reports each of its commits. A step counts as committed once all members of the generation have reported it,
or once the next generation starts from a state that holds it. What only a lost rank had reached never was committed:
its rows are trained again, once. A generation that starts *below* what had counted as committed is a roll-back, and
said so: this is where "no committed step lost" is checked, by the figures themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from elastic_spark.core import events as ev


@dataclass(frozen=True)
class Report:
    """One commit of one rank. ``cursors[dataset] = (epoch, offset)`` of the global batch that the step consumed.

    ``own_s``: the rank's own seconds in the step: all but the wait for data and for others; 0 where it is not known.
    ``wait_s``: its seconds of waiting for data. ``hashes``: of the ids of the rows that it trained, by data set; those
    of all ranks add up, modulo 2^64, to that of the global batch.
    """

    step: int
    at: float
    rows: int = 0
    cursors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    own_s: float = 0.0
    wait_s: float = 0.0
    hashes: Mapping[str, int] = field(default_factory=dict)


class Ledger:
    """Not thread-safe: the controller's own. ``committed``: the newest committed step.

    ``planned(dataset, epoch, offset)`` is the hash of the row ids of a global batch by plan: for steps that some rank
    did not live to report.
    """

    def __init__(self, committed: int = 0, planned: Callable[[str, int, int], int] | None = None) -> None:
        self.committed = committed
        self._planned = planned
        self._generation = 0
        self._members: frozenset[str] = frozenset()
        self._pending: dict[int, dict[str, Report]] = {}
        self._givers: dict[str, int] = {}  # how many members gave a value in the last step that all have reported

    def report(self, worker: str, generation: int, reports: Iterable[Report]) -> None:
        """Take down what a member reports; strangers and older generations are passed over."""
        if generation != self._generation or worker not in self._members:
            return
        for item in reports:
            if item.step > self.committed:
                self._pending.setdefault(item.step, {})[worker] = item

    def find(self, worker: str, generation: int, reports: Iterable[Report]) -> None:
        """Reports that a worker may not have sent before it died, found in its memory: for the next `begin`.

        Of an older generation, which this one may have been rolled back from, it had another share of the same rows:
        such a report stands for a step only where no member of this one has reported it.
        """
        belongs = generation == self._generation and worker in self._members
        for item in reports:
            if item.step > self.committed:
                known = self._pending.setdefault(item.step, {})
                if belongs or not known:
                    known[worker if belongs else f"{worker} of generation {generation}"] = item

    def complete(self, now: float, gone: frozenset[str] = frozenset()) -> list[ev.Event]:
        """The facts about steps that all members but the ``gone`` (finished or lost) have reported by now."""
        wanted = self._members - gone
        return self._commit(lambda step: bool(wanted) and wanted <= self._pending[step].keys(), now)

    def begin(self, generation: int, members: Iterable[str], step: int, cause: str, now: float) -> list[ev.Event]:
        """A generation starts from the state of ``step``: what leads up to it is committed, what lies beyond is not.

        Where nobody lived to report the last steps of a checkpoint, that is said. A generation that is older than one
        that has begun is passed over.
        """
        if generation <= self._generation:
            return []
        facts = self._commit(lambda pending: pending <= step, now)
        if step < self.committed:
            facts.append(ev.StepsRolledBack(at=now, from_step=self.committed, to_step=step, cause=cause))
        elif step > self.committed:
            message = f"steps {self.committed + 1} to {step}, which it starts from, were reported by nobody"
            facts.append(ev.Warned(at=now, where=f"generation {generation}", message=message))
        self.committed = step
        self._generation, self._members, self._pending = generation, frozenset(members), {}
        return facts

    def close(self, now: float) -> list[ev.Event]:
        """The job ends: every step that any member reported was committed there."""
        return self._commit(lambda step: True, now)

    def _commit(self, holds: Callable[[int], bool], now: float) -> list[ev.Event]:
        """Commit the next steps for as long as somebody has reported them and it ``holds`` for each."""
        facts: list[ev.Event] = []
        run: list[dict[str, Report]] = []
        while (step := self.committed + 1) in self._pending and holds(step):
            self.committed = step
            reports = self._pending.pop(step)
            if run and not _continues(run[-1], reports):
                facts.append(self._fact(run, step - len(run), now))
                run = []
            run.append(reports)
            values = self._values(reports)
            if values:
                facts.append(ev.MetricsReported(at=now, step=step, values=values))
        if run:
            facts.append(self._fact(run, self.committed + 1 - len(run), now))
        return facts

    def _fact(self, run: list[dict[str, Report]], first_step: int, now: float) -> ev.StepsCommitted:
        return ev.StepsCommitted(
            at=now,
            generation=self._generation,
            first_step=first_step,
            times=tuple(min(item.at for item in reports.values()) for reports in run),
            cursors=_cursors(run[0]),
            rows=sum(item.rows for reports in run for item in reports.values()),
            missing=len(self._members - run[0].keys()),
            wait_s=sum(max(item.wait_s for item in reports.values()) for reports in run),
            hashes=self._hashes(run),
        )

    def _values(self, reports: Mapping[str, Report]) -> dict[str, float]:
        """The mean over the members. Of a step that not all lived to report there is none where fewer gave a value than
        before: each may be a share, and what the others had is not known. What is not finite is told in any case."""
        given: dict[str, list[float]] = {}
        for item in reports.values():
            for name, value in item.values.items():
                given.setdefault(name, []).append(value)
        if self._members <= reports.keys():
            self._givers |= {name: len(values) for name, values in given.items()}
        needed = {name: self._givers.get(name, len(self._members)) for name in given}
        means = {name: sum(values) / len(values) for name, values in given.items()}
        return {
            name: mean for name, mean in means.items() if len(given[name]) >= needed[name] or not math.isfinite(mean)
        }

    def _hashes(self, run: list[dict[str, Report]]) -> Mapping[str, str]:
        out = {}
        for name, (epoch, offset) in _cursors(run[0]).items():
            if all(reports.keys() == self._members for reports in run):
                known = [item.hashes for reports in run for item in reports.values()]
                if any(name not in hashes for hashes in known):
                    continue
                sums = [sum(item.hashes[name] for item in reports.values()) for reports in run]
            elif self._planned is not None:
                sums = [self._planned(name, epoch, offset + i) for i in range(len(run))]
            else:
                continue
            out[name] = "".join(f"{total % 2**64:016x}" for total in sums)
        return out


def _cursors(reports: Mapping[str, Report]) -> Mapping[str, tuple[int, int]]:
    return next(iter(reports.values())).cursors


def _continues(before: Mapping[str, Report], after: Mapping[str, Report]) -> bool:
    """Whether the second step consumed, in every data set, the global batch after the first one's, and as many ranks
    reported it."""
    old, new = _cursors(before), _cursors(after)
    return (
        len(before) == len(after)
        and old.keys() == new.keys()
        and all(new[name] == (epoch, offset + 1) for name, (epoch, offset) in old.items())
    )
