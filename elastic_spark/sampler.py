"""A torch sampler that survives a change of the world, for data sets of one's own.

Where the rows do not come from Spark, the same order and the same guarantees for any map-style data set: the global
batches of an epoch are fixed by (seed, epoch, number of rows), every index is in exactly one of them, and each worker
computes its share from (rank, size) alone. So a resize needs no exchange, no list of what was done and no memory: the
cursor is (epoch, offset), two numbers to keep in the elastic state.

    sampler = es.LaneSampler(dataset, global_batch=1024, rank=hvd.rank, size=hvd.size)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, offset=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < epochs:
            sampler.set_epoch(state.epoch, state.offset)
            for x, y in loader:
                optimizer.zero_grad()
                (loss_fn(model(x), y) * sampler.weight(state.offset)).backward()
                optimizer.step()
                state.offset += 1
                state.commit()
            state.epoch, state.offset = state.epoch + 1, 0

What a DataLoader prefetched and nobody used is not counted: `set_epoch` begins where the state says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sized

from torch.utils.data import Sampler

from elastic_spark.core.lanes import LanePlan, LaneShare, assign_lanes, choose_lanes
from elastic_spark.errors import ConfigError

#: An index space has no row groups. It is cut into this many stretches, so that lanes hold other rows in each epoch.
_STRETCHES = 1024

#: Steps whose indices are computed at a time.
_STEPS_AT_ONCE = 32


class LaneSampler(Sampler[list[int]]):
    """Yields, for each global batch of an epoch, the list of indices that this worker takes: a *batch sampler*.

    On every worker it yields equally often. A worker without a row in a step (at the end of an epoch, or where there
    are more workers than rows) gets one index, of some row, and `weight` 0 for it.

    Args:
        data: the data set, or the number of its rows.
        global_batch: rows of a step over all workers.
        rank, size: this worker's place, as numbers, or as functions that are asked whenever an iteration begins.
        seed, shuffle: the order is a function of these, of the epoch and of the number of rows.
        max_world: the largest number of workers; it decides how finely the rows can be divided. The order depends on
            it: it must stay the same in all runs of a job.

    Raises ConfigError for options that make no sense, DataError for no rows.
    """

    def __init__(
        self,
        data: Sized | int,
        global_batch: int,
        *,
        rank: int | Callable[[], int] = 0,
        size: int | Callable[[], int] = 1,
        seed: int = 0,
        shuffle: bool = True,
        max_world: int = 32,
    ) -> None:
        rows = len(data) if isinstance(data, Sized) else int(data)
        if isinstance(global_batch, bool) or int(global_batch) != global_batch:
            raise ConfigError(f"global_batch={global_batch!r}: must be a whole number")
        global_batch = int(global_batch)
        stretches = min(_STRETCHES, max(1, rows))
        cuts = [rows * i // stretches for i in range(stretches + 1)]
        groups = tuple(end - start for start, end in itertools.pairwise(cuts))
        lanes = choose_lanes(max_world, global_batch, max(1, rows))
        self._plan = LanePlan(groups, lanes, global_batch, seed, shuffle)
        self._rank, self._size = rank, size
        self._owned: tuple[tuple[int, int], tuple[int, ...]] = (-1, -1), ()
        self._lanes()
        self.epoch = 0
        self.offset = 0

    def set_epoch(self, epoch: int, offset: int = 0) -> None:
        """Where the next iteration begins: at the global batch ``offset`` of ``epoch``, both from 0."""
        self.epoch, self.offset = epoch, offset

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of a whole epoch."""
        return self._plan.steps_per_epoch

    def weight(self, offset: int) -> float:
        """What the mean loss of this worker's share of the batch at ``offset`` is to be multiplied with.

        World size * local rows / global rows: averaged over the workers, the gradient is then that of the whole batch.
        """
        local = sum(self._plan.lane_rows_in_step(lane, offset) for lane in self._lanes())
        (_, size), _ = self._owned
        return size * local / max(1, self._plan.rows_in_step(offset))

    def __len__(self) -> int:
        """Batches that an iteration yields: those left of the epoch."""
        return max(0, self.steps_per_epoch - self.offset)

    def __iter__(self) -> Iterator[list[int]]:
        share = self._plan.share(self.epoch, self._lanes())
        return self._batches(share, range(self.offset, self.steps_per_epoch))

    def _batches(self, share: LaneShare, steps: range) -> Iterator[list[int]]:
        for first in steps[::_STEPS_AT_ONCE]:
            some = range(first, min(first + _STEPS_AT_ONCE, steps.stop))
            indices = share.row_ids(first, len(some)).tolist()
            at = 0
            for step in some:
                end = at + share.rows_in(step)
                yield indices[at:end] or [0]
                at = end

    def _lanes(self) -> tuple[int, ...]:
        """The lanes of this worker: a function of its place alone, so that all workers agree unasked."""
        rank = self._rank if isinstance(self._rank, int) else self._rank()
        size = self._size if isinstance(self._size, int) else self._size()
        if not 0 <= rank < size:
            raise ConfigError(f"rank={rank} of size={size}: must be from 0 to size - 1")
        if self._owned[0] != (rank, size):
            names = [str(number) for number in range(size)]
            self._owned = (rank, size), assign_lanes(self._plan.lanes, names, {})[names[rank]]
        return self._owned[1]
