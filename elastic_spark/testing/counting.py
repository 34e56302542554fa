"""The counting model: a training function whose weights tell how often each row was trained.

The model is one float32 vector ``w[N]``, zero at the start. The loss of a batch is ``-sum(w[id])`` over its rows,
gradients are summed over the workers, and the optimizer is SGD with learning rate 1 and no momentum. So every row that
really took part in a step adds exactly 1 to ``w[id]``, and whatever is rolled back is un-counted with the weights.
After E epochs ``w == E`` everywhere: less means lost, more means trained twice, whatever happened in between.

With a fixed global batch the vector after step s is the same for any number of workers and any churn. So all ranks must
agree on its hash at each step, and a step that is done again after a fault must give the same hash again (G6).

>>> result = es.run(train_counting, kwargs={"rows": 300, "epochs": 2}, data={"train": counting_data(spark, 300)}, ...)
>>> assert_exact(result[0]["w"], epochs=2)
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LINE = re.compile(r"step=(\d+) rank=(\d+) size=(\d+) pid=(\d+) rows=(\d+) weight=(\S+) hash=(\w+)\n")


@dataclass(frozen=True)
class Step:
    """What one rank noted at the end of a step. ``hash`` is that of the weights, ``rows`` its share of the batch."""

    step: int
    rank: int
    size: int
    pid: int
    rows: int
    weight: float
    hash: str

    def to_line(self) -> str:
        return (
            f"step={self.step} rank={self.rank} size={self.size} pid={self.pid} "
            f"rows={self.rows} weight={self.weight!r} hash={self.hash}\n"
        )

    @classmethod
    def from_line(cls, line: str) -> Step | None:
        """None for a line that a kill cut off."""
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        step, rank, size, pid, rows = (int(group) for group in match.groups()[:5])
        return cls(step, rank, size, pid, rows, float(match[6]), match[7])


def counting_data(spark: SparkSession, rows: int, partitions: int = 4) -> DataFrame:
    """Rows with one column ``id`` = 0 .. rows-1 (int64), in ``partitions`` partitions."""
    return spark.range(0, rows, 1, partitions)


def train_counting(
    ctx: Any,
    rows: int,
    epochs: int = 1,
    step_s: float | Callable[[Any], float] = 0.0,
    log_dir: str | None = None,
    on_step: Callable[[Any], None] | None = None,
    dataset: str = "train",
) -> dict[str, Any]:
    """The counting model as a training function for ``es.run``.

    Args:
        ctx: given by ``es.run``.
        rows: N, the rows of the data set; its column ``id`` counts them from 0.
        epochs: E.
        step_s: seconds to sleep in each step, or a function of the batch that says how many.
        log_dir: directory in which each process appends a line for each step it ends (`read_steps`), to time a fault
            by and to check afterwards.
        on_step: called with the state after each commit; may raise or end the process.
        dataset: name under which ``es.run`` was given the data.

    Returns:
        ``w`` (float32[N]), ``steps``, ``rank``, ``size`` and ``pid`` as they were at the end.
    """
    import horovod.torch as hvd
    import torch

    import elastic_spark as es

    torch.set_num_threads(1)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(rows))})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters(), op=hvd.Sum
    )
    state = es.ElasticState(model=model, optimizer=optimizer)

    def loop(state: Any) -> dict[str, Any]:
        for batch in ctx.batches(dataset, state, epochs=epochs):
            optimizer.zero_grad()
            loss = -model["w"][batch["id"][: batch.rows]].sum()
            loss.backward()
            optimizer.step()
            time.sleep(step_s(batch) if callable(step_s) else step_s)
            state.commit(loss=loss.item())
            if log_dir is not None:
                digest = hashlib.sha1(model["w"].detach().numpy().tobytes()).hexdigest()
                _note(log_dir, Step(state.step, hvd.rank(), hvd.size(), os.getpid(), batch.rows, batch.weight, digest))
            if on_step is not None:
                on_step(state)
        return {
            "w": model["w"].detach().numpy().copy(),
            "steps": int(state.step),
            "rank": hvd.rank(),
            "size": hvd.size(),
            "pid": os.getpid(),
        }

    result: dict[str, Any] = hvd.elastic.run(loop)(state)
    return result


def assert_exact(w: Sequence[float] | np.ndarray[Any, Any], epochs: int = 1) -> None:
    """AssertionError that names the rows that were lost and those that were trained too often."""
    counts = np.asarray(w)
    lost, repeated = np.flatnonzero(counts < epochs), np.flatnonzero(counts > epochs)
    broken = np.flatnonzero(~np.isfinite(counts) | (counts != np.round(counts)))
    if lost.size or repeated.size or broken.size:
        raise AssertionError(
            f"of {counts.size} rows, each due {epochs} times: "
            f"{_told('lost', lost, counts)}; {_told('repeated', repeated, counts)}; "
            f"{_told('not a count', broken, counts)}"
        )


def read_steps(log_dir: str | Path) -> list[Step]:
    """The lines of all processes so far, in order of step and rank."""
    steps = []
    for path in Path(log_dir).glob("*.steps"):
        with path.open(encoding="ascii") as lines:
            steps += [step for line in lines if (step := Step.from_line(line)) is not None]
    return sorted(steps, key=lambda step: (step.step, step.rank))


def assert_agree(steps: Iterable[Step]) -> None:
    """AssertionError where two lines of one step disagree about the weights, by rank or by repetition."""
    by_step: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        by_step[step.step].append(step)
    for number, lines in sorted(by_step.items()):
        if len({line.hash for line in lines}) > 1:
            told = ", ".join(f"rank {s.rank} of {s.size} (pid {s.pid}): {s.hash[:12]}" for s in lines)
            raise AssertionError(f"step {number}: different weights: {told}")


def _note(log_dir: str, step: Step) -> None:
    with open(os.path.join(log_dir, f"{step.pid}.steps"), "a", encoding="ascii") as log:
        log.write(step.to_line())


def _told(what: str, ids: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> str:
    shown = ", ".join(f"{i} ({counts[i]:g} times)" for i in ids[:10])
    return f"{ids.size} {what}" + (f": ids {shown}{' ...' if ids.size > 10 else ''}" if ids.size else "")
