"""Spark's classes, prepared once: a JVM that maps them starts with half the processor time.

A JVM of Spark's reads and verifies some ten thousand classes before it does anything, and a cluster that is made to be
broken starts many JVMs. Java can map them from an archive (JEP 350). One is made by a small application when the first
cluster starts on a machine, for this Java and this Spark, in 40 s on two slow cores, and kept as some 180 MB below the
user's cache directory (``XDG_CACHE_HOME``). A JVM that it does not fit does without it, and so does a cluster where it
cannot be made.

Run by spark-submit this file is that application.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

#: For the application to run and the archive to be written, in seconds.
LIMIT_S = 240.0
#: What the application itself does not use: the programs of a cluster.
PROGRAMS = (
    "org.apache.spark.deploy.master.Master",
    "org.apache.spark.deploy.worker.Worker",
    "org.apache.spark.executor.CoarseGrainedExecutorBackend",
)
_log = logging.getLogger(__name__)


class ClassArchive:
    """The archive for the Java and the Spark that ``env`` leads to.

    Args:
        env: environment in which the JVMs will be started.
        spark_home: the Spark.
        jvm_flags: flags of these JVMs.

    Attributes:
        conf_dir: an empty directory for ``SPARK_CONF_DIR``: it stands first on the class path, which has to be the one
            that the archive was made with.
    """

    def __init__(self, env: Mapping[str, str], spark_home: Path, jvm_flags: str) -> None:
        self._env, self._spark_home, self._jvm_flags = env, spark_home, jvm_flags
        home = env.get("JAVA_HOME")
        self._java = Path(home, "bin", "java") if home else Path(shutil.which("java", path=env.get("PATH")) or "none")
        cache = Path(env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        self._folder = cache / "elastic_spark" / "jvm" / self._key()
        self.conf_dir = self._folder / "conf"

    def flags(self, *, make: bool = True) -> str:
        """For a JVM to use it; empty where there is none. The first call on a machine makes it, if it may. Where this
        Java cannot, the file ``failed`` beside it says why, and it is not tried again."""
        archive, failed = self._folder / "classes.jsa", self._folder / "failed"
        if not os.access(self._java, os.X_OK) or not archive.is_absolute():
            return ""
        try:
            self.conf_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if make and not archive.exists() and not failed.exists():
                self._make(archive, failed)
            usable = archive.exists() and not any(self.conf_dir.iterdir())
        except (OSError, subprocess.TimeoutExpired) as error:  # nothing that must be so the next time
            _log.warning("no archive of Spark's classes: %s", error)
            return ""
        return f"-XX:SharedArchiveFile={archive} -Xlog:cds*=off" if usable else ""

    def _key(self) -> str:
        """What it depends on, as a name: the Java, Spark's jars, the flags."""
        depends = [str(self._java.resolve()), str(self._spark_home), self._jvm_flags, str(PROGRAMS)]
        for path in (self._java, *sorted((self._spark_home / "jars").glob("*.jar"))):
            with contextlib.suppress(OSError):
                told = path.stat()
                depends.append(f"{path.name} {told.st_size} {told.st_mtime_ns}")
        return hashlib.sha256("\n".join(depends).encode()).hexdigest()[:16]

    def _make(self, archive: Path, failed: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            made = Path(scratch) / archive.name
            options = f"{self._jvm_flags} -Djava.io.tmpdir={scratch} -XX:ArchiveClassesAtExit={made} -Xlog:cds*=off"
            settings = {
                "spark.master": "local[1]",
                "spark.ui.enabled": "false",
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.memory": "600m",
                "spark.driver.extraJavaOptions": options,
            }
            command = [str(self._spark_home / "bin" / "spark-submit")]
            for name, value in settings.items():
                command += ["--conf", f"{name}={value}"]
            log = Path(scratch, "log")
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*command, __file__, scratch],
                    env={**self._env, "SPARK_CONF_DIR": str(self.conf_dir)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    code = process.wait(LIMIT_S)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if code == 0 and made.exists():
                os.replace(made, archive)
            else:
                failed.write_text(f"exit code {code}\n{log.read_text(errors='replace')}")


def application(scratch: str) -> None:
    """A little of what jobs do: write and read a table, call a function in Python; and load a cluster's programs."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    spark.range(10).selectExpr("id", "id * 2 AS twice").write.parquet(f"{scratch}/table")
    assert spark.read.parquet(f"{scratch}/table").where("twice > 4").count() == 7
    context = spark.sparkContext
    context.setJobGroup("group", "description")
    assert context.parallelize([1, 2], 1).mapPartitions(lambda numbers: [sum(numbers)]).collect() == [3]
    assert context._jvm is not None
    loader = context._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for name in PROGRAMS:
        context._jvm.java.lang.Class.forName(name, True, loader)
    spark.stop()


if __name__ == "__main__":
    application(sys.argv[1])
