"""What a commit was, kept as it came; the reports of its steps are made where they are sent, and not in the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elastic_spark.core.ledger import Report


class Drawn(NamedTuple):
    """A batch that was handed to the loop: ``row_hash`` is of the ids of this worker's ``rows``."""

    epoch: int
    offset: int
    rows: int
    row_hash: int


class Commit(NamedTuple):
    """A commit behind step ``before``, at Unix time ``at``, of the batches ``drawn`` since the one before, by data set.
    ``own_s``, ``wait_s``: see `Report`; of all of its steps together."""

    before: int
    at: float
    drawn: Mapping[str, Sequence[Drawn]]
    values: Mapping[str, float]
    own_s: float
    wait_s: float

    @property
    def steps(self) -> int:
        """A batch is a step; without ``ctx.batches`` a commit is one."""
        return max(map(len, self.drawn.values()), default=0) or 1

    def reports(self) -> list[Report]:
        """One of each step; the values are the last one's."""
        steps = self.steps
        return [self._report(i, steps) for i in range(steps)]

    def _report(self, i: int, steps: int) -> Report:
        taken = {name: drawn[i] for name, drawn in self.drawn.items() if i < len(drawn)}
        return Report(
            step=self.before + i + 1,
            at=self.at,
            rows=sum(batch.rows for batch in taken.values()),
            cursors={name: (batch.epoch, batch.offset) for name, batch in taken.items()},
            values=self.values if i == steps - 1 else {},
            own_s=self.own_s / steps,
            wait_s=self.wait_s / steps,
            hashes={name: batch.row_hash for name, batch in taken.items()},
        )
