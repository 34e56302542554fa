"""Who holds a job, and how it ended, is noted where its checkpoints are; a driver that lost it leaves it alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_spark.driver import jobfile
from elastic_spark.driver.jobfile import JobFile
from elastic_spark.errors import StorageFailed


@pytest.mark.parametrize("failures", [2, 10_000])
def test_storage_that_is_away_at_the_end_costs_no_result(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobfile, "RELEASE_S", 1.0)
    file = JobFile(str(tmp_path / "job"), lambda why: None)
    file.claim()
    create, tries = file._storage.create, []

    def away(*arguments: Any) -> Any:
        tries.append(arguments)
        if len(tries) <= failures:
            raise StorageFailed("away")
        return create(*arguments)

    monkeypatch.setattr(file._storage, "create", away)
    with caplog.at_level(logging.WARNING):
        file.release("FINISHED")
    found = JobFile(str(tmp_path / "job"), lambda why: None).read()
    assert found is not None
    if failures == 2:
        assert (found.status, caplog.records) == ("FINISHED", [])
    else:
        assert found.status == "RUNNING"
        assert "does not say that the job is FINISHED: away" in caplog.text


def wait_until(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_driver_that_lost_the_job_leaves_it_to_the_new_holder(
    noticed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It woke after its lease was over; its end may come before or after its next renewal."""
    uri, told_first, told_second = str(tmp_path / "job"), list[str](), list[str]()
    monkeypatch.setattr(jobfile, "STALE_S", 0.3)
    monkeypatch.setattr(jobfile, "RENEW_S", 0.1 if noticed else 1_000.0)
    first = JobFile(uri, told_first.append)
    first.claim(run_id="one")
    second = JobFile(uri, told_second.append)
    monkeypatch.setattr(jobfile, "RENEW_S", 0.1)
    with first._writing:  # as one that is suspended
        record, resumed = second.claim()
    assert (record.run_id, resumed) == ("one", True)
    if noticed:
        wait_until(lambda: told_first)
        assert "was taken over by process" in told_first[0]
    first.set_run("two")
    first.release("FAILED")

    def stored() -> jobfile.JobRecord:
        found = JobFile(uri, lambda why: None).read()
        assert found is not None
        return found

    released_at = time.time()
    wait_until(lambda: stored().renewed_unix > released_at)
    found = stored()
    assert (found.holder, found.status, found.run_id) == (record.holder, "RUNNING", "one")
    assert told_second == []
    taker = first.taken_by()
    assert taker is not None
    assert (taker.holder, second.taken_by()) == (record.holder, None)
    second.release("FINISHED")
    assert stored().status == "FINISHED"


def test_a_driver_knows_whose_the_job_is_while_it_can_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobfile, "SEEN_S", 0.3)
    monkeypatch.setattr(jobfile, "STALE_S", 1.0)
    monkeypatch.setattr(jobfile, "RENEW_S", 0.05)
    folder, aside = tmp_path / "job", tmp_path / "aside"
    file, other = JobFile(str(folder), lambda why: None), JobFile(str(folder), lambda why: None)
    assert not file.knows()
    file.claim()
    wait_until(file.knows)
    with file._writing:
        folder.rename(aside)
        folder.touch()  # in its place: nothing can be listed or made there
    wait_until(lambda: not file.knows())
    with file._writing:
        folder.unlink()
        aside.rename(folder)
    wait_until(file.knows)
    with file._writing:  # as one that is suspended
        wait_until(lambda: not file.knows())
        other.claim()
        assert (file.knows(), file.lost) == (False, False)
    wait_until(lambda: file.lost)
    assert file.knows()
    other.release("FINISHED")


@pytest.mark.parametrize("clock", [0, 1])
def test_either_clock_says_that_a_driver_stood_still(
    clock: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobfile, "RENEW_S", 1_000.0)
    file = JobFile(str(tmp_path / "job"), lambda why: None)
    file.claim()
    assert file.knows()
    file._renewed = tuple(at - 20.0 * (number == clock) for number, at in enumerate(file._renewed))
    assert not file.knows()
    file.set_run("one")
    assert file.knows()
    file.release("FINISHED")


def test_a_disk_that_is_full_takes_no_renewal_and_still_says_whose_the_job_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str) -> Any:
        raise StorageFailed("No space left on device")

    monkeypatch.setattr(jobfile, "STALE_S", 0.5)
    monkeypatch.setattr(jobfile, "RENEW_S", 0.4)
    file = JobFile(str(tmp_path / "job"), lambda why: None)
    file.claim()
    monkeypatch.setattr(file._storage, "create", full)
    renewed = file._renewed[0]
    wait_until(lambda: time.monotonic() > renewed + 1.5)
    wait_until(file.knows)
    assert file._renewed[0] == renewed
    monkeypatch.undo()
    file.release("FINISHED")


def test_storage_that_hangs_at_the_end_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobfile, "RELEASE_S", 0.3)
    monkeypatch.setattr(jobfile, "LOOK_S", 0.3)
    held = JobFile(str(tmp_path / "job"), lambda why: None)
    held.claim()
    answers = threading.Event()
    monkeypatch.setattr(held._storage, "files", lambda folder: answers.wait(60.0) and {})
    assert held.taken_by() is None
    began = time.monotonic()
    held.release("FINISHED")
    answers.set()
    assert time.monotonic() - began < 10.0
