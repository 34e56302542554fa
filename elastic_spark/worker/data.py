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

import contextlib
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
from elastic_spark.core.order import Int64s
from elastic_spark.errors import DataError
from elastic_spark.worker.rows import RowStore, record_type

#: Bytes and rows gathered at a time: enough to make the cost of a call small, few enough for the processor's cache.
BLOCK_BYTES, BLOCK_ROWS = 4 << 20, 32_768

#: Threads that make blocks.
THREADS = 2


Bytes = npt.NDArray[np.uint8]
#: The same records as items of different types: dtype -> [n, record bytes / item bytes].
Views = dict[torch.dtype, torch.Tensor]


class BatchLayout:
    """Where in a record each column lies, as torch sees it: as items of the column's own type."""

    def __init__(self, manifest: Manifest) -> None:
        records = record_type(manifest.columns)
        self.record_bytes = records.itemsize
        offsets = {name: int(field[1]) for name, field in (records.fields or {}).items()}
        #: Column -> dtype, items from one record to the next, first item, width.
        self.columns: dict[str, tuple[torch.dtype, int, int, int]] = {}
        for column in manifest.columns:
            kind: torch.dtype = getattr(torch, column.dtype)
            size = kind.itemsize
            self.columns[column.name] = (kind, records.itemsize // size, offsets[column.name] // size, column.width)
        self._kinds = {torch.uint8, *(kind for kind, *_ in self.columns.values())}

    def views(self, records: torch.Tensor) -> Views:
        """uint8[n, record bytes], contiguous, seen as items of each type that a column has."""
        return {kind: records.view(kind) for kind in self._kinds}


class Batch(Mapping[str, torch.Tensor]):
    """A worker's rows of one global batch: a tensor for each column, [n] for scalars, [n, width] for lists.

    The tensors are views of the same rows: strided, not contiguous; ``.contiguous()`` copies one. They are the batch's
    own and may be changed.

    Attributes:
        weight: world size * rows / global_rows. The mean loss over the batch times this, averaged over the workers, is
            the mean loss of the global batch; so are the gradients.
        rows: rows of this worker. Where it has none the tensors hold one row of the data all the same, so that means
            are finite, and ``weight`` is 0.
        global_rows: rows of the global batch.
        epoch, offset: which global batch, both from 0.
    """

    def __init__(
        self,
        views: Views,
        at: int,
        row_ids: Int64s,
        layout: BatchLayout,
        place: tuple[int, int],
        world: tuple[int, int],
    ) -> None:
        """Made by `LaneReader`: the records from number ``at`` on in ``views``."""
        self._views, self._at = views, at
        self._layout = layout
        self._row_ids = row_ids
        self._place, self._world = place, world
        self.epoch, self.offset = place
        self.rows = int(row_ids.size)
        size, self.global_rows = world
        self.weight = size * self.rows / self.global_rows

    @property
    def row_ids(self) -> torch.Tensor:
        """Global ids of the rows, in order: int64[rows]; empty where the worker has none."""
        return torch.from_numpy(self._row_ids)

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            kind, stride, first, width = self._layout.columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; there are {list(self)}") from None
        rows, first = self.rows or 1, self._at * stride + first
        if width:
            return self._views[kind].as_strided((rows, width), (stride, 1), first)
        return self._views[kind].as_strided((rows,), (stride,), first)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.columns)

    def __len__(self) -> int:
        return len(self._layout.columns)

    def __repr__(self) -> str:
        return f"Batch(epoch={self.epoch}, offset={self.offset}, rows={self.rows} of {self.global_rows}, {list(self)})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on another device, moved as one piece."""
        records = self._views[torch.uint8][self._at : self._at + (self.rows or 1)]
        moved = self._layout.views(records.to(device, non_blocking=non_blocking, copy=True))
        return Batch(moved, 0, self._row_ids, self._layout, self._place, self._world)


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
        self._store = RowStore(manifest, cache_dir, cache_bytes)
        self._iterating: weakref.ref[Generator[Batch, None, None]] | None = None
        self._fillers: list[threading.Thread] = []
        self._close = weakref.finalize(self, _end, self._store, self._fillers)

    def batches(self, epoch: int, offset: int = 0) -> Iterator[Batch]:
        """This worker's share of every global batch of ``epoch``, from the one at ``offset`` to the last.

        On every worker there are as many. An iterator that was begun before ends.
        """
        self._end_iteration()
        if not self._close.alive:
            raise DataError(f"the reader of data set {self._manifest.name!r} is closed")
        iterating = self._iterate(epoch, offset)
        self._iterating = weakref.ref(iterating)
        return iterating

    def close(self) -> None:
        """Ends the threads and lets go of the cache. Iterators end. Batches stay valid."""
        self._close()
        self._end_iteration()

    def _end_iteration(self) -> None:
        iterating = self._iterating() if self._iterating is not None else None
        if iterating is not None:
            with contextlib.suppress(ValueError):  # it is running, in another thread: it ends at its next batch
                iterating.close()

    def _iterate(self, epoch: int, offset: int) -> Generator[Batch, None, None]:
        share = self._plan.share(epoch, self._lanes)
        place = range(offset, self._plan.steps_per_epoch)
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="elastic-spark-reader")
        try:
            if place and self._bring(share, threads):
                spare = self._spare_row(share) if share.rows_in(place[-1]) == 0 else None
                for step, views, at, ids in self._blocks(share, place, threads):
                    if not self._close.alive:
                        return
                    if spare is not None and not ids.size:
                        views, at = self._layout.views(spare.clone()), 0
                    world = (self._world_size, self._plan.rows_in_step(step))
                    yield Batch(views, at, ids, self._layout, (epoch, step), world)
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def _bring(self, share: LaneShare, threads: ThreadPoolExecutor) -> bool:
        """Loads the row groups of ``share``. False where the reader was closed meanwhile."""
        groups = share.row_groups().tolist()
        self._store.make_room(groups)
        for loading in [threads.submit(self._store.load, group) for group in self._store.missing(groups)]:
            loading.result()
        if self._store.shared and not self._fillers and self._close.alive:
            filler = threading.Thread(target=self._store.fill, name="elastic-spark-fill", daemon=True)
            self._fillers.append(filler)
            filler.start()
        return self._close.alive

    def _blocks(
        self, share: LaneShare, place: range, threads: ThreadPoolExecutor
    ) -> Iterator[tuple[int, Views, int, Int64s]]:
        """Of every step in ``place``: step, records, which is its first, row ids. Made in blocks, some blocks ahead."""
        rows = max(1, share.rows_in(place.start))
        steps = max(1, min(BLOCK_BYTES // (rows * self._layout.record_bytes), BLOCK_ROWS // rows))
        ahead = THREADS + -(-self._prefetch // steps)
        memory = _Memory(rows * steps, self._layout.record_bytes, keep=ahead + 2, pinned=self._pin_memory)
        starts = iter(place[::steps])
        blocks: deque[tuple[int, Future[tuple[Views, Int64s]]]] = deque()
        while True:
            for start in itertools.islice(starts, ahead - len(blocks)):
                count = min(steps, place.stop - start)
                blocks.append((start, threads.submit(self._gather, memory, share, start, count)))
            if not blocks:
                return
            start, block = blocks.popleft()
            views, ids = block.result()
            at = 0
            for step in range(start, min(start + steps, place.stop)):
                end = at + share.rows_in(step)
                yield step, views, at, ids[at:end]
                at = end

    def _gather(self, memory: _Memory, share: LaneShare, offset: int, steps: int) -> tuple[Views, Int64s]:
        """Records and ids of the rows of some steps: of n records, int64[n]."""
        rows = share.rows_in(offset, steps)
        records, ids = memory.take(rows)
        share.row_ids(offset, steps, out=ids)
        np.take(self._store.records, ids, axis=0, out=records, mode="clip")
        return self._layout.views(torch.from_numpy(records)), ids

    def _spare_row(self, share: LaneShare) -> torch.Tensor:
        """Some row of the data, for steps in which this worker has none: uint8[1, record bytes]."""
        rows = self._manifest.group_rows
        groups = share.row_groups().tolist() or [min((n, group) for group, n in enumerate(rows) if n)[1]]
        self._store.load(groups[0])
        first = sum(rows[: groups[0]])
        return torch.from_numpy(self._store.records[first : first + 1].copy())


class _Memory:
    """Memory for blocks of up to ``rows`` rows, used again once no batch, tensor or array shows it any more.

    Fresh memory for each block would cost a page fault for every 4 KiB, which is as much as the gather. Page-locked
    memory is torch's to reuse: only torch knows when a copy to the device is done with it.
    """

    def __init__(self, rows: int, record_bytes: int, keep: int, pinned: bool) -> None:
        self._rows, self._record_bytes, self._keep, self._pinned = rows, record_bytes, keep, pinned
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
            pair = np.empty((self._rows, self._record_bytes), dtype=np.uint8), np.empty(self._rows, dtype=np.int64)
            if len(self._kept) < self._keep:
                self._kept.append(pair)
            return pair[0][:rows], pair[1][:rows]


_UNUSED = 3


def _end(store: RowStore, fillers: list[threading.Thread]) -> None:
    store.close()
    for filler in fillers:
        if filler is not threading.current_thread():
            filler.join()
