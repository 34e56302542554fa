"""How a job is ended: the parts are real, only the workers are missing."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import shutil
import signal
import time
import urllib.request
from functools import partialmethod
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from mlflow import MlflowClient

from elastic_spark import conduct, recorded
from elastic_spark.config import JobConfig
from elastic_spark.core import events as ev
from elastic_spark.core import job as core
from elastic_spark.driver import jobfile
from elastic_spark.driver.controller import Controller
from elastic_spark.driver.jobfile import JobFile
from elastic_spark.driver.journal import Journal
from elastic_spark.errors import JobCancelled, JobHeld
from elastic_spark.outlet import Outlet
from elastic_spark.tracking import Tracker, replay
from elastic_spark.tracking.left import SPOOL
from elastic_spark.tracking.store import Store

pytestmark = pytest.mark.timeout(119, func_only=True)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """An empty SQLite store, to be copied: MLflow takes seconds to make one."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


class Bench:
    """A job whose training is ``end``, a function of the run and its journal that says how it ended."""

    def __init__(self, folder: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uri = f"sqlite:///{shutil.copy(database, folder)}"
        options = {"work_dir": str(folder / "work"), "tracking_uri": self.uri, "experiment": "conduct", "verbose": 0}
        self.settings = JobConfig.resolve(job_name="job", num_proc=1, min_num_proc=1, max_num_proc=1, **options)
        self.run = conduct.Run(self.settings, None, b"", {}, lambda worker, lines: None, Outlet(None))
        self.faults: list[str] = []
        monkeypatch.setattr(self.run, "_fault", lambda kind, why: self.faults.append(kind))
        self.other = JobFile(self.run.store_uri, lambda why: None)

    def train(self, end):
        self.run._conduct = lambda journal, *_: (end(journal), [])
        with self.run.reserved():
            return self.run.train()

    def take(self, **how):
        """Another driver takes the job, while this one is as one that is suspended."""
        with pytest.MonkeyPatch.context() as patch, self.run.job_file._writing:
            patch.setattr(jobfile, "STALE_S", 0.3)
            return self.other.claim(**how)

    def tracked(self):
        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("conduct")
        return client.search_runs([experiment.experiment_id]) if experiment else []


@pytest.fixture
def bench(tmp_path, database, monkeypatch):
    return Bench(tmp_path, database, monkeypatch)


@pytest.mark.parametrize("noticed", [True, False])
def test_the_run_of_a_driver_that_lost_the_job_is_the_new_ones(bench, monkeypatch, noticed):
    monkeypatch.setattr(jobfile, "RENEW_S", 0.2 if noticed else 1_000.0)

    def end(journal):
        record, resumed = bench.take()
        assert (record.run_id, resumed) == (bench.run.run_id, True)
        limit = time.monotonic() + 30.0
        while noticed and not bench.faults:
            assert time.monotonic() < limit
            time.sleep(0.05)
        error = "the job was taken over" if noticed else ""
        journal.append(ev.JobFinished(at=time.time(), status="FAILED", error=error))
        return core.Ended("FAILED", error, "JobHeld")

    with pytest.raises(JobHeld):
        bench.train(end)
    assert bench.faults == (["JobHeld"] if noticed else [])
    log = (bench.run.work / "events.jsonl").read_text()
    assert ("JobFinished" in log) is not noticed, "the log is the new one's, too"
    (run,) = bench.tracked()
    assert run.info.status == "RUNNING"
    assert {"elastic.error", "mlflow.note.content"}.isdisjoint(run.data.tags)
    assert (bench.other.read().status, bench.other.taken_by()) == ("RUNNING", None)
    bench.other.release("FINISHED")


def test_a_driver_that_stood_still_asks_whose_the_job_is_before_it_tells_anything(bench, monkeypatch):
    monkeypatch.setattr(jobfile, "RENEW_S", 1_000.0)

    def end(journal):
        bench.take()
        journal._beat_at = (time.monotonic() - 20.0, time.time() - 20.0)
        journal.append(ev.MetricsReported(at=time.time(), step=1, values={"loss": 1.0}))
        return core.Ended("FAILED", "the job was taken over", "JobHeld")

    with pytest.raises(JobHeld):
        bench.train(end)
    assert bench.faults[0] == "JobHeld"
    assert (bench.run.work / "events.jsonl").read_text() == ""
    (run,) = bench.tracked()
    assert (run.info.status, run.data.metrics) == ("RUNNING", {})
    bench.other.release("FINISHED")


def stand_still(file):
    """It is as long ago as that since this process has last renewed or seen its record."""
    file._renewed = file._seen = (time.monotonic() - 20.0, time.time() - 20.0)


def test_what_was_not_told_before_a_stand_still_waits_until_it_is_known_whose_the_job_is(bench, monkeypatch):
    """The tracking thread wakes as early as the one that renews."""
    monkeypatch.setattr(jobfile, "RENEW_S", 1_000.0)
    spool = bench.run.work / "spool" / SPOOL

    def end(journal):
        bench.take()
        stand_still(bench.run.job_file)
        bench.run.tracker.publish(ev.MetricsReported(at=time.time(), step=1, values={"loss": 1.0}))
        limit = time.monotonic() + 60.0
        while not (spool.exists() and '"loss"' in spool.read_text()):
            assert time.monotonic() < limit, "it did not wait"
            time.sleep(0.05)
        return core.Ended("FAILED", "the job was taken over", "JobHeld")

    with pytest.raises(JobHeld):
        bench.train(end)
    (run,) = bench.tracked()
    assert (run.info.status, run.data.metrics) == ("RUNNING", {})
    bench.other.release("FINISHED")


def test_a_driver_that_cannot_ask_whose_the_job_is_keeps_its_end(bench, monkeypatch, caplog):
    monkeypatch.setattr(jobfile, "RENEW_S", 0.1)
    monkeypatch.setattr(jobfile, "RELEASE_S", 0.1)
    monkeypatch.setattr(Tracker, "finish", partialmethod(Tracker.finish, timeout_s=6.0))
    folder, aside = Path(bench.run.store_uri), bench.run.work / "aside"

    def end(journal):
        with bench.run.job_file._writing:
            folder.rename(aside)
            folder.touch()  # in its place: nothing can be listed or made there
        stand_still(bench.run.job_file)
        journal.append(ev.MetricsReported(at=time.time(), step=1, values={"loss": 1.0}))
        return core.Ended("FINISHED")

    bench.train(end)
    bench.run.tracker._thread.join(60.0)
    (run,) = bench.tracked()
    assert (run.info.status, run.data.metrics) == ("RUNNING", {})
    assert "unknown whether another driver has the job" in caplog.text
    assert "To send them: elastic_spark.tracking.replay(" in caplog.text
    replay(str(bench.run.work / "spool"))
    (run,) = bench.tracked()
    assert (run.info.status, run.data.metrics["loss"]) == ("FINISHED", 1.0)


def test_a_run_of_its_own_ends_with_the_driver_that_lost_the_job(bench):
    """Of two drivers that begin at once, each has made a run."""

    def end(journal):
        bench.take(run_id="0" * 32)
        return core.Ended("FAILED", "the job was taken over", "JobHeld")

    with pytest.raises(JobHeld):
        bench.train(end)
    assert [run.info.status for run in bench.tracked()] == ["FAILED"]
    bench.other.release("FINISHED")


def test_a_job_that_is_lost_before_it_trains_touches_no_run(bench, monkeypatch):
    nothing = conduct.Datasets({}, {})
    monkeypatch.setattr(conduct.Datasets, "freeze", lambda *_: (bench.take(), nothing)[1])
    with pytest.raises(JobHeld, match="was taken over by process"):
        bench.train(lambda journal: core.Ended("FINISHED"))
    assert bench.tracked() == []
    assert bench.other.read().status == "RUNNING"
    bench.other.release("FINISHED")


@pytest.mark.parametrize("how", ["FINISHED", "KILLED"])
def test_the_status_is_told_before_the_log_is_rendered(bench, monkeypatch, how):
    told, sent = [], []
    send, render = Store._send_file, recorded.artifacts
    monkeypatch.setattr(Store, "_send_file", lambda store, record: (sent.append(record["path"]), send(store, record)))

    def artifacts(*arguments):
        told.append(bench.tracked()[0].info.status)
        return render(*arguments)

    def end(journal):
        journal.append(ev.Warned(at=1.0, message="something to show"))
        if how == "KILLED":
            raise JobCancelled("by the test")
        return core.Ended("FINISHED")

    monkeypatch.setattr(recorded, "artifacts", artifacts)
    with pytest.raises(JobCancelled) if how == "KILLED" else contextlib.nullcontext():
        bench.train(end)
    assert told == [how]
    files = ["elastic/events.jsonl", "elastic/report.html", "elastic/timeline.png"]
    assert [path for path in sent if path in files] == (files if how == "FINISHED" else files[:1])
    assert (bench.run.work / "report.html").exists() is (how == "FINISHED")


class Slow(MemoryFileSystem):
    """A storage that is told to go while it reads, and takes what it sees for an error of its own, as others do."""

    protocol = "slow"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def _open(self, path, mode="rb", **options):
        try:
            if mode == "rb" and path.endswith("manifest.json"):
                signal.raise_signal(signal.SIGTERM)
            return super()._open(path, mode, **options)
        except Exception as error:
            raise OSError("cut short") from error


def test_sigterm_while_a_checkpoint_is_read_is_no_bad_checkpoint(bench):
    fsspec.register_implementation("slow", Slow, clobber=True)
    settings = dataclasses.replace(bench.settings, checkpoint_uri="slow://jobs")
    store = conduct.CheckpointStore("slow://jobs/job")
    bench.other = JobFile(store.uri, lambda why: None)
    bench.other.claim()
    bench.other.release("FAILED")
    Slow().pipe_file("slow://jobs/job/step-000000000001-abcdef/manifest.json", b"{}")
    bench.run = conduct.Run(settings, None, b"", {}, lambda worker, lines: None, Outlet(None))
    with pytest.raises(JobCancelled, match="terminated by SIGTERM"):
        bench.train(lambda journal: core.Ended("FINISHED"))
    assert bench.other.read().status == "KILLED"


def test_a_signal_that_is_swallowed_ends_the_job_all_the_same(bench, monkeypatch):
    def freeze(*_):
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        return conduct.Datasets({}, {})

    monkeypatch.setattr(conduct.Datasets, "freeze", freeze)
    with pytest.raises(JobCancelled, match="terminated by SIGTERM"):
        bench.train(lambda journal: core.Ended("FINISHED"))
    assert (bench.other.read().status, bench.tracked()) == ("KILLED", [])


def test_a_link_file_that_cannot_be_written_costs_the_link_file(bench):
    terminal = io.StringIO()
    bench.run.terminal = Outlet(terminal)
    bench.run.settings = dataclasses.replace(bench.settings, status_port=0)
    (bench.run.work / "status-link").mkdir()
    pages = []

    def end(journal):
        limit = time.monotonic() + 30.0
        while not pages:
            assert time.monotonic() < limit, "no link was printed"
            time.sleep(0.02)
            pages.extend(re.findall(r"http://\S+(?=\n)", terminal.getvalue()))
        urllib.request.urlopen(pages[0], timeout=60.0).close()
        return core.Ended("FINISHED")

    bench.train(end)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(pages[0], timeout=60.0)
    assert bench.other.read().status == "FINISHED"


def fill_the_disk(journal):
    """From here on the log cannot be written; the file stays as it is."""
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), journal._file.fileno())


