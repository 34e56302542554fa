"""The record beside a job's checkpoints: which run the name stands for, and which driver holds it.

One job name, one driver at a time. A driver writes its name and the time into the record every `RENEW_S`; another one
may take the job over when that has not happened for `STALE_S`, or at once when the holder was a process of this machine
that is gone. A holder that finds somebody else's name in the record has lost the job and must stop; it writes nothing
more, so the new holder keeps what it has.

Each version of the record is a file of its own, ``job-<n>.json``; the highest that can be read counts. So nothing is
ever written in place, and a driver that dies while it writes leaves the version before. Where the storage refuses to
create a file twice, two drivers cannot write the same version; elsewhere the later one wins, and the other finds out at
its next renewal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic_spark.bounded import Bounded
from elastic_spark.checkpoint.storage import open_storage
from elastic_spark.errors import JobHeld, StorageFailed

RENEW_S = 3.0
RELEASE_S = 5.0
#: Storage that does not say within so many seconds whose the job is, is not waited for.
LOOK_S = 5.0
STALE_S = 12.0
#: A look at the record, one at each renewal, is knowledge for so long.
SEEN_S = 6.0
_log = logging.getLogger(__name__)
_FILE = re.compile(r"job-(\d{9})\.json")


@dataclass(frozen=True)
class JobRecord:
    """``status``: RUNNING, or how it ended. ``renewed_unix``: by the holder's clock. ``base``: URI of the checkpoint of
    another job, or of an older branch of this one, that it began from; "" where it began from nothing."""

    job_id: str
    run_id: str = ""
    status: str = "RUNNING"
    holder: str = ""
    host: str = ""
    pid: int = 0
    renewed_unix: float = 0.0
    base: str = ""


class JobFile:
    """The record of one job name, held by this driver once `claim` has returned.

    Args:
        uri: the folder of the job's checkpoints.
        on_lost: called once when another driver has taken the job.

    Attributes:
        before: the record that `claim` has found.
    """

    def __init__(self, uri: str, on_lost: Callable[[str], None]) -> None:
        self._storage = open_storage(uri, None)
        self._uri, self._on_lost = uri, on_lost
        self._holder = uuid.uuid4().hex
        self.before: JobRecord | None = None
        self._record = JobRecord(job_id="")
        self._taker: JobRecord | None = None
        self._version = 0
        # When the record was renewed, and found to be ours, last: by the monotonic and by the wall clock.
        self._renewed = self._seen = (-math.inf, -math.inf)
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="lease", daemon=True)

    def read(self) -> JobRecord | None:
        """The stored record; None where there is none, or none that can be read."""
        for _ in range(3):  # what was listed may be replaced before it is read
            versions = self._versions()
            for version in sorted(versions, reverse=True):
                try:
                    with self._storage.open(_name(version)) as file:
                        body = json.loads(file.read())
                    return JobRecord(**{name: body[name] for name in JobRecord.__dataclass_fields__ if name in body})
                except (OSError, ValueError, TypeError, StorageFailed):
                    continue  # torn: the version before
            if not versions:
                break
        return None

    def taken_by(self) -> JobRecord | None:
        """The record of the driver that has taken the job from this one; None while nothing says so within `LOOK_S`
        seconds. Once it is lost it stays lost."""
        if self._taker is None:
            with contextlib.suppress(StorageFailed):
                _within(LOOK_S, self._look)
        return self._taker

    @property
    def lost(self) -> bool:
        """Whether another driver is known to have taken the job."""
        return self._taker is not None

    def knows(self) -> bool:
        """Whether this driver knows whose the job is, without asking: it has lost it, or has renewed it within
        `STALE_S`, so that nobody may have taken it, or has just seen that it is its own, as on a disk that is full and
        takes no renewal. Not when this process has stood still for longer, or while the storage is away."""
        return self._taker is not None or _age_s(self._renewed) < STALE_S or _age_s(self._seen) < SEEN_S

    def require(self) -> None:
        """Raises JobHeld where another driver has taken the job from this one, StorageFailed where that cannot be told.
        May block for as long as the storage does."""
        if self._taker is None:
            self._look()
        if self._taker is not None:
            raise JobHeld(self._lost_to(self._taker))

    def _lost_to(self, taker: JobRecord) -> str:
        return f"the job at {self._uri} was taken over by process {taker.pid} on {taker.host}"

    def _look(self) -> None:
        at = time.monotonic(), time.time()
        found = self.read()
        if found is not None and found.holder != self._holder:
            self._taker = found
        elif found is not None:
            self._seen = at

    def _versions(self) -> list[int]:
        found = (_FILE.fullmatch(name) for name in self._storage.files(""))
        return [int(match.group(1)) for match in found if match]

    def claim(self, *, again: bool = False, base: str = "", run_id: str = "") -> tuple[JobRecord, bool]:
        """Hold the job: ``(record, resumed)``, where ``resumed`` says that one is taken up again: one that has not
        finished or, with ``again``, any. ``base`` makes it a branch from that checkpoint, with an id of its own.
        ``run_id``: of the tracking run to go on with; default: the record's.

        Raises:
            JobHeld: another driver is alive and holds it.
            StorageFailed: the folder cannot be written.
        """
        before = self.before = self.read()
        if before is not None and before.status == "RUNNING":
            self._wait_for_holder(before)
        resumed = before is not None and (again or before.status != "FINISHED")
        record = before if before is not None and resumed else JobRecord(job_id=uuid.uuid4().hex[:12])
        if base:
            record = replace(record, job_id=uuid.uuid4().hex[:12], base=base)
        record = replace(record, run_id=run_id or record.run_id)
        self._record = replace(record, status="RUNNING", holder=self._holder, host=_machine(), pid=os.getpid())
        _here.add(self._holder)
        self._write()
        self._thread.start()
        return self._record, resumed

    def _wait_for_holder(self, before: JobRecord) -> None:
        """Until the holder is known to be gone."""
        deadline = time.monotonic() + STALE_S
        while not _is_gone(before):
            now = self.read()
            if now is not None and now.renewed_unix != before.renewed_unix:
                raise JobHeld(
                    f"the job at {self._uri} is held by a living driver (process {now.pid} on {now.host}): "
                    "stop that one, or choose another job_name"
                )
            if time.monotonic() > deadline:
                return
            time.sleep(0.2)

    def set_run(self, run_id: str) -> None:
        """Note the tracking run that this job is. Safe from any thread; storage that is away is told by the next
        renewal."""
        with contextlib.suppress(StorageFailed):
            _within(RELEASE_S, lambda: self._renew(run_id=run_id))

    def release(self, status: str) -> None:
        """The job has ended with ``status``; nothing is written over the record of a driver that has taken it."""
        self._stop.set()
        _here.discard(self._holder)
        deadline = time.monotonic() + RELEASE_S
        while True:
            try:
                _within(RELEASE_S, lambda: self._renew(status=status))
                return
            except StorageFailed as error:  # what the caller gets must not depend on this
                if time.monotonic() > deadline:
                    _log.warning("the job file at %s does not say that the job is %s: %s", self._uri, status, error)
                    return
            time.sleep(0.2)

    def _renew(self, **changes: Any) -> JobRecord | None:
        """Write the record anew. Where another driver has taken the job, nothing is written: returns its record."""
        with self._writing:
            self._record = replace(self._record, **changes)
            self._look()
            if self._taker is None:
                self._write()
            return self._taker

    def _write(self) -> None:
        now = time.monotonic(), time.time()
        before = self._versions()
        self._version = max([self._version, *before]) + 1
        body = asdict(replace(self._record, renewed_unix=now[1]))
        with self._storage.create(_name(self._version)) as sink:
            sink.write(memoryview(json.dumps(body, indent=1).encode()))
        self._renewed = now
        for version in before:
            self._storage.remove(_name(version))

    def _watch(self) -> None:
        while not self._stop.wait(RENEW_S):
            with contextlib.suppress(StorageFailed):  # storage is away: training goes on; the next renewal tries again
                taker = self._renew()
                if taker is not None:
                    self._on_lost(self._lost_to(taker))
                    return


def _age_s(at: tuple[float, float]) -> float:
    """Seconds since then, by the clock by which it is longer ago."""
    return max(time.monotonic() - at[0], time.time() - at[1])


def _within(limit_s: float, work: Callable[[], object]) -> None:
    """Do it in a thread that is left behind where the storage hangs; raises StorageFailed then, and what it raises."""
    try:
        Bounded(name="job file")(work, limit_s)
    except TimeoutError as error:
        raise StorageFailed(f"storage: {error}") from error


def _name(version: int) -> str:
    return f"job-{version:09d}.json"


#: The holders that live in this process.
_here: set[str] = set()


def _machine() -> str:
    """This machine and its process numbers: containers may share the one and not the other."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _is_gone(record: JobRecord) -> bool:
    """Whether the holder is known to be gone; one on another machine never is."""
    if record.host != _machine():
        return False
    if record.pid == os.getpid():
        return record.holder not in _here
    return not os.path.exists(f"/proc/{record.pid}")
