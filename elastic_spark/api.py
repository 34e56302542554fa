"""`run`: train a function on Spark executors that come and go."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from elastic_spark import closure
from elastic_spark.conduct import Run
from elastic_spark.config import JobConfig
from elastic_spark.outlet import Outlet

LARGE_CLOSURE = 64 << 20


@dataclass(frozen=True)
class Result(Sequence[Any]):
    """What the function returned, by rank of the last world, and the story of the job.

    Attributes:
        run_id: of the MLflow run; empty where tracking is off.
        events_path: the event log, from which everything in ``summary`` can be recomputed.
        summary: figures; see `elastic_spark.core.metrics`.
    """

    values: list[Any]
    run_id: str
    events_path: str
    summary: dict[str, Any] = field(repr=False)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int | None = None,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    *,
    data: Mapping[str, Any] | None = None,
    config: str | Path | None = None,
    **options: Any,
) -> Result:
    """Run ``fn`` as an elastic Horovod job on the executors of the active Spark session.

    The first arguments are those of ``horovod.spark.run_elastic``; a function written for it runs unchanged.

    Args:
        fn: runs on every worker; called as ``fn(ctx, *args, **kwargs)`` where its first parameter is named ``ctx``,
            else as ``fn(*args, **kwargs)``.
        stdout, stderr: streams for the workers' output; default: shown on stderr when ``verbose`` is 2. The last lines
            of a worker that is lost are in the event log in any case. A stream that breaks, or takes nothing for a
            while, misses lines; the job goes on.
        data: data sets by name: a Spark DataFrame, the path or URI of Parquet files, or what `freeze` made of either.
        config: YAML file with options.
        options: any further field of `elastic_spark.JobConfig`.

    Returns:
        The values by rank with ``run_id``, ``events_path`` and ``summary``.

    Raises:
        ConfigError, EnvironmentUnfit, DataError: before any worker starts; also ResumeRefused, where the checkpoint to
            go on from was made with other data, another seed, global batch or lanes.
        CheckpointInvalid: what ``resume`` names is not there or does not verify.
        UserCodeFailed: ``fn`` raised; the message holds the worker's traceback.
        NotEnoughWorkers, ResetLimitReached, GuardStopped, JobHeld, JobCancelled, StateDiverged: see
            `elastic_spark.errors`.
        KeyboardInterrupt: Ctrl-C; the job has been ended and its run is KILLED.
    """
    settings = JobConfig.resolve(
        config,
        num_proc=num_proc,
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        start_timeout=start_timeout,
        elastic_timeout=elastic_timeout,
        reset_limit=reset_limit,
        env=dict(env) if env is not None else None,
        verbose=verbose,
        nics=nics,
        **options,
    )
    from elastic_spark.driver import spark

    context = spark.active_session().sparkContext
    spark.use_this_python(context)
    settings = settings.with_workers(spark.offered_slots(context))
    payload = closure.pack(fn, args, kwargs or {})
    if len(payload) > LARGE_CLOSURE:
        size = len(payload) >> 20
        print(
            f"elastic_spark: the training function carries {size} MB along; give data by data={{...}}", file=sys.stderr
        )
    terminal = Outlet(sys.stderr)
    stream = stdout or stderr or (sys.stderr if settings.verbose >= 2 else None)
    output = terminal if stream is sys.stderr else Outlet(stream)
    lines = _Output(output, prefix_output_with_timestamp).lines
    job = Run(settings, context, payload, data or {}, lines, terminal)
    with contextlib.closing(terminal), contextlib.closing(output), job.reserved():
        return Result(*job.train())


class _Output:
    """The workers' output, each line with its worker's name."""

    def __init__(self, outlet: Outlet, timestamps: bool) -> None:
        self._outlet = outlet
        self._timestamps = timestamps

    def lines(self, worker: str, lines: tuple[str, ...]) -> None:
        stamp = time.strftime("%H:%M:%S ") if self._timestamps else ""
        for line in lines:
            self._outlet.write(f"{stamp}[{worker}] {line}\n")
