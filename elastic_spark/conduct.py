"""One call of `elastic_spark.run`: every part set up in order, watched, and taken down in the other order."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from elastic_spark import errors, recorded
from elastic_spark.bounded import Bounded
from elastic_spark.checkpoint import Checkpoint, CheckpointStore, gist
from elastic_spark.config import JobConfig
from elastic_spark.core import events as ev
from elastic_spark.core import job as core
from elastic_spark.core.metrics import Summary
from elastic_spark.driver.datasets import Datasets
from elastic_spark.driver.journal import Journal
from elastic_spark.interrupts import Interrupts, Terminated
from elastic_spark.outlet import Outlet

if TYPE_CHECKING:
    from elastic_spark.tracking import Tracker

#: A job that was told to end has so many seconds to; storage that hangs has its limits within them.
END_S = 100.0
#: Spark's JVM, or the disk of the log, may hang at the end: neither is waited for any longer.
HANGS_S = 10.0


class Run:
    """One call of `run`: sets the parts up in order, and takes them down in the other one."""

    def __init__(
        self,
        settings: JobConfig,
        context: Any,
        payload: bytes,
        data: Mapping[str, Any],
        output: Callable[[str, tuple[str, ...]], None],
        terminal: Outlet,
    ) -> None:
        from elastic_spark.driver.jobfile import JobFile
        from elastic_spark.driver.resume import find_start, store_uri

        self.settings, self.context, self.payload = settings, context, payload
        self.output, self.terminal = output, terminal
        self.begin = find_start(settings, lambda which: _tracked(settings, which))
        self.name = self.begin.job_name or f"job-{uuid.uuid4().hex[:8]}"
        self.work = settings.make_work_dir(self.name)
        self.store_uri = store_uri(settings, self.name)
        self.data = data
        self.store = CheckpointStore(self.store_uri)
        self.job_file = JobFile(self.store_uri, self._lost)
        self.tracker: Tracker | None = None
        self.journal: Journal | None = None
        self.controller: Any = None
        self.interrupts = Interrupts()
        self.status = ""  # how the job ended, once that is known
        self._told: core.Fault | core.Cancel | None = None  # the first that the controller was told to end for
        self._end_by = math.inf
        self._log_hangs = False

    def _fault(self, kind: str, why: str) -> None:
        self._end(core.Fault(kind, why))

    def _cancel(self, why: str) -> None:
        self._end(core.Cancel(why))

    def _end(self, told: core.Fault | core.Cancel) -> None:
        if self.controller is not None:
            if self._told is None:
                self._told, self._end_by = told, time.monotonic() + END_S
            self.controller.post(told)

    def _lost(self, why: str) -> None:
        self._leave_to_the_taker()
        self._fault("JobHeld", why)

    def _require_ours(self) -> None:
        """As `JobFile.require`, for whoever is about to change what a driver that has taken the job would share."""
        try:
            self.job_file.require()
        except errors.JobHeld as lost:
            self._lost(str(lost))
            raise

    def _stood_still(self) -> None:
        """This process may have been stopped for a while, or its job lost before there was anybody to tell."""
        if self.job_file.taken_by() is not None:
            with contextlib.suppress(errors.JobHeld):
                self._require_ours()

    def _leave_to_the_taker(self) -> None:
        """Tell nothing more in what a driver that has taken the job goes on with: the event log, and the tracking run
        if it is the same one."""
        taker = self.job_file.taken_by()
        if taker is None:
            return
        if self.journal is not None:
            self.journal.leave()
        if self.tracker is not None and taker.run_id and taker.run_id == (self.tracker.run_id or self.record.run_id):
            self.tracker.leave()

    def _may_tell(self) -> bool:
        """Whether it is known whose the job is; where it is another driver's, its run is left to that one first."""
        if not self.job_file.knows():
            return False
        if self.job_file.lost:
            self._leave_to_the_taker()
        return True

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Hold the job's name; say at the end how it ended."""
        base = self.begin.checkpoint.uri if self.begin.checkpoint is not None else ""
        self.record, self.resumed = self.job_file.claim(again=self.begin.again, base=base, run_id=self.begin.run_id)
        self.job_id, self.run_id = self.record.job_id, self.record.run_id
        begins_anew = self.job_file.before is not None and not self.resumed and not base
        if begins_anew and self.settings.verbose >= 1:
            anew = "has finished before and is trained anew; resume='latest' goes on from its end"
            self.terminal.write(f"elastic_spark: the job {self.name!r} {anew}\n")
        try:
            yield
        except (KeyboardInterrupt, errors.JobCancelled):
            self.status = self.status or "KILLED"
            raise
        finally:
            self.job_file.release(self.status or "FAILED")

    def train(self) -> tuple[list[Any], str, str, dict[str, Any]]:
        """From the data to the last fact: ``(values by rank, run id, path of the event log, figures)``."""
        try:
            with Interrupts() as self.interrupts:
                trained = self._train()
        except Terminated as terminated:
            why = str(terminated)
        else:
            if self.interrupts.interrupted:
                raise KeyboardInterrupt
            return trained
        raise errors.JobCancelled(why)  # here, where no frame holds py4j's connection, on which an answer is to come

    def _train(self) -> tuple[list[Any], str, str, dict[str, Any]]:
        newest, rejected = self._newest()
        self.interrupts.check()
        before = newest.fields.get("plans", {}) if newest is not None else {}
        datasets = Datasets.freeze(self.data, self.settings, self.settings.data_uri or str(self.work / "data"), before)
        if newest is not None:
            datasets.require_the_order_of(newest)
        self.interrupts.check()
        if self.job_file.taken_by() is not None:  # freezing takes a while
            self.job_file.require()
        path, summary, tracker = self.work / "events.jsonl", Summary(), self._tracker()
        self.tracker = tracker
        readers, journal = [summary.add], None
        try:
            if tracker is not None:
                params = recorded.params(self.settings, datasets.plans)
                self.run_id = tracker.start(params, {"elastic.events": str(path)})
                readers.append(tracker.publish)
            self._read_the_past(path, newest, summary, tracker)
            self.interrupts.check()
            if self.settings.verbose >= 1:
                from elastic_spark.progress import Progress

                readers.append(Progress(self.terminal).publish)
            journal = self.journal = Journal(path, readers, self._stood_still)
            with self._status_page(path):
                ended, values = self._conduct(journal, datasets, newest, rejected)
            self.status = ended.status
        except (KeyboardInterrupt, Terminated, errors.JobCancelled):
            self.status = self.status or "KILLED"
            raise
        finally:
            self.interrupts.hold()
            self.status = self.status or "FAILED"
            if journal is not None:
                try:
                    Bounded(name="journal")(journal.close, HANGS_S)
                except OSError as error:  # the disk is full, or hangs: the job's end must be told all the same
                    self._log_hangs = isinstance(error, TimeoutError)
                    self.terminal.write(f"elastic_spark: the end of {path} is missing: {error}\n")
            figures = summary.result()
            figures["status"] = self.status  # the log may not have been told
            if tracker is not None:
                self._leave_to_the_taker()
                made_with = {"command": recorded.command(sys.argv), **recorded.versions()}
                files = partial(self._artifacts, path)
                tracker.finish(self.status, summary=figures, artifacts=files, made_with=made_with)
                self.run_id = figures["run_id"] = tracker.run_id
        if not self.interrupts.interrupted:
            _raise_if_failed(ended)
        return values, self.run_id, str(path), figures

    def _artifacts(self, log: Path) -> dict[str, str]:
        if self.journal is not None and (self.journal.left or self._log_hangs):
            return {}
        return recorded.artifacts(log, self.name, self.status, self.terminal.write)

    def _tracker(self) -> Tracker | None:
        settings = self.settings
        if not settings.tracking:
            return None
        from elastic_spark.tracking import Tracker

        return Tracker(
            tracking_uri=settings.tracking_uri,
            experiment=settings.experiment,
            run_name=settings.run_name or self.name,
            job_name=self.name,
            job_id=self.job_id,
            spool_dir=str(self.work / "spool"),
            run_id=self.run_id or None,
            on_run=self.job_file.set_run,
            may_tell=self._may_tell,
        )

    def _read_the_past(self, path: Path, newest: Checkpoint | None, summary: Summary, tracker: Tracker | None) -> None:
        """The log of a job that is taken up again belongs to its story; of another one it is put aside. What its driver
        did not live to tell MLflow, up to where this one goes on, is told now."""
        if not self.resumed:
            if path.exists():
                path.replace(path.with_suffix(f".{os.getpid()}.old.jsonl"))
            return
        if not path.exists():
            return
        told, until = tracker.newest_step if tracker is not None else 0, newest.step if newest is not None else 0
        with path.open(encoding="utf-8") as lines:
            for past in ev.read_log(lines):
                summary.add(past)
                if tracker is not None and isinstance(past, ev.MetricsReported) and told < past.step <= until:
                    told = past.step
                    tracker.publish(past)

    @contextlib.contextmanager
    def _status_page(self, path: Path) -> Iterator[None]:
        """The live page, where it is wanted; its link is printed, and in a file of this user alone while it is up."""
        settings = self.settings
        if settings.status_port is None:
            yield
            return
        from elastic_spark.status import StatusPage

        link = self.work / "status-link"
        try:
            page = StatusPage(path, self.name, host=settings.status_host, port=settings.status_port)
        except OSError as error:
            place = f"{settings.status_host}:{settings.status_port}"
            self.terminal.write(f"elastic_spark: no live status at {place}: {error}\n")
            yield
            return
        self.terminal.write(f"elastic_spark: live status at {page.url}\n")
        try:
            with contextlib.suppress(OSError):  # the disk is full: then the link is printed alone
                link.unlink(missing_ok=True)
                link.touch(mode=0o600)
                link.write_text(page.url + "\n")
            yield
        finally:
            page.close()
            with contextlib.suppress(OSError):
                Bounded(name="link")(lambda: link.unlink(missing_ok=True), HANGS_S)

    def _newest(self) -> tuple[Checkpoint | None, list[Any]]:
        from elastic_spark.driver.resume import base_of

        if self.begin.checkpoint is not None:
            return self.begin.checkpoint, self.begin.rejected
        if not self.resumed:
            return None, []
        only_good = self.settings.guard != "warn"
        found, rejected = self.store.newest_valid(self.job_id, refuse=lambda item: item.suspect if only_good else "")
        found = found or base_of(self.record)
        if found is None and self.settings.resume is not None:
            reasons = "; ".join(item.reason for item in rejected) or "it ended before it wrote one"
            raise errors.CheckpointInvalid(f"the job {self.name!r} has no valid checkpoint: {reasons}")
        return found, rejected

    def _conduct(
        self,
        journal: Any,
        datasets: Datasets,
        newest: Checkpoint | None,
        rejected: Sequence[Any],
    ) -> tuple[core.Ended, list[Any]]:
        """Start controller and slots, wait for the end, and leave nothing behind."""
        from elastic_spark.agent.main import Launch
        from elastic_spark.driver import spark
        from elastic_spark.driver.controller import Controller

        settings, key = self.settings, secrets.token_bytes(32)
        slots: spark.SparkSlots | None = None

        def on_generation(number: int, cause: str, size: int) -> None:
            if slots is not None:
                slots.describe(f"elastic_spark {self.name}: generation {number}, {size} workers ({cause})")

        controller = self.controller = Controller(
            settings.job_options(),
            host=spark.driver_host(self.context),
            key=key,
            job_id=self.job_id,
            plans=datasets.plans,
            seed=settings.seed,
            balance=settings.balance,
            journal=journal,
            store=self.store,
            keep=settings.keep_checkpoints,
            noted={"run_id": self.run_id, "plans": datasets.notes()},
            resumed=newest,
            members_path=self.work / "members.json",
            worker_output=self.output,
            on_generation=on_generation,
            on_agent=lambda slot, executor: slots.agent_seen(slot, executor) if slots is not None else None,
            on_notice=lambda executor: slots.decommission(executor) if slots is not None else None,
            read=_unpickled,
            require_ours=self._require_ours,
        )
        self.interrupts.cancel_by(self._cancel)
        address = controller.start()
        self._stood_still()
        payload = None
        try:
            self._record_start(controller, datasets, newest, rejected)
            payload = self.context.broadcast(self.payload)
            launch = Launch(
                job_id=self.job_id,
                address=address,
                key=key,
                payload=payload,
                worker=self._worker_config(datasets),
                env=self._worker_env(),
                notices=settings.notices,
            )
            assert settings.max_num_proc is not None
            slots = spark.SparkSlots(
                self.context,
                launch,
                settings.max_num_proc + settings.spares,
                on_draining=lambda executor, why: controller.post(core.Draining(executor, why)),
                on_ended=lambda slot, why: controller.record(lambda now: ev.SlotEnded(at=now, slot=slot, reason=why)),
                on_fault=self._fault,
            )
            slots.start()
            self._wait(controller)
            ended, values = controller.outcome()
            if ended.kind == "NotEnoughWorkers":
                try:
                    there = Bounded(name="spark")(lambda: spark.capacity(self.context), HANGS_S)
                except TimeoutError as error:
                    there = f"Spark does not say how many cores there are ({error})"
                ended = dataclasses.replace(ended, error=f"{ended.error}; {there}")
            return ended, values
        finally:
            self.interrupts.hold()
            self._take_down(controller, slots, payload)

    def _wait(self, controller: Any) -> None:
        """Until the job has ended. One that was told to end and does not is left: the storage of its log hangs."""
        while not controller.wait(0.2):
            if self._told is not None and time.monotonic() > self._end_by:
                late = f"; the driver had not ended the job {END_S:.0f} s later: does {self.work} hang?"
                _raise_if_failed(core.Ended("FAILED", self._told.error + late, self._told.kind))

    def _take_down(self, controller: Any, slots: Any, payload: Any) -> None:
        """In any case; a controller that still runs, because something else failed, ends first."""
        with contextlib.suppress(Exception):
            if not controller.wait(0.0):
                self._fault("JobCancelled", "the driver failed")
                controller.wait(max(0.0, self._end_by - time.monotonic()))
        if slots is not None:
            slots.stop()
        if payload is not None:
            with contextlib.suppress(Exception):  # the context may be stopped: then the broadcast is gone already
                Bounded(name="spark")(payload.unpersist, HANGS_S)

    def _record_start(
        self,
        controller: Any,
        datasets: Datasets,
        newest: Checkpoint | None,
        rejected: Sequence[Any],
    ) -> None:
        from elastic_spark.driver import spark

        settings = self.settings
        controller.record(
            lambda now: ev.JobStarted(
                at=now,
                job_name=self.name,
                job_id=self.job_id,
                run_id=self.run_id,
                num_proc=settings.num_proc or 0,
                min_num_proc=settings.min_num_proc or 0,
                max_num_proc=settings.max_num_proc or 0,
                resumed_from=newest.uri if newest is not None else None,
                resumed_step=newest.step if newest is not None else 0,
                resumed_cursors=newest.fields.get("cursors", {}) if newest is not None else {},
                config=settings.public(),
                versions=recorded.versions(),
            )
        )
        for item in gist(rejected):
            controller.record(lambda now, item=item: ev.CheckpointRejected(at=now, uri=item.uri, reason=item.reason))
        for name in datasets.plans:
            controller.record(lambda now, name=name: datasets.frozen(name, now))
        for sentence in spark.settings_that_hurt(self.context):
            controller.record(lambda now, text=sentence: ev.Warned(at=now, message=text, where="Spark settings"))

    def _worker_config(self, datasets: Datasets) -> dict[str, Any]:
        settings = self.settings
        return {
            "datasets": datasets.for_workers(),
            "seed": settings.seed,
            "cache_dir": settings.cache_dir,
            "checkpoint_uri": self.store_uri,
            "attempt": secrets.token_hex(4),
            "rpo_target_s": settings.rpo_target_s,
            "ckpt_budget": settings.ckpt_budget,
            "nics": settings.nics,
        }

    def _worker_env(self) -> dict[str, str]:
        return {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60", "OMP_NUM_THREADS": "1", **(self.settings.env or {})}


def _tracked(settings: JobConfig, which: str) -> Any:
    """What MLflow knows of a run or model that is to be resumed."""
    from elastic_spark.driver.resume import Tracked
    from elastic_spark.tracking import find_checkpoint

    found = find_checkpoint(which, tracking_uri=settings.tracking_uri)
    return Tracked(**found, is_run=not which.startswith("m-"))


def _unpickled(blobs: Sequence[bytes | None]) -> list[Any]:
    """What the ranks returned. The channel has authenticated it."""
    values = []
    for rank, blob in enumerate(blobs):
        try:
            values.append(cloudpickle.loads(blob) if blob is not None else None)
        except Exception as error:
            raise errors.UserCodeFailed(
                f"what rank {rank} returned cannot be read on the driver: {type(error).__name__}: {error}. Return "
                "plain values, arrays or tensors; the trained state is in the last checkpoint"
            ) from error
    return values


def _raise_if_failed(ended: core.Ended) -> None:
    if ended.status == "FINISHED":
        return
    kind = getattr(errors, ended.kind, errors.ElasticSparkError)
    if kind is errors.UserCodeFailed:
        raise errors.UserCodeFailed(ended.error, ended.traceback)
    raise kind(ended.error)
