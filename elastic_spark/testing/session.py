"""A Spark session of the calling process whose JVM starts clean and can be ended.

pyspark keeps one JVM a process, for ever, and hands the settings of the first session to it as system properties,
where each later session finds them again. Here the JVM starts without any Spark setting and is ended on `close`,
or when another cluster of this process opens a session: there can be only one.

pyspark is imported when used: executors import this package for the counting model and need none of this.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from elastic_spark.bounded import Bounded
from elastic_spark.errors import EnvironmentUnfit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STOP_LIMIT_S = 20.0


def spark_home() -> Path:
    """The Spark that pyspark uses: $SPARK_HOME, or the one inside the installed package."""
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home())


class OwnSession:
    """At most one session at a time, on a JVM that is ours unless the process had one before."""

    _newest: ClassVar[OwnSession | None] = None

    def __init__(self) -> None:
        self._session: SparkSession | None = None
        self._jvm: subprocess.Popen[Any] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the JVM that was started here."""
        return None if self._jvm is None else self._jvm.pid

    def open(self, app_name: str, settings: Mapping[str, str], env: Mapping[str, str]) -> SparkSession:
        """Stop the one before, if any, and start one. EnvironmentUnfit where a foreign SparkContext is active."""
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        if OwnSession._newest not in (None, self):
            OwnSession._newest.close()
        self._stop()
        if SparkContext._active_spark_context is not None:
            raise EnvironmentUnfit("a SparkContext is already active in this process: stop it (spark.stop()) first")
        arguments = (
            f"--driver-memory {settings['spark.driver.memory']} "
            f'--driver-java-options "{settings["spark.driver.extraJavaOptions"]}" pyspark-shell'
        )
        with _environment({**env, "PYSPARK_SUBMIT_ARGS": arguments}):
            if SparkContext._gateway is None:
                SparkContext._ensure_initialized()
                self._jvm = getattr(SparkContext._gateway, "proc", None)
            builder = SparkSession.builder.appName(app_name)
            for key, value in settings.items():
                builder = builder.config(key, value)
            self._session = builder.getOrCreate()
        OwnSession._newest = self
        return self._session

    def close(self) -> None:
        """Stop the session and end the JVM, by force where it does not end by itself. Safe to call twice."""
        from pyspark import SparkContext

        self._stop()
        jvm, self._jvm = self._jvm, None
        if jvm is None:
            return
        gateway = SparkContext._gateway
        current = getattr(gateway, "proc", None) is jvm
        if gateway is not None and current:
            bounded(gateway.shutdown, STOP_LIMIT_S)
            SparkContext._gateway = SparkContext._jvm = None
        if jvm.stdin is not None:
            jvm.stdin.close()
        terminate(jvm, STOP_LIMIT_S)

    def _stop(self) -> None:
        if self._session is not None:
            bounded(self._session.stop, STOP_LIMIT_S)
            self._session = None


def terminate(process: subprocess.Popen[Any], limit_s: float) -> None:
    """SIGTERM, and SIGKILL where that does not end it within ``limit_s``."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()


def bounded(call: Callable[[], Any], limit_s: float) -> None:
    """Run a call that may fail or hang, as one to a dead or frozen JVM does, in a thread waited for ``limit_s``."""
    with contextlib.suppress(Exception):
        Bounded()(call, limit_s)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """These variables for the time of a block: pyspark reads them when it starts its JVM and a context."""
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
