"""How a job ended is noted where its checkpoints are, and nothing else depends on that."""

from __future__ import annotations

import logging
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
