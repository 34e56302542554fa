"""From lanes to tensors: one worker's share of each global batch.

Rows come from a `RowStore`: all columns of a row lie together, so that a batch is one gather, whatever its columns, and
its tensors are views of what was gathered. Batches are made in blocks of a few thousand rows, by two threads, ahead of
the consumer; computing row ids and gathering both release the GIL. Nothing that lies ready counts as consumed: the
cursor is the consumer's, and a reader is told where to begin.

Before the first batch of an epoch the row groups of all owned lanes must be here, because rows are shuffled over the
whole lane. Where the cache is shared, a thread of low priority then brings the rest of the data set, so that a later
epoch, or lanes of a lost worker, are here already.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from elastic_spark.core.lanes import LanePlan, LaneShare
from elastic_spark.core.manifest import Manifest
from elastic_spark.core.order import Int64s, row_hash
from elastic_spark.errors import DataError
from elastic_spark.worker import stalls
from elastic_spark.worker.rows import RowStore, record_type

#: Bytes and rows gathered at a time: enough to make the cost of a call small. Temporary arrays of so many numbers of
#: four bytes stay below 128 KiB, from where on malloc asks the kernel for fresh pages each time.
BLOCK_BYTES, BLOCK_ROWS = 4 << 20, 30_000

#: Threads that make blocks.
THREADS = 2

#: Rows of a batch without rows: batch norm in training refuses a single one.
SPARE_ROWS = 2


Bytes = npt.NDArray[np.uint8]


class BatchLayout:
    """Where in a record each column lies, as torch sees it: as items of the column's own type."""

    def __init__(self, manifest: Manifest) -> None:
        records = record_type(manifest.columns)
        self.record_bytes = records.itemsize
        offsets = {name: int(field[1]) for name, field in (records.fields or {}).items()}
        #: Column -> dtype, first item, width.
        self.columns: dict[str, tuple[torch.dtype, int, int]] = {}
        for column in manifest.columns:
            kind: torch.dtype = getattr(torch, column.dtype)
            self.columns[column.name] = (kind, offsets[column.name] // kind.itemsize, column.width)


class Block:
    """Rows of successive steps, ``rows`` for each, the last one maybe fewer: uint8[n, record bytes] and their ids.

    Its columns are cut into tensors when the first batch asks, all steps in one call: a call for each batch costs more
    than the gather of its rows.
    """

    __slots__ = ("_columns", "ids", "layout", "records", "rows")

    def __init__(self, records: torch.Tensor, ids: Int64s, rows: int, layout: BatchLayout) -> None:
        self.records, self.ids, self.rows, self.layout = records, ids, rows, layout
        self._columns: dict[str, Sequence[torch.Tensor]] = {}

    def column(self, name: str) -> Sequence[torch.Tensor]:
        """A column, as one tensor for each step. Raises KeyError that lists the columns there are."""
        parts = self._columns.get(name)
        if parts is None:
            if name not in self.layout.columns:
                raise KeyError(f"no column {name!r}; there are {list(self.layout.columns)}")
            kind, first, width = self.layout.columns[name]
            items = self.records.view(kind)
            items = items[:, first : first + width] if width else items[:, first]
            # "unsafe" is that autograd does not know of the common memory: a batch may be changed in place.
            parts = self._columns[name] = torch.unsafe_split(items, self.rows)
        return parts


class Batch(Mapping[str, torch.Tensor]):
    """A worker's rows of one global batch: a tensor for each column, [n] for scalars, [n, width] for lists.

    The tensors are views of the same rows: strided, not contiguous; ``.contiguous()`` copies one. They are the batch's
    own and may be changed.

    Attributes:
        weight: world size * rows / global_rows. The mean loss over the batch times this, averaged over the workers, is
            the mean loss of the global batch; so are the gradients.
        rows: rows of this worker. Where it has none the tensors hold two rows of the data all the same, so that means
            are finite and batch norm can be computed, and ``weight`` is 0.
        global_rows: rows of the global batch.
        epoch, offset: which global batch, both from 0.
    """

    __slots__ = ("_block", "_number", "_world_size", "epoch", "global_rows", "offset", "rows")

    def __init__(
        self, block: Block, number: int, rows: int, epoch: int, offset: int, world_size: int, global_rows: int
    ) -> None:
        """Made by `LaneReader`: step ``number`` of a block; ``rows`` is 0 where the row in it is nobody's."""
        self._block, self._number, self._world_size = block, number, world_size
        self.epoch, self.offset, self.global_rows, self.rows = epoch, offset, global_rows, rows

    @property
    def weight(self) -> float:
        """What the mean loss over the batch is to be multiplied with, see above."""
        return self._world_size * self.rows / self.global_rows

    @property
    def row_ids(self) -> torch.Tensor:
        """Global ids of the rows, in order: int64[rows]; empty where the worker has none."""
        first = self._number * self._block.rows
        return torch.from_numpy(self._block.ids[first : first + self.rows])

    @property
    def row_hash(self) -> int:
        """Hash of the row ids. Over all workers they add up, modulo 2^64, to `LanePlan.row_hash` of this batch."""
        first = self._number * self._block.rows
        return row_hash(self._block.ids[first : first + self.rows])

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._block.column(name)[self._number]

    def __iter__(self) -> Iterator[str]:
        return iter(self._block.layout.columns)

    def __len__(self) -> int:
        return len(self._block.layout.columns)

    def __repr__(self) -> str:
        return f"Batch(epoch={self.epoch}, offset={self.offset}, rows={self.rows} of {self.global_rows}, {list(self)})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on another device, moved as one piece."""
        block, rows = self._block, self.rows or SPARE_ROWS
        part = slice(self._number * block.rows, self._number * block.rows + rows)
        records = block.records[part].to(device, non_blocking=non_blocking, copy=True)
        moved = Block(records, block.ids[part], rows, block.layout)
        return Batch(moved, 0, self.rows, self.epoch, self.offset, self._world_size, self.global_rows)


class LaneReader:
    """Reads the rows of some lanes, from any batch of any epoch on.

    Args:
        manifest: the data set. Its files are read when their rows are first needed.
        plan: its order; made from the same manifest.
        lanes: the lanes that this worker owns, in the order in which their rows are put together. None is possible.
        world_size: number of workers, for `Batch.weight`.
        cache_dir: a directory on a local disk, shared by the workers of a machine; None keeps rows in memory.
        prefetch: at least this many batches are made ahead of the consumer.
        cache_bytes: how much the directory may hold; by default four fifths of the free space.
        pin_memory: make batches in page-locked memory, for faster copies to a GPU.

    Raises DataError, here or from the iterator: a plan of other data, a cache directory that cannot be used, row groups
    that cannot be read (file and number are named) or do not hold what the manifest says.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: LanePlan,
        lanes: Sequence[int],
        world_size: int,
        *,
        cache_dir: str | None = None,
        prefetch: int = 4,
        cache_bytes: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        if plan.groups != manifest.group_rows:
            raise DataError(f"the plan is of other data than data set {manifest.name!r}")
        self._manifest, self._plan, self._lanes, self._world_size = manifest, plan, tuple(lanes), world_size
        self._prefetch, self._pin_memory = prefetch, pin_memory
        self._layout = BatchLayout(manifest)
        self._store = RowStore.take(manifest, cache_dir, cache_bytes)
        self._iterating: weakref.ref[Generator[Batch, None, None]] | None = None
        self._memory: _Memory | None = None
        self._fillers: list[threading.Thread] = []
        self._close = weakref.finalize(self, _end, self._store, self._fillers)

    def batches(self, epoch: int, offset: int = 0) -> Iterator[Batch]:
        """This worker's share of every global batch of ``epoch``, from the one at ``offset`` to the last.

        On every worker there are as many. An iterator that was begun before ends.
        """
        self._end_iteration()
        if self._store.stopped:
            raise DataError(f"the reader of data set {self._manifest.name!r} is closed")
        iterating = self._iterate(epoch, offset)
        self._iterating = weakref.ref(iterating)
        return iterating

    def close(self) -> None:
        """Ends the threads and lets go of the cache. Iterators end. Batches stay valid."""
        if not self._close.alive:
            return
        self._store.stop()
        if self._end_iteration() and not self._store.shared:
            self._close.detach()
            self._store.put_by()
        self._close()

    def _end_iteration(self) -> bool:
        """False where it cannot be ended from here, because another thread runs it: it ends at its next block."""
        iterating = self._iterating() if self._iterating is not None else None
        try:
            if iterating is not None:
                iterating.close()
        except ValueError:
            return False
        return True

    def _iterate(self, epoch: int, offset: int) -> Generator[Batch, None, None]:
        share, plan = self._plan.share(epoch, self._lanes), self._plan
        place = range(offset, plan.steps_per_epoch)
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="elastic-spark-reader")
        try:
            if not place or not self._bring(share, threads):
                return
            rows = share.rows_in(offset)
            spare = self._spare_rows(share) if share.rows_in(place[-1]) == 0 else None
            for steps, block in self._blocks(share, place, threads):
                if self._store.stopped:
                    return
                for number, step in enumerate(steps):
                    if step == place[-1]:
                        rows = share.rows_in(step)
                    where = epoch, step, self._world_size, plan.rows_in_step(step)
                    if rows or spare is None:
                        yield Batch(block, number, rows, *where)
                    else:
                        yield Batch(Block(spare.clone(), _NO_IDS, SPARE_ROWS, self._layout), 0, 0, *where)
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def _bring(self, share: LaneShare, threads: ThreadPoolExecutor) -> bool:
        """Loads the row groups of ``share``. False where the reader was closed meanwhile."""
        groups = share.row_groups().tolist()
        self._store.make_room(groups)
        for loading in [threads.submit(self._store.load, group) for group in self._store.missing(groups)]:
            with stalls.waiting_for("the data"):
                loading.result()
        if self._store.shared and not self._fillers and not self._store.stopped:
            filler = threading.Thread(target=self._store.fill, name="elastic-spark-fill", daemon=True)
            self._fillers.append(filler)
            filler.start()
        return not self._store.stopped

    def _blocks(self, share: LaneShare, place: range, threads: ThreadPoolExecutor) -> Iterator[tuple[range, Block]]:
        """Blocks of the steps in ``place``, in order. Some are made ahead."""
        rows = max(1, share.rows_in(place.start))
        steps = max(1, min(BLOCK_BYTES // (rows * self._layout.record_bytes), BLOCK_ROWS // rows))
        ahead = THREADS + -(-self._prefetch // steps)
        if self._memory is None or self._memory.rows < rows * steps:
            keep = ahead + 2
            self._memory = _Memory(rows * steps, self._layout.record_bytes, keep=keep, pinned=self._pin_memory)
        parts = iter([place[i : i + steps] for i in range(0, len(place), steps)])
        blocks: deque[tuple[range, Future[Block]]] = deque()
        while True:
            for part in itertools.islice(parts, ahead - len(blocks)):
                blocks.append((part, threads.submit(self._gather, self._memory, share, part)))
            if not blocks:
                return
            part, block = blocks.popleft()
            with stalls.waiting_for("the data"):
                made = block.result()
            yield part, made

    def _gather(self, memory: _Memory, share: LaneShare, steps: range) -> Block:
        """The rows of some steps."""
        records, ids = memory.take(share.rows_in(steps.start, len(steps)))
        share.row_ids(steps.start, len(steps), out=ids)
        np.take(self._store.records, ids, axis=0, out=records, mode="clip")
        return Block(torch.from_numpy(records), ids, max(1, share.rows_in(steps.start)), self._layout)

    def _spare_rows(self, share: LaneShare) -> torch.Tensor:
        """Some rows of the data, for steps in which this worker has none: uint8[SPARE_ROWS, record bytes]."""
        rows = self._manifest.group_rows
        groups = share.row_groups().tolist() or [min((n, group) for group, n in enumerate(rows) if n)[1]]
        with stalls.waiting_for("the data"):
            self._store.load(groups[0])
        first, last = sum(rows[: groups[0]]), sum(rows[: groups[0] + 1]) - 1
        return torch.from_numpy(self._store.records[np.minimum(np.arange(first, first + SPARE_ROWS), last)])


class _Memory:
    """Memory for blocks of up to ``rows`` rows, used again once no batch, tensor or array shows it any more.

    Fresh memory for each block would cost a page fault for every 4 KiB, which is as much as the gather. Page-locked
    memory is torch's to reuse: only torch knows when a copy to the device is done with it.
    """

    def __init__(self, rows: int, record_bytes: int, keep: int, pinned: bool) -> None:
        self.rows = rows
        self._record_bytes, self._keep, self._pinned = record_bytes, keep, pinned
        self._kept: list[tuple[Bytes, Int64s]] = []
        self._lock = threading.Lock()

    def take(self, rows: int) -> tuple[Bytes, Int64s]:
        """uint8[rows, record bytes] and int64[rows] that nobody uses, of undefined content."""
        if self._pinned:
            locked = torch.empty((rows, self._record_bytes), dtype=torch.uint8, pin_memory=True)
            return locked.numpy(), np.empty(rows, dtype=np.int64)
        with self._lock:
            for records, ids in self._kept:
                # Referred to by the pair, by the loop's name, and by the call itself; else also by views.
                if sys.getrefcount(records) == _UNUSED and sys.getrefcount(ids) == _UNUSED:
                    return records[:rows], ids[:rows]
            pair = np.empty((self.rows, self._record_bytes), dtype=np.uint8), np.empty(self.rows, dtype=np.int64)
            if len(self._kept) < self._keep:
                self._kept.append(pair)
            return pair[0][:rows], pair[1][:rows]


_UNUSED = 3
_NO_IDS = np.empty(0, dtype=np.int64)


def _end(store: RowStore, fillers: list[threading.Thread]) -> None:
    store.close()
    for filler in fillers:
        if filler is not threading.current_thread():
            filler.join()
