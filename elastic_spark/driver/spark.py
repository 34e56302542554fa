"""Spark, as the driver sees it: slots that want to host workers, executors that drain or are gone, settings that hurt.

*A slot* is a Spark job with one task and no barrier, submitted without a thread of its own (``collectAsync``). A job
that cannot be placed yet is the request that makes dynamic allocation grow. A lost executor costs one task of one small
job: Spark itself tries it again elsewhere, and when it has had enough of that (``spark.task.maxFailures``) the slot is
submitted anew. No stage of the training can fail, because there is none.

*Churn.* The end of an agent's connection is the fastest sign of a lost executor, well before Spark's own. What only
Spark knows is asked every `POLL_S`: executors that are being decommissioned (``isExecutorActive`` is the one place
where that shows), and why an executor was removed. A listener was not worth its callback server: it says nothing
earlier, and nothing about draining.

All of it happens in one thread, so that the job group and description, which Spark keeps by thread, are right.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from elastic_spark.agent.main import Launch
from elastic_spark.agent.task import SlotTask
from elastic_spark.errors import EnvironmentUnfit

POLL_S = 0.5
#: Where the job of every slot failed so often in a row without an agent having registered, none will on this cluster.
HOPELESS_FAILURES = 4
#: A slot whose agent did not register is submitted anew after at most so many seconds.
LONGEST_PAUSE_S = 30.0
_log = logging.getLogger(__name__)


def active_session() -> SparkSession:
    """The session to work in.

    Raises:
        EnvironmentUnfit: there is none, or it is one of Spark Connect, which has no SparkContext.
    """
    session = SparkSession.getActiveSession()
    if session is None and SparkContext._active_spark_context is not None:
        session = SparkSession.builder.getOrCreate()  # "active" is a matter of the thread: this one did not make it
    if session is None:
        raise EnvironmentUnfit(
            "no active SparkSession: create one first, for example SparkSession.builder.getOrCreate(), "
            "or submit the script with spark-submit"
        )
    return require_context(session)


def require_context(session: Any) -> SparkSession:
    """``session`` itself when it has a SparkContext, an `EnvironmentUnfit` otherwise."""
    if "pyspark.sql.connect" in type(session).__module__:
        raise EnvironmentUnfit(
            "this session is a Spark Connect session, which has no SparkContext: elastic_spark needs a classic one "
            "(spark-submit; on Databricks a cluster in Dedicated access mode)"
        )
    assert isinstance(session, SparkSession)
    return session


def use_this_python(context: SparkContext) -> None:
    """In local mode tasks run on this machine: let them run this interpreter, unless another one was asked for."""
    if is_local(context) and context.pythonExec == "python3" and "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable


def driver_host(context: SparkContext) -> str:
    """The driver's address as executors reach it."""
    return str(context.getConf().get("spark.driver.host") or "127.0.0.1")


def is_local(context: SparkContext) -> bool:
    """Whether tasks run inside the driver (``local[N]``): a try-out, in which no executor can come or go."""
    master = str(context.master)
    return master.startswith("local") and not master.startswith("local-cluster")


