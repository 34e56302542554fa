"""A real Spark standalone cluster on this machine, made to be broken.

One master and n workers run as JVMs of their own (``bin/spark-class`` of the installed pyspark), each executor as a JVM
below its worker: so a ``kill -9``, a frozen process, a machine that goes or comes and a spot notice are the real thing,
which ``local[N]`` cannot show (one JVM) and ``local-cluster`` only in part (its workers live inside the driver).

* **Ports.** All are chosen by the system at bind time (port 0) on 127.0.0.1; the master's is read from its log. Nothing
  is guessed beforehand, so nothing can collide and no worker can dial a stranger.
* **Nothing left behind.** Every process carries a random environment variable (the *marker*), handed down to whatever
  it starts. `StandaloneCluster.processes` lists by it; a keeper process kills by it when the cluster is closed or its
  owner dies, `kill -9` included (see `elastic_spark.testing.keeper`). All files are in one temporary directory; what
  outlives the cluster is an archive of Spark's classes in the user's cache, with which the next one starts sooner.
* **Machines.** Each worker stands for one machine: it has a marker too, so `remove_worker` takes everything that runs
  there at once, as a power cut would.

Linux only (``/proc``, SIGPWR).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import elastic_spark
from elastic_spark.core.events import GenerationFormed, WorkerSpawned, read_log
from elastic_spark.errors import ConfigError, EnvironmentUnfit
from elastic_spark.testing import keeper
from elastic_spark.testing.archive import ClassArchive
from elastic_spark.testing.session import STOP_LIMIT_S, OwnSession, spark_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

HOST = "127.0.0.1"
#: Short-lived JVMs on few cores: the quick compiler only, one GC thread, no files in /tmp/hsperfdata_*. And a JVM
#: without memory ends: else Spark's driver loses the message that it could not hold, and waits for it for ever.
JVM_FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData -XX:+ExitOnOutOfMemoryError"


@dataclass(frozen=True)
class Worker:
    """A Spark worker daemon, standing for one machine."""

    name: str
    pid: int
    log: Path


@dataclass(frozen=True)
class Executor:
    """An executor JVM, as its command line tells. Ids are strings and start again at "0" in each application."""

    id: str
    pid: int
    host: str
    worker: str
    app_id: str


@dataclass(frozen=True)
class Process:
    """A living process of the cluster. ``worker`` is the name of the `Worker` it runs on, or None."""

    pid: int
    command: str
    worker: str | None


class StandaloneCluster:
    """``with StandaloneCluster(workers=3) as cluster: spark = cluster.session()``.

    Args:
        workers: worker daemons to start; each hosts ``cores`` executor cores.
        cores: cores of a worker, and of an executor.
        memory: memory a worker offers; ``executor_memory`` what an executor takes of it.
        decommission: switch Spark's decommissioning on, in the daemons and in the applications.
        pythonpath: directories that Python on the executors can import from, e.g. that of the calling module.
        env: more environment variables for all processes.
        start_limit_s: how long one start (of the master, of workers) may take.

    Raises:
        EnvironmentUnfit: a daemon did not start; the message ends with its log.
    """

    def __init__(
        self,
        workers: int = 3,
        cores: int = 1,
        memory: str = "1g",
        executor_memory: str = "600m",
        *,
        decommission: bool = True,
        pythonpath: Sequence[str | Path] = (),
        env: Mapping[str, str] | None = None,
        start_limit_s: float = 120.0,
    ) -> None:
        if workers < 0 or cores < 1:
            raise ConfigError(f"workers={workers} and cores={cores}: need at least 0 workers and 1 core")
        self._sizes = (workers, cores, memory, executor_memory)
        self._decommission = decommission
        self._start_limit_s = start_limit_s
        self._marker = f"ELASTIC_SPARK_TESTING_{secrets.token_hex(8)}"
        self._extra_env = dict(env or {})
        self._pythonpath = [str(Path(item).resolve()) for item in pythonpath] + _package_root()
        self._spark_home = spark_home()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._submitted: list[subprocess.Popen[str]] = []
        self._workers: dict[str, Worker] = {}
        self._frozen: set[int] = set()
        self._session = OwnSession()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._master_url = ""
        self._jvm_flags = JVM_FLAGS
        self._conf_dir: Path | None = None
        self._worker_count = 0
        self.directory = Path()

    # -- life -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> StandaloneCluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> StandaloneCluster:
        """Start the master, then all workers at once. Leaves nothing behind where it fails."""
        self.directory = Path(tempfile.mkdtemp(prefix="elastic-spark-"))
        for name in ("conf", "local", "logs", "work", "tmp"):
            (self.directory / name).mkdir()
        self._keeper = subprocess.Popen(
            [sys.executable, "-S", "-E", keeper.__file__, self._marker, str(self.directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            archive = ClassArchive({**os.environ, **self._env()}, self._spark_home, JVM_FLAGS)
            if flags := archive.flags():
                self._jvm_flags, self._conf_dir = f"{JVM_FLAGS} {flags}", archive.conf_dir
            self._start_master()
            self._start_workers(self._sizes[0])
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End everything that was started and remove the directory. Safe to call twice."""
        for pid in tuple(self._frozen):
            self.thaw(pid)
        self._session.close()
        for submitted in self._submitted:
            self._terminate(submitted)
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait(timeout=keeper.SWEEP_LIMIT_S + STOP_LIMIT_S)
        for daemon in self._daemons.values():
            daemon.wait(timeout=STOP_LIMIT_S)
        for submitted in self._submitted:
            submitted.wait(timeout=STOP_LIMIT_S)
        self._keeper = None
        for started in (self._daemons, self._submitted, self._workers):
            started.clear()
        if left := self.processes():
            raise EnvironmentUnfit(f"these processes of the cluster outlived SIGKILL: {left}")

    # -- applications -----------------------------------------------------------------------------------------------

    @property
    def master_url(self) -> str:
        """``spark://127.0.0.1:<port>``."""
        return self._master_url

    @property
    def workers(self) -> list[Worker]:
        """The workers that were started and not removed, oldest first."""
        return list(self._workers.values())

    @property
    def conf(self) -> dict[str, str]:
        """The Spark configuration of applications on this cluster: loopback only, no UI, small, quick to start."""
        workers, cores, _, executor_memory = self._sizes
        return {
            "spark.master": self._master_url,
            "spark.log.level": "WARN",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": f"{self._jvm_flags} -Djava.io.tmpdir={self.directory}/tmp",
            "spark.executor.cores": str(cores),
            "spark.executor.memory": executor_memory,
            "spark.executor.extraJavaOptions": f"{self._jvm_flags} -Djava.io.tmpdir={self.directory}/tmp",
            "spark.decommission.enabled": str(self._decommission).lower(),
            "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
            "spark.sql.shuffle.partitions": str(max(2, workers * cores)),
        }

    def session(self, app_name: str = "elastic_spark.testing", **conf: str) -> SparkSession:
        """A session on this cluster, in this process; one that an earlier call made, of any cluster, is stopped first.

        ``conf`` overrides `conf` (``**{"spark.speculation": "true"}``). Raises `EnvironmentUnfit` where a SparkContext
        of your own is active in this process.
        """
        return self._session.open(app_name, {**self.conf, **conf}, self._env())

    def spark_submit(
        self,
        script: str | Path,
        *args: str,
        conf: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Submit a Python script in client mode and return at once.

        The process leads a group of its own which holds the launcher's JVM and the Python driver, so
        ``os.killpg(process.pid, signal.SIGKILL)`` is the loss of the driver. It is terminated with the cluster.
        """
        command = [str(self._spark_home / "bin" / "spark-submit")]
        for key, value in {**self.conf, **(conf or {})}.items():
            command += ["--conf", f"{key}={value}"]
        process = subprocess.Popen(
            [*command, str(script), *args],
            env={**os.environ, **self._env(), **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._submitted.append(process)
        return process

    # -- churn ------------------------------------------------------------------------------------------------------

    def add_worker(self) -> Worker:
        """Start one more worker, as if a machine was added; returns when the master knows it."""
        return self._start_workers(1)[0]

    def remove_worker(self, worker: Worker) -> None:
        """Take a machine away at once, as a power cut would: its daemon, its executors and all they started."""
        del self._workers[worker.name]
        left = keeper.sweep(self._worker_marker(worker.name))
        if left:
            raise EnvironmentUnfit(
                f"processes {left} of {worker.name} outlived SIGKILL by {keeper.SWEEP_LIMIT_S:.0f} s"
            )
        self._daemons.pop(worker.name).wait(timeout=STOP_LIMIT_S)

    def decommission(self, worker: Worker) -> None:
        """Give notice that a machine will go (SIGPWR, as a spot notice does). Running tasks are left to finish."""
        os.kill(worker.pid, signal.SIGPWR)

    def executors(self, app_id: str | None = None) -> list[Executor]:
        """Living executors (of one application, or of all), in order of application and id."""
        found = [executor for found in self._scan() if (executor := _as_executor(*found))]
        chosen = [executor for executor in found if app_id in (None, executor.app_id)]
        return sorted(chosen, key=lambda executor: (executor.app_id, int(executor.id)))

    def kill_executor(self, id: str, app_id: str | None = None) -> Executor:
        """``kill -9`` an executor's JVM; returns once it is dead. LookupError where it is not exactly one."""
        matches = [executor for executor in self.executors(app_id) if executor.id == str(id)]
        if len(matches) != 1:
            raise LookupError(f"executor {id}: {len(matches)} match among {self.executors(app_id)}")
        os.kill(matches[0].pid, signal.SIGKILL)
        self.wait_for(lambda: matches[0] not in self.executors(), STOP_LIMIT_S, f"the end of executor {id}")
        return matches[0]

    def freeze(self, pid: int) -> None:
        """SIGSTOP: the process lives, holds its sockets and does nothing. Thawed when the cluster stops."""
        os.kill(pid, signal.SIGSTOP)
        self._frozen.add(pid)

    def thaw(self, pid: int) -> None:
        """SIGCONT a process that `freeze` stopped; one that is gone is passed over."""
        self._frozen.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    # -- seeing -----------------------------------------------------------------------------------------------------

    def processes(self, *, daemons: bool = True) -> list[Process]:
        """All living processes that the cluster started, directly or not; ``daemons=False`` leaves out its own
        (master, workers and the JVM behind `session`), so that what remains belongs to applications."""
        own = {self._session.pid, *(daemon.pid for daemon in self._daemons.values())}
        return [
            Process(pid, " ".join(command), worker)
            for pid, command, worker in self._scan()
            if daemons or pid not in own
        ]

    def ranks(self, events_path: str | Path) -> dict[str, int]:
        """Executor id -> rank (the lowest, where it hosts several) in the newest generation of a job's event log."""
        executor_of: dict[str, str] = {}
        members: tuple[str, ...] = ()
        with open(events_path, encoding="utf-8") as lines:
            for event in read_log(lines):
                if isinstance(event, WorkerSpawned):
                    executor_of[event.worker] = event.executor
                elif isinstance(event, GenerationFormed):
                    members = event.members
        return {executor_of[worker]: rank for rank, worker in reversed(tuple(enumerate(members)))}

    def wait_for(self, condition: Callable[[], T], limit_s: float, what: str) -> T:
        """Ask ``condition`` until it is true and return its value; TimeoutError with ``what`` after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {limit_s:.0f} s for {what}; last seen: {value!r}")
            time.sleep(0.05)
        return value

    # -- inside -----------------------------------------------------------------------------------------------------

    def _start_master(self) -> None:
        log = self._start_daemon("master", "org.apache.spark.deploy.master.Master", "--port", "0")
        self._master_url = self._wait_in_log("master", log, rf"Starting Spark master at (spark://{HOST}:\d+)")

    def _start_workers(self, count: int) -> list[Worker]:
        _, cores, memory, _ = self._sizes
        started = []
        for _ in range(count):
            name = f"worker-{self._worker_count}"
            self._worker_count += 1
            log = self._start_daemon(
                name,
                "org.apache.spark.deploy.worker.Worker",
                *("--port", "0", "--cores", str(cores), "--memory", memory),
                *("--work-dir", str(self.directory / "work" / name), self._master_url),
            )
            started.append(Worker(name, self._daemons[name].pid, log))
        for worker in started:
            self._wait_in_log(worker.name, worker.log, "(Successfully registered with master)")
            self._workers[worker.name] = worker
        return started

    def _start_daemon(self, name: str, main_class: str, *args: str) -> Path:
        log = self.directory / "logs" / f"{name}.log"
        env = {**os.environ, **self._env(), "TMPDIR": str(self.directory / "tmp"), self._worker_marker(name): "1"}
        with log.open("wb") as output:
            self._daemons[name] = subprocess.Popen(
                [str(self._spark_home / "bin" / "spark-class"), main_class, "--host", HOST, "--webui-port", "0", *args],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return log

    def _wait_in_log(self, name: str, log: Path, pattern: str) -> str:
        """The group that ``pattern`` holds, once the daemon has logged it."""
        deadline = time.monotonic() + self._start_limit_s
        while not (match := re.search(pattern, text := log.read_text(errors="replace"))):
            code = self._daemons[name].poll()
            if code is not None or time.monotonic() > deadline:
                state = "is still starting" if code is None else f"ended with exit code {code}"
                raise EnvironmentUnfit(
                    f"Spark's {name} {state} after {self._start_limit_s:.0f} s at most (start_limit_s); "
                    f"it needs Java 17 or newer on the PATH or in JAVA_HOME. Its log ends:\n{text[-2000:]}"
                )
            time.sleep(0.05)
        return match.group(1)

    def _env(self) -> dict[str, str]:
        options = f"-Dspark.decommission.enabled={str(self._decommission).lower()} -Dspark.master.rest.enabled=false"
        path = [*self._pythonpath, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            self._marker: "1",
            "SPARK_HOME": str(self._spark_home),
            "SPARK_CONF_DIR": str(self._conf_dir or self.directory / "conf"),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": str(self.directory / "local"),
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{self._jvm_flags} -Djava.io.tmpdir={self.directory}/tmp {options}",
            "SPARK_LAUNCHER_OPTS": JVM_FLAGS,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(path),
            **self._extra_env,
        }

    def _worker_marker(self, name: str) -> str:
        return f"{self._marker}_{name.replace('-', '_')}"

    def _terminate(self, submitted: subprocess.Popen[str]) -> None:
        """SIGTERM to launcher and driver, and time to end in order; what is left is killed with the cluster."""

        def alive() -> list[int]:
            return [pid for pid in keeper.marked(self._marker) if _group(pid) == submitted.pid]

        if alive():
            os.killpg(submitted.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                self.wait_for(lambda: not alive(), STOP_LIMIT_S, "the end of a submitted driver")

    def _scan(self) -> Iterator[tuple[int, list[str], str | None]]:
        """Each living process: pid, arguments, name of the worker that it runs on."""
        for pid, names in sorted(keeper.marked(self._marker).items()):
            if command := keeper.command_line(pid):
                worker = next((name for name in self._daemons if self._worker_marker(name) in names), None)
                yield pid, command, worker


def _package_root() -> list[str]:
    """Where executors find elastic_spark, unless it is installed where their Python looks anyway."""
    root = str(Path(elastic_spark.__file__).resolve().parents[1])
    return [] if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else [root]


def _group(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def _as_executor(pid: int, command: list[str], worker: str | None) -> Executor | None:
    if not any(word.endswith("CoarseGrainedExecutorBackend") for word in command):
        return None
    options = dict(itertools.pairwise(command))
    names = ("--executor-id", "--hostname", "--app-id")
    if worker is None or not all(name in options for name in names):
        return None
    id, host, app_id = (options[name] for name in names)
    return Executor(id=id, pid=pid, host=host, worker=worker, app_id=app_id)
