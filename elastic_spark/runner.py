"""Other ways in to `elastic_spark.run`: HorovodRunner's shape, and what the command ``elastic-spark run`` needs.

*A try-out on the driver's machine* (negative ``np``) is a job like any other on a Spark of its own, ``local[N]``, in a
child process: a process has one SparkContext, and a notebook's belongs to its cluster. The child ends with its parent,
because it watches the pipe that is its standard input.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from elastic_spark.config import JobConfig
from elastic_spark.errors import ConfigError, ElasticSparkError

_STOP_LIMIT_S = 45.0
_VERBOSITY = {"log_callback_only": 1, "all": 2}


class ElasticRunner:
    """HorovodRunner's shape: ``ElasticRunner(np=4, min_np=1).run(train, lr=0.1)``.

    Args:
        np: workers wanted, on the executors of the active Spark session; -n: n workers on the driver's machine, to try
            a function out, where no executor can come or go.
        min_np, max_np: with fewer the job waits; never more. Default: 1 and ``np``.
        driver_log_verbosity: "all" shows the workers' output; "log_callback_only" progress alone.
        options: further options of `elastic_spark.run`, as ``data`` and ``global_batch``. For a try-out, data sets
            must be paths or URIs: a DataFrame belongs to another Spark.

    Raises:
        ConfigError: at once, for numbers that exclude one another or an unknown verbosity.
    """

    def __init__(
        self,
        *,
        np: int,
        min_np: int | None = None,
        max_np: int | None = None,
        driver_log_verbosity: str = "log_callback_only",
        **options: Any,
    ) -> None:
        if isinstance(np, bool) or not isinstance(np, int) or np == 0:
            raise ConfigError(f"np={np!r}: give the number of workers, or -n for a try-out with n on this machine")
        if driver_log_verbosity not in _VERBOSITY:
            raise ConfigError(
                f"driver_log_verbosity={driver_log_verbosity!r}: must be {' or '.join(map(repr, _VERBOSITY))}"
            )
        self.np = np
        self._options = {
            "num_proc": abs(np),
            "min_num_proc": min_np,
            "max_num_proc": max_np,
            "verbose": _VERBOSITY[driver_log_verbosity],
            **options,
        }
        JobConfig.resolve(**{name: value for name, value in self._options.items() if name not in ("data", "config")})

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Run ``main(**kwargs)``, or ``main(ctx, **kwargs)``, on every worker; returns what it returned on rank 0.

        Raises:
            ElasticSparkError: as `elastic_spark.run`.
        """
        if self.np < 0:
            return _try_out(main, kwargs, {"start_timeout": 120.0, **self._options})
        from elastic_spark.api import run

        return run(main, kwargs=kwargs, **self._options)[0]


# ---- try-out in a child process


def _try_out(main: Callable[..., Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    try:
        call = cloudpickle.dumps((main, dict(kwargs), dict(options)))
    except Exception as error:
        raise ConfigError(f"the function cannot be sent to another process: {error}") from error
    with tempfile.TemporaryDirectory(prefix="elastic-spark-") as folder:  # of this user alone
        Path(folder, "call").write_bytes(call)
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "elastic_spark.runner", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            text=True,
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:  # printed here, so that it shows in a notebook's cell
                print(line, end="", file=sys.stderr)
            code = child.wait()
        finally:
            _end(child)
        outcome = Path(folder, "outcome")
        if not outcome.exists():
            raise ElasticSparkError(f"the try-out ended with exit code {code} and no result; see its output above")
        value, failure = cloudpickle.loads(outcome.read_bytes())
    if failure is not None:
        raise failure
    return value


def _environment() -> dict[str, str]:
    """This process's environment without what would tie the child to this process's Spark."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_GATEWAY", "SPARK_CONF"))}
    kept["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    kept["PYSPARK_PYTHON"] = sys.executable
    return kept


def _end(child: subprocess.Popen[str]) -> None:
    """The end of its input tells the child to end its job in good order; what does not end is killed."""
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    try:
        child.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _child(folder: str) -> None:
    """The child: one local job, its outcome written as a whole."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    value: Any = None
    failure: Exception | None = None
    try:
        from elastic_spark.api import run

        main, kwargs, options = cloudpickle.loads(Path(folder, "call").read_bytes())
        session(f"local[{options['num_proc']}]", "elastic_spark try-out", {})
        value = run(main, kwargs=kwargs, **options)[0]
    except Exception as error:
        failure = error
    partial = Path(folder, "outcome.partial")
    partial.write_bytes(_outcome(value, failure))
    partial.rename(Path(folder, "outcome"))


def _outcome(value: Any, error: Exception | None) -> bytes:
    try:
        sent: bytes = cloudpickle.dumps((value, error))
    except Exception as failure:
        why = f"{error or 'the result cannot be sent'}: {failure}"
        sent = cloudpickle.dumps((None, ElasticSparkError(why)))
    return sent


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


# ---- for the command


def session(master: str | None, app_name: str, conf: Mapping[str, str]) -> Any:
    """The active SparkSession, or a new one. ``master`` None: what spark-submit or spark-defaults say."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    if master:
        builder = builder.master(master)
        if master.startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else Spark takes the first python3 on the PATH
            conf = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", **conf}
    for name, value in {"spark.ui.showConsoleProgress": "false", **conf}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def load_function(target: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``FILE.py:function`` names, ready to be sent to workers.

    A module that is not installed travels along with the function; what it imports in turn must be on the executors.

    Raises ConfigError where there is none.
    """
    place, _, name = target.rpartition(":")
    is_file = place.endswith(".py")
    if not place or not name or (is_file and not Path(place).is_file()) or os.sep in name:
        raise ConfigError(
            f"{target!r}: expected an existing FILE.py, or a module, then a colon and the name of a function in it"
        )
    module = _load_file(Path(place)) if is_file else _load_module(place)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        known = [item for item, value in vars(module).items() if callable(value) and item[0] != "_"]
        raise ConfigError(f"{place} has no function {name!r}; it has {', '.join(known) or 'none'}")
    if not _is_installed(module):
        cloudpickle.register_pickle_by_value(module)
    found: Callable[..., Any] = function
    return found


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.absolute()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(f"cannot import {name}: {type(error).__name__}: {error}") from error


def _is_installed(module: ModuleType) -> bool:
    places = [sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")]
    file = os.path.abspath(module.__file__ or "")
    return any(file.startswith(place + os.sep) for place in places)


def require_unfinished(config: JobConfig) -> None:
    """Raises ConfigError unless the job of this name is there, and has not finished."""
    from elastic_spark.driver.resume import require_job, store_uri

    if config.job_name is None:
        raise ConfigError("name the job to resume: --job-name")
    record = require_job(store_uri(config, config.job_name), config.job_name)
    if record.status == "FINISHED":
        raise ConfigError(
            f"the job {config.job_name!r} has finished: there is nothing to resume, except with --resume latest"
        )


def submit_line(master: str | None, conf: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The ``spark-submit`` command that does the same as ``elastic-spark`` with these arguments."""
    import shlex

    import elastic_spark.cli

    words = ["spark-submit", *(["--master", master] if master else [])]
    for name, value in conf.items():
        words += ["--conf", f"{name}={value}"]
    return shlex.join([*words, str(Path(elastic_spark.cli.__file__)), *arguments])


if __name__ == "__main__":
    _child(sys.argv[1])