def test_a_job_whose_disk_is_full_goes_on_and_says_so(bench):
    def end(journal):
        journal.append(ev.Warned(at=1.0, message="before"))
        fill_the_disk(journal)
        journal.append(ev.Warned(at=2.0, message="after"))
        return core.Ended("FINISHED")

    values, *_, figures = bench.train(end)
    assert values == []
    assert figures["warnings"] == 3
    assert [run.info.status for run in bench.tracked()] == ["FINISHED"]
    assert bench.other.read().status == "FINISHED"


def hang_the_disk(journal):
    """From here on who writes the log does not come back, until what is returned is closed."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b" " * 4096)
    os.set_blocking(writing, True)
    os.dup2(writing, journal._file.fileno())
    os.close(writing)
    return os.fdopen(reading)


def test_a_job_whose_log_hangs_is_left_when_it_was_told_to_end(bench, monkeypatch):
    monkeypatch.setattr(conduct, "END_S", 0.5)
    monkeypatch.setattr(conduct, "HANGS_S", 0.5)
    run, hangs = bench.run, []

    def end(journal):
        controller = run.controller = Controller(
            core.Options(1, 1, 1),
            **{"host": "127.0.0.1", "key": b"k" * 32, "job_id": run.job_id, "plans": {}, "seed": 0, "balance": False},
            **{"journal": journal, "store": run.store, "keep": 1, "noted": {}, "resumed": None},
            members_path=run.work / "members.json",
            **dict.fromkeys(("worker_output", "on_generation", "on_agent", "on_notice"), print),
        )
        run.interrupts.cancel_by(lambda why: conduct.Run._fault(run, "JobCancelled", why))
        hangs.append(hang_the_disk(journal))
        controller.start()
        controller.record(lambda now: ev.Warned(at=now, message="never written"))
        try:
            signal.raise_signal(signal.SIGTERM)
            run._wait(controller)
        finally:
            run._take_down(controller, None, None)

    with pytest.raises(JobCancelled, match="by SIGTERM; the driver had not ended the job 0 s later"):
        bench.train(end)
    assert [found.info.status for found in bench.tracked()] == ["KILLED"]
    assert bench.other.read().status == "KILLED"
    hangs[0].close()
    with contextlib.suppress(Exception):
        run.controller.wait(60.0)


def test_facts_wait_for_a_disk_that_is_full(tmp_path):
    read = []
    journal = Journal(tmp_path / "events.jsonl", [read.append])
    journal.append(ev.Warned(at=1.0, message="one"))
    real = os.dup(journal._file.fileno())
    fill_the_disk(journal)
    for at in (2.0, 3.0):
        journal.append(ev.Warned(at=at, message=str(at)))
    os.dup2(real, journal._file.fileno())
    os.close(real)
    journal.append(ev.Warned(at=4.0, message="four"))
    journal.close()
    with journal.path.open() as lines:
        written = list(ev.read_log(lines))
    assert [event.message for event in written if event.where != "driver"] == ["one", "2.0", "3.0", "four"]
    assert len([event for event in written if "No space left" in event.message]) == 1
    assert {event.message for event in read} == {event.message for event in written}
    fill_the_disk(other := Journal(tmp_path / "other.jsonl"))
    other.append(ev.Warned(at=1.0, message="lost"))
    with pytest.raises(OSError, match="No space left"):
        other.close()


def test_a_log_goes_on_with_a_new_line_behind_a_torn_one(tmp_path):
    path, messages = tmp_path / "events.jsonl", ["one", "two", "three"]
    for number, message in enumerate(messages):
        journal = Journal(path)
        journal.append(ev.Warned(at=float(number), message=message))
        journal.close()
        if message == "two":
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - 9)
    with path.open() as lines:
        assert [event.message for event in ev.read_log(lines)] == ["one", "three"]
    assert len(path.read_text().splitlines()) == 3


def test_a_name_whose_job_has_finished_is_said_to_be_trained_anew(tmp_path, database, monkeypatch):
    said = []
    for ended in ("KILLED", "FINISHED", "FINISHED"):
        bench = Bench(tmp_path, database, monkeypatch)
        bench.run.settings = dataclasses.replace(bench.settings, verbose=1, tracking=False)
        shown = io.StringIO()
        bench.run.terminal = Outlet(shown)
        with contextlib.suppress(JobCancelled):
            bench.train(lambda journal, ended=ended: core.Ended(ended, kind="JobCancelled"))
        bench.run.terminal.close()
        said.append("has finished before and is trained anew" in shown.getvalue())
    assert said == [False, False, True]
