"""Spark jobs of one call that end with it: where the caller is interrupted, they are cancelled, and no others.

While a thread waits for Spark in py4j, an interrupt ends the waiting and not the job, and leaves the thread another
thread of the JVM, without its job group. So the call gets a thread of its own, which takes over job group, description
and tags, and adds one tag: by that its jobs are known.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pyspark import SparkContext

#: How long an interrupted caller waits for the end of what it has cancelled, and that for the end of its tasks.
CANCEL_LIMIT_S, TASKS_LIMIT_S = 30.0, 20.0
_POLL_S = 0.1

T = TypeVar("T")


class TaggedJobs:
    """The jobs of one call. ``session``: that of Spark Connect has no tags of ours, and is only waited for."""

    def __init__(self, session: Any, name: str) -> None:
        self._session, self._name = session, name
        self._tag = f"elastic_spark-{name}-{uuid.uuid4().hex[:12]}"
        connect = "pyspark.sql.connect" in type(session).__module__
        self._context: SparkContext | None = None if connect else session.sparkContext

    def run(self, call: Callable[[], T]) -> T:
        """``call()``, as if it were called here. An exception that comes while it runs, as by Ctrl-C, cancels its jobs
        until it has ended, for at most `CANCEL_LIMIT_S`."""
        from pyspark import InheritableThread

        context, ended = self._context, Future[T]()
        if context is None:
            return call()

        def body() -> None:
            try:
                context.addJobTag(self._tag)
                ended.set_result(call())
            except BaseException as error:
                ended.set_exception(error)

        keywords: dict[str, Any] = {"name": f"elastic_spark {self._name}", "daemon": True}
        if "session" in inspect.signature(InheritableThread.__init__).parameters:  # Spark 4: the session's tags, too
            keywords["session"] = self._session
        thread = InheritableThread(body, **keywords)
        try:
            thread.start()
            while thread.is_alive() and not ended.done():
                wait([ended], 1.0)
            if not ended.done():
                raise RuntimeError("Spark went away before its jobs were begun")
            return ended.result()
        except BaseException:
            deadline = time.monotonic() + CANCEL_LIMIT_S
            while thread.is_alive() and not ended.done() and time.monotonic() < deadline:
                with contextlib.suppress(Exception):  # py4j's, where the context was stopped: then they have ended
                    context.cancelJobsWithTag(self._tag)
                wait([ended], _POLL_S)
            raise

    def wait_for_tasks(self) -> None:
        """Until no task of the jobs so far runs, for at most `TASKS_LIMIT_S`: Spark ends a cancelled job before its
        tasks, and one that goes on to write makes the folders for it again."""
        if self._context is None:
            return
        with contextlib.suppress(Exception):  # as above
            tracker = self._context.statusTracker()
            jobs = map(tracker.getJobInfo, self._context._jsc.sc().statusTracker().getJobIdsForTag(self._tag))
            stages = {stage for job in jobs if job is not None for stage in job.stageIds}
            deadline = time.monotonic() + TASKS_LIMIT_S
            while time.monotonic() < deadline:
                told = map(tracker.getStageInfo, stages)
                if not any(stage is not None and stage.numActiveTasks for stage in told):
                    return
                time.sleep(_POLL_S)
