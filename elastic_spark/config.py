"""`JobConfig`: everything that can be configured, once.

The same flat names serve ``es.run(...)`` keywords, a YAML file and the command line's flags. Precedence, lowest first:
the defaults here, a YAML file, keywords. `JobConfig.resolve` is the only way in, so an unknown option, a wrong type or
an impossible combination is a `ConfigError` that names both values, before anything starts.

Nothing here reads the environment: what a job does is what its resolved configuration says, and that is logged.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_spark import notices
from elastic_spark.core.guard import POLICIES
from elastic_spark.core.job import Options
from elastic_spark.errors import ConfigError

#: A worker must have missed some signs of life before its silence says anything.
SHORTEST_FROZEN_S = 1.0


@dataclass(frozen=True)
class JobConfig:
    """Options of a job; times in seconds.

    Workers, named as in ``horovod.spark.run_elastic``:
        num_proc: workers wanted; default: the slots that the cluster offers.
        min_num_proc: with fewer the job waits, and ends after ``elastic_timeout``; default 1.
        max_num_proc: never more; default ``num_proc``.
        spares: warm workers beyond ``max_num_proc``, promoted at once when one is lost.
        start_timeout, elastic_timeout: limits for the first world and for every later change.
        reset_limit: resets because of lost workers; None: no limit. Drains and joins do not count.
        user_error_retries: how many errors of the training function are survived by starting its worker anew; the same
            error at the same step is never tried again.
        frozen_after_s: silence after which a worker is lost, while others are heard.
        notices: what tells an executor that its machine will be taken away, asked there every 2 s: "aws", "azure",
            "gcp", or "package.module:function" without arguments, which returns the reason, or None. Its workers leave
            at the next commit, and Spark is told to use it no more. Spark's own decommissioning needs no such source.
        nics: network interfaces that Horovod may use; default: the one that reaches the driver.
        env: environment variables for the workers. Nothing of the driver's environment is passed besides.

    Data:
        global_batch: rows of a step over all workers, whatever their number.
        lanes: data partitions; fixed for the job; default: a multiple of the largest world.
        seed, shuffle: the order of rows is a function of these and of the data.
        balance: workers that are measured to be slower own fewer lanes; the gradient stays that of the whole batch.
        cache_dir: directory on the workers' machines where decoded rows are kept; default: in Spark's local directory.
        data_uri: where a DataFrame is frozen to as Parquet; default: below ``work_dir``. Must be shared storage where
            executors run on other machines.

    State:
        checkpoint_uri: shared directory or fsspec URI for checkpoints; default: below ``work_dir``.
        keep_checkpoints: how many to keep. rpo_target_s, ckpt_budget: the newest is never older than the target unless
            writing would cost more than this share of the time.
        guard: what follows where a committed value is not finite, or a loss jumps after a change of the world: "warn",
            "rollback" to the last good checkpoint, "stop". guard_rollbacks: how often at most, then the job stops.
        job_name: a second start of the same name goes on where the first one was lost; default: a new name each time.
        resume: what to go on from, also where the job has finished: "latest", a step, the URI of a checkpoint, or the
            id of an MLflow run or model. Default: the newest checkpoint of this job_name, if it has not finished.
        work_dir: directory on the driver for logs, and default place of data and checkpoints.

    Tracking:
        tracking_uri, experiment, run_name: MLflow; default: what MLflow itself is set to, else SQLite in the current
            directory. tracking: False switches MLflow off. The run is nested under the active run, if there is one.
        params: by name, whatever else the run should record, as ``{"lr": 1e-3}``.
        verbose: 0 nothing, 1 progress, 2 also the workers' output.
        status_port: a live page on the driver, and /metrics for Prometheus, at this port; 0: a free one; default: none.
            The link is printed and holds a token. status_host: the interface, as a name or address; loopback unless
            said otherwise.
    """

    num_proc: int | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    spares: int = 0
    start_timeout: float = 600.0
    elastic_timeout: float = 600.0
    reset_limit: int | None = None
    user_error_retries: int = 0
    frozen_after_s: float = 4.0
    notices: str | None = None
    nics: tuple[str, ...] | None = None
    env: Mapping[str, str] | None = None
    global_batch: int = 256
    lanes: int | None = None
    seed: int = 0
    shuffle: bool = True
    balance: bool = True
    cache_dir: str | None = None
    data_uri: str | None = None
    checkpoint_uri: str | None = None
    keep_checkpoints: int = 3
    rpo_target_s: float = 10.0
    ckpt_budget: float = 0.01
    guard: str = "warn"
    guard_rollbacks: int = 3
    job_name: str | None = None
    resume: str | int | None = None
    work_dir: str = ".elastic_spark"
    tracking: bool = True
    tracking_uri: str | None = None
    experiment: str | None = None
    run_name: str | None = None
    params: Mapping[str, str] | None = None
    verbose: int = 1
    status_port: int | None = None
    status_host: str = "127.0.0.1"

    @classmethod
    def resolve(cls, file: str | Path | None = None, **options: Any) -> JobConfig:
        """Defaults, then the YAML ``file``, then ``options``; those that are None say nothing.

        Raises:
            ConfigError: an unknown option, a wrong type, or values that exclude one another.
        """
        given = {**(_read_yaml(file) if file else {}), **{k: v for k, v in options.items() if v is not None}}
        hints = typing.get_type_hints(cls)
        unknown = [name for name in given if name not in hints]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), hints, 1)
            asked = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"unknown option {unknown[0]!r}{asked}; known are: {', '.join(sorted(hints))}")
        config = cls(**{name: _as(name, hints[name], value) for name, value in given.items()})
        config._check()
        return config

    def make_work_dir(self, job_name: str = "") -> Path:
        """The absolute folder of a job below ``work_dir``, made where it is missing.

        Raises:
            ConfigError: it cannot be made or written.
        """
        folder = Path(self.work_dir).absolute() / job_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"work_dir={self.work_dir!r} cannot be made: {error}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"work_dir={self.work_dir!r} cannot be written: {folder} is read-only")
        return folder

    def _check(self) -> None:
        for name in ("num_proc", "min_num_proc", "max_num_proc", "global_batch", "lanes", "keep_checkpoints"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if self.guard not in POLICIES:
            raise ConfigError(f"guard={self.guard!r}: must be one of {', '.join(map(repr, POLICIES))}")
        if self.notices is not None:
            notices.check(self.notices)
        for name in ("spares", "reset_limit", "user_error_retries", "guard_rollbacks"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value}: must not be negative")
        for name in ("start_timeout", "elastic_timeout", "frozen_after_s", "rpo_target_s", "ckpt_budget"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be positive")
        if self.status_port is not None and not 0 <= self.status_port < 65536:
            raise ConfigError(f"status_port={self.status_port}: must be a port, or 0 for a free one")
        if self.frozen_after_s < SHORTEST_FROZEN_S:
            raise ConfigError(
                f"frozen_after_s={self.frozen_after_s}: signs of life come every 0.5 s, so it must be at least "
                f"{SHORTEST_FROZEN_S}"
            )
        for small, large in (
            ("min_num_proc", "num_proc"),
            ("num_proc", "max_num_proc"),
            ("min_num_proc", "max_num_proc"),
        ):
            low, high = getattr(self, small), getattr(self, large)
            if low is not None and high is not None and low > high:
                raise ConfigError(f"{small}={low} is more than {large}={high}")
        if self.job_name is not None and not re.fullmatch(r"\w[\w.\- ]{0,120}", self.job_name):
            raise ConfigError(f"job_name={self.job_name!r}: it names a folder; use letters, digits, '.', '-', '_', ' '")
        if self.lanes is not None and self.lanes > self.global_batch:
            raise ConfigError(f"lanes={self.lanes} is more than global_batch={self.global_batch}")

    def with_workers(self, slots: int) -> JobConfig:
        """The three numbers of workers filled in, where ``slots`` are offered by the cluster."""
        num = self.num_proc or max(self.min_num_proc or 1, min(slots, self.max_num_proc or slots))
        return dataclasses.replace(
            self,
            num_proc=num,
            min_num_proc=self.min_num_proc or 1,
            max_num_proc=self.max_num_proc or num,
        )

    def job_options(self) -> Options:
        """What the pure core needs of it; the numbers of workers must be filled in."""
        assert self.num_proc is not None
        assert self.min_num_proc is not None
        assert self.max_num_proc is not None
        return Options(
            num_proc=self.num_proc,
            min_num_proc=self.min_num_proc,
            max_num_proc=self.max_num_proc,
            start_timeout=self.start_timeout,
            elastic_timeout=self.elastic_timeout,
            reset_limit=self.reset_limit,
            user_error_retries=self.user_error_retries,
            frozen_after_s=self.frozen_after_s,
            guard=self.guard,
            guard_rollbacks=self.guard_rollbacks,
        )

    def public(self) -> dict[str, Any]:
        """As logged: without what may be secret, which is the values of ``env``, and users and passwords in URIs."""
        body = dataclasses.asdict(self)
        body["env"] = sorted(self.env) if self.env else []
        for name in ("data_uri", "checkpoint_uri", "tracking_uri"):
            if body[name] is not None:
                body[name] = re.sub(r"(?<=://)[^/]*@", "***@", body[name])
        return body


def _read_yaml(file: str | Path) -> dict[str, Any]:
    import yaml

    try:
        body = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration {file}: {error}") from error
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise ConfigError(f"the configuration {file} is not a mapping of options")
    return {name: value for name, value in body.items() if value is not None}


def _as(name: str, hint: Any, value: Any) -> Any:
    """``value`` as the option's type, or a `ConfigError`.

    Whole numbers pass as floats, paths as strings, lists and sets as tuples of strings, numbers among environment
    variables, and all params, as strings. What is true or false is no number.
    """
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        base = typing.get_origin(kind) or kind
        if isinstance(value, bool) and base is not bool:
            continue
        if base is float and isinstance(value, int):
            return float(value)
        if base is tuple and isinstance(value, (list, set, frozenset, tuple)):
            return tuple(str(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value))
        if base is Mapping and isinstance(value, Mapping):
            return _environment(name, value) if name == "env" else {str(k): str(v) for k, v in value.items()}
        if base is str and isinstance(value, Path):
            return str(value)
        if isinstance(value, base):
            return value
    raise ConfigError(f"{name}={value!r}: expected {hint if isinstance(hint, types.UnionType) else hint.__name__}")


def _environment(name: str, value: Mapping[Any, Any]) -> Mapping[str, str]:
    for variable, content in value.items():
        if not isinstance(variable, str) or isinstance(content, bool) or not isinstance(content, (str, int, float)):
            raise ConfigError(f"{name}: {variable!r}: {content!r} cannot be an environment variable; quote it")
    return {variable: str(content) for variable, content in value.items()}
