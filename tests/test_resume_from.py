"""What ``resume`` means: looked up in real stores, and refused with what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_spark.checkpoint import Checkpoint, CheckpointStore
from elastic_spark.config import JobConfig
from elastic_spark.driver.jobfile import JobFile
from elastic_spark.driver.resume import Start, Tracked, base_of, find_start
from elastic_spark.errors import CheckpointInvalid, ConfigError

RUN, MODEL = "ab" * 16, "m-" + "cd" * 16


def save(store: CheckpointStore, step: int, job_id: str) -> Checkpoint:
    part = store.write_part(step, {"model/w": torch.full((4,), float(step))}, {}, token=f"{job_id}-{step}")
    return store.commit(step, part.token, [part], fields={"job_id": job_id})


def nobody(which: str) -> Tracked:
    raise AssertionError(f"MLflow was asked about {which}")


class Bench:
    """A job that has written steps 10, 20 and 30, and has ended."""

    def __init__(self, folder: Path) -> None:
        self.uri = str(folder / "job")
        self.store = CheckpointStore(self.uri)
        record, _ = self.claim(run_id=RUN)
        self.job_id = record.job_id
        self.saved = [save(self.store, step, self.job_id) for step in (10, 20, 30)]
        self.settings = {"checkpoint_uri": str(folder), "job_name": "job"}

    def claim(self, status: str = "FINISHED", **options: Any) -> Any:
        file = JobFile(self.uri, lambda why: None)
        claimed = file.claim(**options)
        file.release(status)
        return claimed

    def start(self, resume: Any, look_up: Any = nobody, **options: Any) -> Start:
        return find_start(JobConfig.resolve(**{**self.settings, "resume": resume, **options}), look_up)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_step_or_a_uri_is_that_checkpoint(bench: Bench, tmp_path: Path) -> None:
    for resume in (20, "20"):
        start = bench.start(resume)
        assert (start.job_name, start.checkpoint, start.again) == ("job", bench.saved[1], True)
    start = bench.start(bench.saved[0].uri, job_name="other")
    assert (start.job_name, start.checkpoint, start.again) == ("other", bench.saved[0], False)
    assert bench.start("latest") == Start("job", again=True), "the newest is chosen when the job is held"


def test_what_is_not_there_is_refused_with_what_there_is(bench: Bench) -> None:
    with pytest.raises(CheckpointInvalid, match=r"has no checkpoint '25'; steps there: 30, 20, 10"):
        bench.start(25)
    with pytest.raises(ConfigError, match="there is no job 'none'"):
        bench.start("latest", job_name="none")
    with pytest.raises(ConfigError, match="'latest', a step, a checkpoint's URI, or the id of an MLflow run or model"):
        bench.start("newest")
    with pytest.raises(ConfigError, match="must be that of one checkpoint"):
        bench.start(bench.uri)
    with pytest.raises(ConfigError, match="give its job_name"):
        bench.start(20, job_name=None, checkpoint_uri=None)


def test_one_that_does_not_verify_is_refused_with_the_reason(bench: Bench) -> None:
    (Path(bench.saved[1].uri) / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointInvalid, match=r"state.safetensors: has 4 bytes"):
        bench.start(20)


def test_a_run_means_its_newest_valid_one_and_a_model_its_own(bench: Bench, tmp_path: Path) -> None:
    (Path(bench.saved[2].uri) / "state.safetensors").write_bytes(b"torn")

    def look_up(which: str) -> Tracked:
        uri = bench.saved[2].uri if which == RUN else bench.saved[0].uri
        return Tracked(uri, "job", bench.job_id, RUN, is_run=which == RUN)

    anywhere = {"checkpoint_uri": str(tmp_path / "elsewhere")}
    start = bench.start(RUN, look_up, job_name=None, **anywhere)
    assert (start.job_name, start.checkpoint, start.run_id) == ("job", bench.saved[1], RUN)
    assert [item.uri for item in start.rejected] == [bench.saved[2].uri]
    start = bench.start(MODEL, look_up, job_name="mine", **anywhere)
    assert (start.job_name, start.checkpoint, start.run_id) == ("mine", bench.saved[0], ""), "another job, another run"


def test_a_run_that_was_resumed_and_wrote_nothing_means_what_it_began_from(bench: Bench) -> None:
    tracked = Tracked(bench.saved[1].uri, "job", "a branch", RUN, is_run=True)
    assert bench.start(RUN, lambda which: tracked).checkpoint == bench.saved[1]
    gone = Tracked(f"{bench.uri}/step-000000000040-x", "job", bench.job_id + "x", RUN, is_run=True)
    with pytest.raises(CheckpointInvalid, match=r"holds checkpoints of steps: 30, 20, 10"):
        bench.start(RUN, lambda which: gone)


def test_a_branch_has_an_id_of_its_own_and_remembers_what_it_began_from(bench: Bench) -> None:
    record, resumed = bench.claim("FAILED", again=True, base=bench.saved[0].uri)
    assert resumed
    assert record.job_id != bench.job_id
    assert record.run_id == RUN, "one job, one run"
    assert bench.store.newest_valid(record.job_id) == (None, [])
    assert base_of(record) == bench.saved[0]
    later, resumed = bench.claim()
    assert (later.job_id, later.base, resumed) == (record.job_id, record.base, True)
    after_the_end, resumed = bench.claim()
    assert not resumed
    assert (after_the_end.base, after_the_end.run_id) == ("", "")
    once_more, resumed = bench.claim(again=True)
    assert (once_more.job_id, resumed) == (after_the_end.job_id, True)
