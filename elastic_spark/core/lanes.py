"""Lanes: who trains which row, at any number of workers, without a list of rows.

An epoch of ``rows`` rows is cut into ``lanes`` (L) lanes; L is fixed for the job. Lane l takes ``b_l`` rows in every
step, with ``sum(b_l) == global_batch`` (G), and holds a share of the rows proportional to ``b_l``. Workers own lanes. A
resize only changes who owns which lane: the cursor of the whole job stays (epoch, offset), the global batches stay what
they were, and no row can be lost or repeated, because every row is in one lane and every lane has one owner.

How an epoch is laid out, a pure function of (seed, epoch, row counts of the row groups)::

    row groups, permuted    | 3        | 0          | 2      | 1           |      concatenated: positions 0 .. rows-1
    lanes                   | 0     | 1     | 2     | 3      | 4     | 5   |      lane l: positions cut_l .. cut_{l+1}-1
    rows of a lane          a keyed permutation of its positions (order.py): the window of the shuffle is the lane

    C_l   = floor(l * G / L)            rows of a step in the lanes before l;    b_l = C_{l+1} - C_l
    cut_l = floor(rows * C_l / G)       rows of the epoch in the lanes before l; n_l = cut_{l+1} - cut_l

Every cut is within one row of its exact share, so ``b_l * floor(rows / G) <= n_l <= b_l * ceil(rows / G)``: all lanes
end in the same step or one step apart, every global batch but the last of an epoch is full, and the last one carries
the remainder. Nothing is padded, and no worker leaves early: it takes part in every step, with no row where its lanes
have none left.

Row ids are positions in manifest order. Row groups are the unit that readers fetch; a lane touches a contiguous run of
the permuted row groups, and shares at most the first and the last of them with its neighbours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from elastic_spark.core.order import MAX_SIZE, Int64s, KeyedPermutations, derive_key, row_hash, shuffled
from elastic_spark.errors import ConfigError, DataError

#: Lanes for each worker of the largest world. A world that does not divide the lanes is uneven by at most one lane in
#: this many, and so is an ownership by speed; more lanes would make the rows of a lane in one step fewer.
LANES_PER_WORKER = 32

_ROW_GROUPS, _ROWS = 1, 2  # which order a key is for
_AT_ONCE = 15_000  # numbers of a temporary array: malloc asks the kernel for fresh pages from 128 KiB on


@dataclass(frozen=True)
class LanePlan:
    """The order of every epoch of one data set.

    ``groups``: rows of each row group, in manifest order. ``lanes`` is lowered to ``min(lanes, global_batch, rows)``.
    ``shuffle=False`` keeps manifest order: lane l then holds the l-th stretch of the rows, in order.
    """

    groups: tuple[int, ...]
    lanes: int
    global_batch: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.global_batch < 1:
            raise ConfigError(f"lanes={self.lanes} and global_batch={self.global_batch}: both must be at least 1")
        if any(rows < 0 for rows in self.groups):
            raise DataError("a row group with a negative number of rows")
        if self.rows == 0:
            raise DataError(f"the data has no rows (0 rows in {len(self.groups)} row groups)")
        object.__setattr__(self, "lanes", min(self.lanes, self.global_batch, self.rows))
        largest = int(self.lane_sizes.max())
        if largest > MAX_SIZE:
            raise ConfigError(f"a lane of {largest} rows: use at least {-(-self.rows // MAX_SIZE)} lanes")

    @functools.cached_property
    def rows(self) -> int:
        """Rows of an epoch."""
        return sum(self.groups)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch: all of ``global_batch`` rows but the last one, which holds the remainder."""
        return -(-self.rows // self.global_batch)

    @functools.cached_property
    def lane_batches(self) -> Int64s:
        """b_l, the rows that lane l takes in a full step: int64[lanes]."""
        return np.diff(self._batch_cuts())

    @functools.cached_property
    def lane_starts(self) -> Int64s:
        """cut_l, the first position of lane l, and ``rows`` at the end: int64[lanes + 1]."""
        return np.array([self.rows * int(cut) // self.global_batch for cut in self._batch_cuts()], dtype=np.int64)

    @functools.cached_property
    def lane_sizes(self) -> Int64s:
        """n_l, the rows that lane l holds in an epoch: int64[lanes]."""
        return np.diff(self.lane_starts)

    def _batch_cuts(self) -> Int64s:
        return np.arange(self.lanes + 1, dtype=np.int64) * self.global_batch // self.lanes

    def rows_in_step(self, offset: int) -> int:
        """Rows of the global batch at ``offset`` of an epoch; 0 past its end."""
        return max(0, min(self.global_batch, self.rows - offset * self.global_batch))

    def lane_rows_in_step(self, lane: int, offset: int) -> int:
        """Rows that ``lane`` gives to the global batch at ``offset``."""
        batch = int(self.lane_batches[lane])
        return max(0, min(batch, int(self.lane_sizes[lane]) - offset * batch))

    def row_ids(self, epoch: int, lane: int, offset: int) -> Int64s:
        """Global ids of the rows that ``lane`` gives to the global batch at ``offset``, in order: int64[n]."""
        return self.share(epoch, (lane,)).row_ids(offset)

    def row_hash(self, epoch: int, offset: int) -> int:
        """Hash of the row ids of the global batch at ``offset``; those of the workers' shares add up to it."""
        return row_hash(self.share(epoch, range(self.lanes)).row_ids(offset))

    def share(self, epoch: int, lanes: Sequence[int]) -> LaneShare:
        """The rows of ``lanes`` in ``epoch``, batch by batch, in the order of ``lanes``."""
        return LaneShare(self, self.layout(epoch), lanes)

    def layout(self, epoch: int) -> EpochLayout:
        """How ``epoch`` is laid out. The last two are kept: computing one is linear in row groups and lanes."""
        kept: dict[int, EpochLayout] = self.__dict__.setdefault("_layouts", {})
        layout = kept.get(epoch)
        if layout is None:
            layout = EpochLayout.of(self, epoch)
            while len(kept) > 1:
                kept.pop(next(iter(kept)), None)
            kept[epoch] = layout
        return layout

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_layouts"}


@dataclass(frozen=True, eq=False)
class EpochLayout:
    """The permuted row groups of one epoch, and where each position of the epoch lies.

    ``order``: int64[R], manifest numbers of the row groups that hold rows, permuted. ``bounds``: int64[R + 1], their
    first positions. ``shift``: int64[R], id of a row = position + shift of its row group. ``first``: int64[..], the row
    group of the first position of every bucket of ``2^bucket_bits`` positions; a bucket reaches over at most ``hops``
    more. ``rows``: the permutation within each lane, None where rows keep their order.
    """

    order: Int64s
    bounds: Int64s
    shift: Int64s
    first: Int64s
    bucket_bits: int
    hops: int
    rows: KeyedPermutations | None

    @classmethod
    def of(cls, plan: LanePlan, epoch: int) -> EpochLayout:
        sizes = np.array(plan.groups, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        order = np.nonzero(sizes)[0].astype(np.int64)
        permutation = None
        if plan.shuffle:
            order = order[shuffled(order.size, derive_key(plan.seed, epoch, _ROW_GROUPS))]
            permutation = KeyedPermutations(plan.lane_sizes, derive_key(plan.seed, epoch, _ROWS))
        bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes[order])])
        bucket_bits = max(0, (plan.rows // (8 * order.size)).bit_length() - 1)
        heads = np.arange(0, plan.rows + (1 << bucket_bits), 1 << bucket_bits, dtype=np.int64)
        first = np.minimum(np.searchsorted(bounds, heads, side="right") - 1, order.size - 1).astype(np.int64)
        hops = int(np.diff(first).max())
        return cls(order, bounds, starts[order] - bounds[:-1], first, bucket_bits, hops, permutation)

    def place(self, positions: Int64s) -> Int64s:
        """Index into ``order`` of the row group that holds each position: int64[n] -> int64[n]."""
        if self.hops > 2:  # row groups of very different sizes: a bucket says little
            return np.searchsorted(self.bounds, positions, side="right") - 1
        group = self.first.take(positions >> self.bucket_bits)
        for _ in range(self.hops):
            group += positions >= self.bounds[1:].take(group)
        return group

    def to_row_ids(self, positions: Int64s) -> None:
        """Puts, in place of each position, the global id of the row there: int64[n]."""
        for at in range(0, positions.size, _AT_ONCE):
            part = positions[at : at + _AT_ONCE]
            part += self.shift.take(self.place(part))


class LaneShare:
    """The rows of some lanes in one epoch: what one worker reads. Holds a few numbers for each row of one batch."""

    def __init__(self, plan: LanePlan, layout: EpochLayout, lanes: Sequence[int]) -> None:
        if len(set(lanes)) != len(lanes) or any(not 0 <= lane < plan.lanes for lane in lanes):
            raise ValueError(f"lanes {tuple(lanes)} of a plan with lanes 0 .. {plan.lanes - 1}")
        self._layout = layout
        self._lanes = np.array(lanes, dtype=np.int64)
        self._full_steps = plan.rows // plan.global_batch
        self._starts = plan.lane_starts
        batches, sizes = plan.lane_batches[self._lanes], plan.lane_sizes[self._lanes]
        # One column for each row of a full step: lane, rows a step of that lane, the row's number among them.
        columns = np.repeat(np.arange(self._lanes.size), batches)
        number = np.arange(columns.size) - np.repeat(np.cumsum(batches) - batches, batches)
        self._full = _Columns(layout.rows, self._lanes[columns], self._starts, batches[columns], number)
        # The last step of an epoch: the columns whose lane still has a row.
        left = number + self._full_steps * batches[columns] < sizes[columns]
        columns, number = columns[left], number[left]
        self._last = _Columns(layout.rows, self._lanes[columns], self._starts, batches[columns], number)

    def rows_in(self, offset: int, steps: int = 1) -> int:
        """Rows that these lanes give to ``steps`` global batches from ``offset`` on."""
        full = max(0, min(steps, self._full_steps - offset))
        return full * self._full.size + (self._last.size if offset <= self._full_steps < offset + steps else 0)

    def row_ids(self, offset: int, steps: int = 1, out: Int64s | None = None) -> Int64s:
        """Global row ids of ``steps`` global batches from ``offset`` on, step by step, lane by lane: int64[n].

        ``out``: int64[n] to put them into; then it is what is returned.
        """
        ids = np.empty(self.rows_in(offset, steps), dtype=np.int64) if out is None else out
        at = 0
        while at < ids.size:
            columns = self._full if offset < self._full_steps else self._last
            some = min((ids.size - at) // columns.size, max(1, self._full_steps - offset))
            some = min(some, max(1, 2 * _AT_ONCE // columns.size))
            end = at + some * columns.size
            columns.positions(offset, ids[at:end].reshape(some, columns.size))
            at, offset = end, offset + some
        self._layout.to_row_ids(ids)
        return ids

    def row_groups(self) -> Int64s:
        """Manifest numbers of the row groups that these lanes touch, each once, in the order of the lanes: int64[n]."""
        parts = [np.empty(0, dtype=np.int64)]
        for lane in self._lanes:
            ends = self._starts[lane : lane + 2] - np.array([0, 1])
            if ends[0] <= ends[1]:
                first, last = self._layout.place(ends)
                parts.append(self._layout.order[first : last + 1])
        groups = np.concatenate(parts)
        _, where = np.unique(groups, return_index=True)
        return groups[np.sort(where)]


class _Columns:
    """The rows of one step, a column for each, and how to compute their positions in any step."""

    __slots__ = ("_batches", "_number", "_permutation", "_start", "size")

    def __init__(
        self, permutation: KeyedPermutations | None, lanes: Int64s, starts: Int64s, batches: Int64s, number: Int64s
    ) -> None:
        self.size = int(lanes.size)
        self._permutation = permutation.take(lanes) if permutation is not None else None
        self._start = starts[lanes]
        self._batches = batches.astype(np.uint32)
        self._number = number.astype(np.uint32)

    def positions(self, offset: int, out: Int64s) -> None:
        """Puts the positions of the rows of the steps from ``offset`` on into ``out``: int64[steps, size]."""
        steps = np.arange(offset, offset + len(out), dtype=np.uint32)
        index = steps[:, None] * self._batches + self._number
        if self._permutation is not None:
            index = self._permutation(index)
        np.add(index, self._start, out=out)


def choose_lanes(max_world: int, global_batch: int, rows: int) -> int:
    """Lanes for a job whose world never grows past ``max_world`` workers.

    ``LANES_PER_WORKER`` times the largest world, where each lane still gets a row in each step; else the largest
    multiple of it that does; else as many as there are rows in a step.
    """
    if max_world < 1:
        raise ConfigError(f"max_world={max_world}: must be at least 1")
    most = min(global_batch, rows)
    if most < max_world:
        return max(1, most)
    return max_world * min(LANES_PER_WORKER, most // max_world)


def assign_lanes(
    lanes: int,
    workers: Sequence[str],
    previous: Mapping[str, Sequence[int]],
    weights: Mapping[str, float] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Who owns which lanes: every lane once, by weight, with least movement.

    Each worker gets its share ``lanes * weight / sum(weights)`` rounded down or up. Who is rounded up: those who then
    still finish first (``(share + 1) / weight`` is smallest), among equals those who own more already. Nobody goes
    without while there are lanes for all, because how fast a worker is can be seen only at work. Within that, every
    worker keeps what it owns as far as its share goes. A worker without a weight counts as an average one.
    Deterministic: depends on the order of ``workers``, not on that of the mappings. Linear in lanes.

    Raises ConfigError for no or repeated workers, and for a weight that is not a positive number.
    """
    if not workers or len(set(workers)) != len(workers):
        raise ConfigError(f"lanes need workers, each named once: {list(workers)}")
    owned = _still_owned(lanes, workers, previous)
    share = _shares(lanes, workers, {worker: len(owned[worker]) for worker in workers}, weights or {})
    kept = {worker: owned[worker][: share[worker]] for worker in workers}
    taken = {lane for part in kept.values() for lane in part}
    free = iter([lane for lane in range(lanes) if lane not in taken])
    return {
        worker: tuple(sorted([*kept[worker], *(next(free) for _ in range(share[worker] - len(kept[worker])))]))
        for worker in workers
    }


def _still_owned(lanes: int, workers: Sequence[str], previous: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """What each worker owned before, lowest lane first; a lane that two claim stays with the first of them."""
    claimed: set[int] = set()
    owned: dict[str, list[int]] = {}
    for worker in workers:
        mine = sorted({lane for lane in previous.get(worker, ()) if 0 <= lane < lanes} - claimed)
        claimed.update(mine)
        owned[worker] = mine
    return owned


def _shares(
    lanes: int, workers: Sequence[str], owned: Mapping[str, int], weights: Mapping[str, float]
) -> dict[str, int]:
    """Lanes for each worker, see `assign_lanes`. Exact: in fractions, so that no sum of floats decides."""
    known = {worker: weights[worker] for worker in workers if worker in weights}
    for worker, weight in known.items():
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"weight {weight} of worker {worker}: must be a positive number")
    exact = {worker: Fraction(weight) for worker, weight in known.items()}
    average = sum(exact.values(), Fraction(0)) / len(exact) if exact else Fraction(1)
    weight_of = {worker: exact.get(worker, average) for worker in workers}
    total = sum(weight_of.values(), Fraction(0))
    share = {worker: int(lanes * weight_of[worker] / total) for worker in workers}
    left = lanes - sum(share.values())
    finish = {worker: (share[worker] + 1) / weight_of[worker] for worker in workers}
    for worker in sorted(workers, key=lambda worker: (finish[worker], owned[worker] <= share[worker]))[:left]:
        share[worker] += 1
    for worker in [worker for worker in workers if not share[worker]] if lanes >= len(workers) else ():
        most = max(workers, key=lambda other: share[other] / weight_of[other] if share[other] > 1 else 0)
        share[most] -= 1
        share[worker] = 1
    return share