def offered_slots(context: SparkContext) -> int:
    """How many tasks the cluster says it can run at once, by configuration where that tells, else by what is there."""
    conf = context.getConf()
    if is_local(context):
        return int(context.defaultParallelism)
    cores = int(conf.get("spark.executor.cores") or 1)
    per_executor = max(1, cores // max(1, int(float(conf.get("spark.task.cpus") or 1))))
    for name in ("spark.dynamicAllocation.maxExecutors", "spark.executor.instances"):
        value = conf.get(name)
        if value and value.isdigit() and int(value) < 100_000:
            return int(value) * per_executor
    most = conf.get("spark.cores.max")
    return int(most) if most else int(context.defaultParallelism)


def capacity(context: SparkContext) -> str:
    """How many cores the application's executors have, and how many are free now, in words."""
    try:
        executors = context._jsc.sc().statusStore().executorList(True)
        cores = busy = 0
        for i in range(executors.size()):
            executor = executors.apply(i)
            if executor.id() != "driver" or is_local(context):
                cores += executor.totalCores()
                busy += executor.activeTasks()
    except Exception as error:  # the context may be stopped
        return f"Spark does not say how many cores there are ({_in_a_line(error)})"
    return f"the application's executors have {cores} cores, {max(0, cores - busy)} free"


def settings_that_hurt(context: SparkContext) -> list[str]:
    """Sentences about settings that would hurt an elastic job, each with what to set."""
    conf = context.getConf()

    def on(name: str, default: str = "false") -> bool:
        return str(conf.get(name, default)).lower() == "true"

    found = []
    if on("spark.speculation"):
        found.append("spark.speculation=true starts second copies of long tasks: set it to false for training")
    if on("spark.excludeOnFailure.enabled"):
        found.append(
            "spark.excludeOnFailure.enabled=true takes nodes away for good after lost workers: set it to false"
        )
    for name in ("spark.python.worker.idleTimeoutSeconds",):
        if int(float(str(conf.get(name, "0")).rstrip("s") or 0)) > 0:
            found.append(f"{name} ends tasks that yield no rows, as ours do for as long as they train: set it to 0")
    if is_local(context):
        found.append("master is local: workers run on this machine, and no executor can come or go")
    return found


@dataclass
class _Slot:
    number: int
    future: Any
    failures: int = 0
    seen: bool = False
    due: float = 0.0


class SparkSlots:
    """Keeps ``slots`` slots submitted until it is stopped.

    Args:
        context: the SparkContext.
        launch: what each agent is given.
        slots: how many.
        on_draining: called with ``(executor, reason)`` when Spark begins to take an executor away.
        on_ended: called with ``(slot, reason)`` when a slot's job has ended and is submitted anew.
        on_fault: called with ``(kind, message)`` when the job cannot go on.
    """

    def __init__(
        self,
        context: SparkContext,
        launch: Launch,
        slots: int,
        *,
        on_draining: Callable[[str, str], None],
        on_ended: Callable[[int, str], None],
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._context, self._launch, self._wanted = context, launch, slots
        self._on_draining, self._on_ended, self._on_fault = on_draining, on_ended, on_fault
        self._group = f"elastic_spark-{launch.job_id}"
        self._commands: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._slots: dict[int, _Slot] = {}
        self._executors: set[str] = set()
        self._inactive: set[str] = set()
        self._draining: set[str] = set()
        self._description = "elastic_spark"
        self._thread = threading.Thread(target=self._serve, name="spark slots", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def agent_seen(self, slot: int, executor: str) -> None:
        """An agent of the slot has registered, from ``executor``."""
        self._commands.put(lambda: self._note(slot, executor))

    def decommission(self, executor: str) -> None:
        """Its machine will go: Spark is to run nothing there any more, and may ask for another one."""
        self._commands.put(lambda: self._decommission(executor))

    def describe(self, text: str) -> None:
        """What Spark's own UI shows for slots submitted from now on."""
        self._commands.put(lambda: self._set_description(text))

    def stop(self, limit_s: float = 10.0) -> None:
        """Cancel what is still running. Returns when Spark was told, or after ``limit_s``."""
        self._commands.put(None)
        self._thread.join(limit_s)

    def _note(self, slot: int, executor: str) -> None:
        self._executors.add(executor)
        if slot in self._slots:
            self._slots[slot].seen, self._slots[slot].failures = True, 0

    def _set_description(self, text: str) -> None:
        self._description = text
        self._context.setJobGroup(self._group, text, interruptOnCancel=False)

    def _serve(self) -> None:
        try:
            self._set_description(self._description)
            for number in range(self._wanted):
                self._slots[number] = _Slot(number, self._submit(number))
            while True:
                try:
                    command = self._commands.get(timeout=POLL_S)
                except queue.Empty:
                    self._poll()
                    continue
                if command is None:
                    break
                command()
        except Exception as error:  # py4j raises many kinds when the JVM or the context is gone
            stopped = _is_stopped(self._context)
            kind = "JobCancelled" if stopped else "EnvironmentUnfit"
            self._on_fault(kind, "the SparkContext was stopped" if stopped else f"Spark failed: {error}")
        finally:
            self._cancel()

    def _submit(self, number: int) -> Any:
        rdd = self._context.parallelize([number], 1).mapPartitions(SlotTask(self._launch, number))
        return rdd._jrdd.collectAsync()

    def _poll(self) -> None:
        if _is_stopped(self._context):
            raise RuntimeError("stopped")
        for slot in self._slots.values():
            if slot.future is not None and slot.future.isDone():
                self._ended(slot)
            if slot.future is None and time.monotonic() >= slot.due:
                slot.future = self._submit(slot.number)
        self._look_for_draining()

    def _ended(self, slot: _Slot) -> None:
        """It is submitted anew: at once where its agent had come, else later and later, as a machine that cannot host
        an agent may be the only one that is free. Where no slot gets an agent the job ends."""
        reason = "ended"
        try:
            slot.future.get()
        except Exception as error:  # the job's failure, or its cancellation, wrapped by py4j
            reason = _in_a_line(error)
        slot.failures += not slot.seen
        if min(other.failures for other in self._slots.values()) >= HOPELESS_FAILURES:
            self._on_fault(
                "EnvironmentUnfit",
                f"every slot failed {HOPELESS_FAILURES} times without its agent ever reaching the driver at "
                f"{self._launch.address[0]}: can executors import elastic_spark and reach that address? Last: {reason}",
            )
        if _is_cancelled(reason):
            self._on_fault("JobCancelled", f"the Spark job group was cancelled: {reason}")
        self._on_ended(slot.number, reason)
        slot.seen, slot.future = False, None
        if slot.failures:
            slot.due = time.monotonic() + _pause_s(slot.failures)

    def _look_for_draining(self) -> None:
        backend = self._context._jsc.sc().schedulerBackend()
        for executor in sorted(self._executors - self._draining - {"driver", "unknown"}):
            try:
                active = backend.isExecutorActive(executor)
            except Exception as error:  # a backend without executors
                _log.debug("no draining to see: %s", error)
                self._executors.clear()
                return
            if active:
                self._inactive.discard(executor)
            elif executor not in self._inactive:
                self._inactive.add(executor)  # a killed executor, too, is inactive for a moment before it is gone
            else:
                self._draining.add(executor)
                if executor in self._alive():
                    self._on_draining(executor, "Spark is taking the executor away")

    def _decommission(self, executor: str) -> None:
        """As Spark does it when a machine itself has been told. Where its backend cannot, slots may come back there."""
        jvm = self._context._jvm
        try:
            assert jvm is not None
            no_host = jvm.scala.Option.apply(None)
            told = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("its machine will be taken away", no_host)
            backend = self._context._jsc.sc().schedulerBackend()
            backend.decommissionExecutor(executor, told, False, False)
        except Exception as error:  # a backend without executors, or another Spark
            _log.warning("executor %s cannot be decommissioned: %s", executor, _in_a_line(error))
        self._draining.add(executor)

    def _alive(self) -> set[str]:
        identifiers = self._context._jsc.sc().getExecutorIds()
        return {str(identifiers.apply(i)) for i in range(identifiers.size())}

    def _cancel(self) -> None:
        try:
            self._context.cancelJobGroup(self._group)
        except Exception as error:  # the context is stopped: nothing runs any more
            _log.debug("cancelling: %s", error)


def _pause_s(failures: int) -> float:
    """Before a slot is submitted again whose agent did not come so many times in a row."""
    return min(LONGEST_PAUSE_S, POLL_S * 2.0 ** min(failures - 1, 20))


def _is_stopped(context: SparkContext) -> bool:
    try:
        jsc = context._jsc
        return jsc is None or bool(jsc.sc().isStopped())
    except Exception:  # the JVM is gone
        return True


def _is_cancelled(reason: str) -> bool:
    return "cancelled" in reason.lower() or "SPARK_JOB_CANCELLED" in reason


def _in_a_line(error: BaseException) -> str:
    """What went wrong, in one line: of a Java exception, its innermost cause's words, and of Python's traceback in it
    the error itself."""
    java = getattr(error, "java_exception", None)
    while java is not None and java.getCause() is not None:
        java = java.getCause()
    text = str(java.getMessage() if java is not None else error) or type(error).__name__
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("SQLSTATE")]
    return " ".join(lines[:1] + lines[-1:] if len(lines) > 1 else lines)[:2000]
