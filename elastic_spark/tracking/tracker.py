"""The thread between the controller and MLflow."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_spark.core import events as ev
from elastic_spark.core.records import Record, Recorder, summary_records
from elastic_spark.errors import ConfigError
from elastic_spark.tracking import values
from elastic_spark.tracking.left import META, MOST_RECORDS, open_spool, write_private
from elastic_spark.tracking.place import active_run, resolve_experiment, resolve_uri
from elastic_spark.tracking.spool import Spool
from elastic_spark.tracking.store import Away, Store

PERIOD_S, HEARTBEAT_S, LONGEST_BREAK_S = 1.0, 10.0, 10.0
#: Events that may wait for the thread.
MOST_EVENTS = 200_000
#: Where the disk is full: records that may wait in memory, and seconds until it is tried again.
MOST_HELD, DISK_AGAIN_S = 200_000, 1.0

_log = logging.getLogger("elastic_spark.tracking")


@dataclass(frozen=True)
class _Ending:
    status: str
    summary: Mapping[str, Any]
    made_with: Mapping[str, str]
    at: float
    timeout_s: float


class Tracker:
    """Tells MLflow about one job. Make it and `start` it in the user's thread, where their active run is.

    Args:
        tracking_uri, experiment: see `place.resolve_uri` and `place.resolve_experiment` for what None means.
        run_name: None: MLflow chooses one.
        job_name, job_id: tags of the run.
        spool_dir: a directory on the driver for what waits while MLflow is away.
        run_id: a run to go on with.
        on_run: called with the run's id as soon as there is one, which may be late, and from another thread.
        may_tell: asked from another thread before anything is sent: False while it is unknown whether the run is still
            this driver's. What is to be told waits then, as while MLflow is away.
        warn: called from other threads with each new warning, in words; default: the module's logger.
        spool_limit_bytes: what may wait; beyond it metrics are cut, and that is said.

    Raises:
        ConfigError: a tracking URI that this MLflow cannot use.
    """

    def __init__(
        self,
        *,
        tracking_uri: str | None,
        experiment: str | None,
        run_name: str | None,
        job_name: str,
        job_id: str,
        spool_dir: str,
        run_id: str | None = None,
        on_run: Callable[[str], None] | None = None,
        may_tell: Callable[[], bool] = lambda: True,
        warn: Callable[[str], None] | None = None,
        spool_limit_bytes: int = 64 << 20,
    ) -> None:
        uri = resolve_uri(tracking_uri)
        parent = active_run(uri)
        self._foreign = parent is not None and parent[0] == run_id  # the user's own active run: never ended by us
        meta: dict[str, Any] = {
            "uri": uri,
            "experiment": resolve_experiment(experiment, uri, parent[1] if parent else None),
            "run_name": run_name or job_name,
            "job_name": job_name,
            "job_id": job_id,
            "run_id": run_id,
            "started_at_ms": round(time.time() * 1000),
            "parent": parent[0] if parent and not self._foreign else None,
            "tags": {},
        }
        self._on_run = on_run or (lambda run_id: None)
        self._may_tell = may_tell
        self._say = warn or _log.warning
        self._said: set[str] = set()
        self._dir = Path(spool_dir)
        self._store = Store(meta, self._warn)
        self._spool = open_spool(self._dir, run_id, spool_limit_bytes, self._warn)
        self._waits = f"training goes on, records wait in {self._spool.path}"
        self._recorder = Recorder()
        self._events: deque[ev.Event] = deque()
        self._dropped = 0
        self._pending: list[Record] = []
        self._again = bool(self._spool)
        self._beat = 0.0
        self._away_since: float | None = None
        self._next_try = 0.0
        self._break = 0.5
        self._disk_at = 0.0
        self._fatal: ConfigError | None = None
        self._ending: _Ending | None = None
        self._told = threading.Event()
        self._files: Future[Mapping[str, str]] = Future()
        self._left = False
        self._wake = threading.Event()
        self._imported = threading.Event()
        self._first_try = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def run_id(self) -> str:
        """The run's id; "" while MLflow has not answered yet."""
        return self._store.run_id or ""

    @property
    def newest_step(self) -> int:
        """The newest step that MLflow, or what waits for it, held when the run was opened."""
        return self._recorder.newest_step

    @property
    def uri(self) -> str:
        """The tracking URI in use, without user and password."""
        return values.without_password(self._store.uri)

    @property
    def experiment_id(self) -> str:
        """Id of the experiment; "" while MLflow has not answered yet."""
        return self._store.experiment_id

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        """Creates the run, or takes up ``run_id`` again (status RUNNING), and returns its id.

        "" where MLflow does not answer within seconds: the job goes on, and the run is made when it does.

        Raises:
            ConfigError: MLflow answers, and says that this cannot be.
        """
        self._store.meta["tags"] = dict(tags)
        short, long = values.params(params)
        texts: list[Record] = [{"kind": "text", "path": path, "text": text} for path, text in long.items()]
        self._pending += [{"kind": "params", "values": short}, *texts]
        self._save_meta()
        self._thread = threading.Thread(target=self._main, name="elastic-spark-tracking", daemon=True)
        self._thread.start()
        self._imported.wait()
        self._first_try.wait(self._store.limit_s + 5.0)
        if self._fatal is not None:
            raise self._fatal
        return self.run_id

    def publish(self, event: ev.Event) -> None:
        """Takes in an event. Never waits; the oldest of more than `MOST_EVENTS` unread ones goes."""
        if self._ending is None and not self._left and self._thread is not None:
            if len(self._events) >= MOST_EVENTS:
                with contextlib.suppress(IndexError):
                    self._events.popleft()
                self._dropped += 1
            self._events.append(event)

    def leave(self) -> None:
        """The run goes on under another driver: from here on nothing is told of it, its end neither. Does not wait."""
        self._left = True
        self._wake.set()

    def finish(
        self,
        status: str,
        *,
        summary: Mapping[str, Any],
        artifacts: Callable[[], Mapping[str, str]],
        made_with: Mapping[str, str] | None = None,
        timeout_s: float = 30,
    ) -> None:
        """Delivers what waits, then verdict and status, then the files of ``artifacts()``: artifact path -> local file.
        They are asked for when the status is told, or its time is over.

        ``made_with`` is named at the end of the description: versions, the command.

        Returns within ``timeout_s`` seconds, beside those that ``artifacts`` takes, whatever MLflow does. What could
        not be delivered stays in ``spool_dir``, is said, and can be sent with `replay`.
        """
        if self._thread is None or self._ending is not None:
            return
        end = time.monotonic() + timeout_s
        self._store.deadline = end - 0.1 * timeout_s
        if not self._left:
            self._ending = _Ending(status, summary, made_with or {}, time.time(), timeout_s)
        self._wake.set()
        self._told.wait(timeout_s)
        begin, files = time.monotonic(), dict[str, str]()
        try:
            if self._thread.is_alive() and not self._left:
                files.update(artifacts())
        finally:
            took = time.monotonic() - begin
            self._store.deadline += took
            self._files.set_result(files)
            self._thread.join(max(0.0, end + took - time.monotonic()))
            if self._thread.is_alive():  # stuck where nothing should be: what it holds in memory is not on disk
                self._warn("the tracking thread did not end in time")

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._careful(self._begin)
            self._imported.set()
            self._first_try.set()
            while self._ending is None and self._fatal is None and not self._left:
                self._careful(self._turn)
                self._wake.wait(PERIOD_S)
                self._wake.clear()
            if self._ending is not None and self._fatal is None:
                self._end(self._ending)
        finally:
            self._told.set()
            self._careful(self._keep)

    def _careful(self, work: Callable[[], object]) -> bool | None:
        """Whether ``work()`` says so; None where it raised: a defect, which costs neither the job nor the run's end."""
        try:
            return bool(work())
        except Exception as error:
            text = f"tracking failed, and goes on: {type(error).__name__}: {error}"
            if text not in self._said:
                _log.exception("tracking failed")
            self._warn(text)
            return None

    def _begin(self) -> None:
        try:
            import mlflow  # noqa: F401  # seconds on a busy machine, which are not the store's
        finally:
            self._imported.set()
        self._open()
        self._recorder = Recorder(max(self._store.newest_step, _newest_step(self._spool)))

    def _turn(self) -> bool:
        self._collect()
        return self._deliver()

    def _end(self, ending: _Ending) -> None:
        """Whatever waits, verdict and status, then the files."""
        while self._careful(self._collect) is None and self._events:
            pass
        end = self._end_records(ending)
        self._pending += end
        self._insist(ending, end)
        self._told.set()
        files = self._files.result()
        self._pending += [{"kind": "artifact", "path": path, "local": local} for path, local in files.items()]
        self._insist(ending)

    def _insist(self, ending: _Ending, end: Sequence[Record] = ()) -> None:
        """Delivers what waits, until that is done or the time is over. Where it cannot be, ``end`` goes past it."""
        untold = list(end)

        def go_past() -> None:
            del untold[: self._store.send(untold, again=True)]

        while not self._left:
            self._next_try = 0.0
            delivered = self._careful(self._deliver)
            if delivered:
                return
            if delivered is None and untold and self._store.run_id is not None and self._may_send():
                self._careful(go_past)
            long_away = self._away_since is not None and time.monotonic() - self._away_since > ending.timeout_s
            if (long_away and not self._store.answers()) or self._store.deadline - time.monotonic() < 0.5:
                return
            time.sleep(0.2)

    def _collect(self) -> None:
        """Events to records."""
        while self._events:
            self._pending += self._recorder.add(self._events.popleft())
            if len(self._pending) > 10 * MOST_RECORDS and self._away_since is not None:
                self._spool_pending()
        self._pending += self._recorder.tick(time.time())
        if self._dropped:
            self._warn("events come faster than they can be taken in: the oldest of them are not tracked")

    def _deliver(self) -> bool:
        """Sends what waits, oldest first; True when nothing waits any more. While the store is away it goes to disk."""
        if not self._may_send():
            return False
        if time.monotonic() < self._next_try or (self._away_since is not None and not self._store.answers()):
            self._gone(self._store.why or "no answer")
            return False
        if not self._open():
            return False
        while self._spool:
            if not self._may_send():
                return False
            read = self._spool.read(MOST_RECORDS)
            records = [record for record, _ in read]
            if self._ending is None:  # the end of an earlier driver is not the end of the run
                records = [record if record["kind"] != "end" else {"kind": "void"} for record in records]
            done = self._store.send(records, again=True)
            if done:
                self._spool.delivered(read[done - 1][1])
            if done < len(read):
                self._gone(self._store.why)
                return False
        self._heartbeat()
        while self._pending:
            if not self._may_send():
                return False
            part = self._pending[:MOST_RECORDS]
            done = self._store.send(part, again=self._again)
            del self._pending[:done]
            if done < len(part):
                self._again = True
                self._gone(self._store.why)
                return False
        self._back()
        return True

    def _may_send(self) -> bool:
        """Whether the run is known to be this driver's; while it is not, what waits goes to disk."""
        if self._left or self._may_tell():  # which may `leave`
            return not self._left
        self._warn(f"it is unknown whether another driver has the job: {self._waits}")
        self._spool_pending()
        return False

    def _open(self) -> bool:
        """Whether there is a run; made now if need be."""
        if self._store.run_id is not None:
            return True
        for attempt in range(1 if self._store.remote else 6):
            try:
                if not self._store.answers():
                    raise Away("no answer")
                self._store.open()
                self._save_meta()
                self._on_run(self.run_id)
                return True
            except Away as error:
                self._store.why = str(error)
                if time.monotonic() > self._store.deadline:  # which says nothing of the store
                    self._gone(self._store.why)
                    return False
                if not self._store.remote:
                    time.sleep(0.1 * 2**attempt)
            except ConfigError as error:
                self._fatal = error
                if self._first_try.is_set():
                    self._warn(str(error))
                return False
        if not self._store.remote and not self._first_try.is_set():
            self._fatal = ConfigError(f"tracking_uri={self.uri!r} cannot be used: {self._store.why}")
        self._gone(self._store.why)
        return False

    def _gone(self, why: str) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            self._warn(f"MLflow at {self.uri} is away ({why[:200]}); {self._waits}")
        if now >= self._next_try:
            self._next_try = now + self._break
            self._break = min(LONGEST_BREAK_S, 2 * self._break)
        self._spool_pending()

    def _back(self) -> None:
        self._said = {text for text in self._said if not text.endswith(self._waits)}
        if self._away_since is not None:
            _log.info("MLflow at %s answers again after %.0f s", self.uri, time.monotonic() - self._away_since)
        self._away_since, self._break, self._again = None, 0.5, False

    def _spool_pending(self) -> None:
        """To disk; where that is full they wait in memory, metrics as long as there is room."""
        if time.monotonic() < self._disk_at:
            return
        try:
            self._spool.append(self._pending)
        except OSError as error:
            self._disk_at = time.monotonic() + DISK_AGAIN_S
            self._warn(f"{self._spool.path} cannot be written ({error.strerror}): records wait in memory")
            if len(self._pending) > MOST_HELD:
                self._warn("too many records wait in memory: points of metrics are cut from here on")
                self._pending = [record for record in self._pending if record["kind"] != "metric"]
            return
        self._pending.clear()
        if self._spool.cut:
            self._warn(f"the spool {self._spool.path} is full: points of metrics are cut from here on")

    def _heartbeat(self) -> None:
        if time.monotonic() - self._beat > HEARTBEAT_S:
            self._beat = time.monotonic()
            self._pending.append({"kind": "tag", "key": "elastic.heartbeat_unix", "value": f"{time.time():.3f}"})

    def _end_records(self, ending: _Ending) -> list[Record]:
        """Verdict and status; files follow: one that cannot be made or sent does not leave the run RUNNING."""
        records: list[Record] = []
        if ending.summary:
            about = ending.summary, ending.made_with, self._recorder.newest_step, round(ending.at * 1000)
            self._careful(lambda: records.extend(summary_records(*about)))
        if not self._foreign:
            records.append({"kind": "end", "status": ending.status, "at_ms": round(ending.at * 1000)})
        return records

    def _keep(self) -> None:
        """Puts to disk what was not delivered, and says so."""
        if self._left or (self._fatal is not None and not self._store.run_id):
            self._pending.clear()
            return
        self._disk_at = 0.0
        self._spool_pending()
        if self._pending:
            self._warn(f"{len(self._pending)} records for MLflow at {self.uri} are lost: there is no room for them")
        if self._spool:
            self._save_meta()
            cut = f" ({self._spool.cut} points of metrics were cut)" if self._spool.cut else ""
            self._warn(
                f"MLflow at {self.uri} was not told everything in time: {self._spool.waiting_bytes} bytes of records "
                f"are kept in {self._spool.path}{cut}. To send them: elastic_spark.tracking.replay({str(self._dir)!r})"
            )

    def _save_meta(self) -> None:
        try:
            write_private(self._dir / META, json.dumps(self._store.meta))
        except OSError as error:  # `replay` will not find the run by its id, but by its token
            self._warn(f"{self._dir / META} cannot be written ({error.strerror})")

    def _warn(self, text: str) -> None:
        if text not in self._said and len(self._said) < 200:
            self._said.add(text)
            with contextlib.suppress(Exception):
                self._say(text)


def _newest_step(spool: Spool) -> int:
    steps = [int(r["value"]) for r, _ in spool.read(1 << 30) if r.get("kind") == "tag" and r["key"] == "elastic.step"]
    return max(steps, default=0)
