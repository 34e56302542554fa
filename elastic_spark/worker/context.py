"""What a training function is given as ``ctx``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elastic_spark.core.lanes import LanePlan
from elastic_spark.core.manifest import Manifest
from elastic_spark.errors import DataError
from elastic_spark.worker.session import WorkerSession

if TYPE_CHECKING:
    from elastic_spark.worker.data import Batch
    from elastic_spark.worker.rows import RowStore
    from elastic_spark.worker.state import ElasticState


class Context:
    """The job, as seen by one worker.

    Attributes:
        rank, size: this worker's place in the present world; they change with it.
        generation: the present world's number.
        seed: the job's seed.
    """

    def __init__(self, session: WorkerSession, datasets: Mapping[str, tuple[Manifest, LanePlan]]) -> None:
        self._session = session
        self._datasets = datasets
        self._ahead: list[RowStore] | None = []

    def read_ahead(self) -> None:
        """While this worker waits for its first world: decode rows, in the background and at low priority, into the
        cache that it shares with others on its machine. Ends where the first batches are asked for."""
        if self._session.config.get("cache_dir"):
            threading.Thread(target=self._read_ahead, name="elastic-spark-ahead", daemon=True).start()

    def _read_ahead(self) -> None:
        from elastic_spark.worker.rows import RowStore

        for manifest, _ in self._datasets.values():
            with contextlib.suppress(DataError):  # it will be named when the rows are needed
                store = RowStore(manifest, self._session.config["cache_dir"])
                ahead = self._ahead
                if ahead is None:
                    return
                ahead.append(store)
                if store.shared:
                    store.fill()
                store.close()

    @property
    def rank(self) -> int:
        return self._session.assignment().rank

    @property
    def size(self) -> int:
        return self._session.assignment().size

    @property
    def generation(self) -> int:
        return self._session.assignment().generation

    @property
    def seed(self) -> int:
        return int(self._session.config["seed"])

    def rows(self, name: str) -> int:
        """Number of rows of a data set."""
        return self._dataset(name)[0].rows

    def manifest(self, name: str) -> Manifest:
        """The frozen description of a data set: columns, vocabularies, row groups."""
        return self._dataset(name)[0]

    def steps_per_epoch(self, name: str) -> int:
        """Number of global batches in an epoch."""
        return self._dataset(name)[1].steps_per_epoch

    def batches(self, name: str, state: ElasticState | None = None, *, epochs: int = 1) -> Iterator[Batch]:
        """This worker's share of each global batch, in the job's order, on every rank equally often.

        With ``state`` the loop goes on where the state's last commit left off, up to ``epochs`` in all, and each commit
        counts the batches drawn since the one before as consumed. Without, it is one plain pass (validation): nothing
        is remembered, and a change of the world inside of it starts it again.

        Args:
            name: one of the names in ``es.run(data={...})``.
            epochs: how many passes over the data.

        Yields:
            Batches of tensors by column, each with this worker's rows. A worker without rows in a step gets two rows
            with ``weight`` 0, so that it takes part in the collectives and changes nothing.
        """
        from elastic_spark.worker.data import LaneReader

        manifest, plan = self._dataset(name)
        place = self._session.assignment()
        ahead, self._ahead = self._ahead, None
        for store in ahead or ():
            store.stop()
        reader = LaneReader(
            manifest, plan, place.body["lanes"][name], place.size, cache_dir=self._session.config.get("cache_dir")
        )
        try:
            epoch, offset = state.cursor(name) if state is not None else (0, 0)
            if state is not None:
                state.begins(name)
            while epoch < epochs:
                batches = reader.batches(epoch, offset)
                if state is not None:
                    batches = _counted(batches, name, state)
                yield from batches
                epoch, offset = epoch + 1, 0
        finally:
            reader.close()

    def _dataset(self, name: str) -> tuple[Manifest, LanePlan]:
        if name not in self._datasets:
            known: Any = sorted(self._datasets) or "none: give es.run(data={...})"
            raise DataError(f"no data set {name!r}; known are {known}")
        return self._datasets[name]


def _counted(batches: Iterator[Batch], name: str, state: ElasticState) -> Iterator[Batch]:
    """The batches; ``state`` is told when the loop waits for one, and of each that it gets."""
    thread = threading.get_ident()
    state.draws()
    try:
        for batch in batches:
            state.drew(name, batch)
            yield batch
            state.draws()
    finally:
        if threading.get_ident() == thread:  # not where another one collects what a failed loop has left behind
            state.draws_no_more()
