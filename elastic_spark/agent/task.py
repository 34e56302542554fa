"""The Spark task around the agent: the one place on executors that imports pyspark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pyspark import TaskContext

from elastic_spark.agent.main import Launch, run_agent


class SlotTask:
    """The function of a slot's single-task Spark job."""

    def __init__(self, launch: Launch, slot: int) -> None:
        self._launch, self._slot = launch, slot

    def __call__(self, _rows: Iterable[int]) -> Iterator[str]:
        context = TaskContext.get()
        attempt = context.attemptNumber() if context is not None else 0
        resources = context.resources() if context is not None else {}
        return run_agent(self._launch, self._slot, attempt, {name: list(r.addresses) for name, r in resources.items()})
