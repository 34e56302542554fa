"""The digest of an epoch: the same for any number of workers and any churn, and computable from the plan alone."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.core import events as ev
from elastic_spark.core.audit import check_digests, planned_digest, sequence_digest
from elastic_spark.core.lanes import LanePlan, assign_lanes
from elastic_spark.core.ledger import Ledger, Report
from elastic_spark.core.manifest import Column, Manifest, RowGroup
from elastic_spark.core.metrics import summarise
from elastic_spark.core.order import row_hash
from elastic_spark.errors import ConfigError

MANIFEST = Manifest.of(
    "train", "/data", [RowGroup("/data/a.parquet", i, n, n) for i, n in enumerate((37, 50, 13))], [Column("x", "int64")]
)
PLAN = LanePlan(MANIFEST.group_rows, lanes=12, global_batch=16, seed=7)
EPOCHS = 2


def frozen(seed=7, **fields):
    fields = {
        "dataset": "train",
        "rows": PLAN.rows,
        "digest": MANIFEST.digest,
        "lanes": PLAN.lanes,
        "seed": seed,
        "global_batch": PLAN.global_batch,
        "steps_per_epoch": PLAN.steps_per_epoch,
        "row_groups": len(PLAN.groups),
    } | fields
    return ev.DatasetFrozen(at=0.0, **fields)


class Job:
    """Worlds of workers that train what they own, told to a real ledger; the log is what it says."""

    def __init__(self, size: int, plan: LanePlan = PLAN) -> None:
        self.plan, self.log, self.steps, self.generation = plan, [frozen()], 0, 0
        self.ledger = Ledger(planned=lambda _name, epoch, offset: plan.row_hash(epoch, offset))
        self.owned: dict[str, tuple[int, ...]] = {}
        self.names = (f"w{i}" for i in itertools.count())
        self.form(size, 0)

    def form(self, size: int, step: int) -> None:
        """A new world of ``size``, with as many of the old members as it can hold, from ``step`` on."""
        kept = list(self.owned)[:size]
        members = kept + [next(self.names) for _ in range(size - len(kept))]
        self.owned = assign_lanes(self.plan.lanes, members, self.owned)
        self.generation, self.steps = self.generation + 1, step
        self.log += self.ledger.begin(self.generation, members, step, "churn", float(step))

    @property
    def done(self) -> bool:
        return self.steps >= EPOCHS * self.plan.steps_per_epoch

    def step(self, silent: int = 0) -> None:
        """One step; the last ``silent`` members do not live to report it."""
        epoch, offset = divmod(self.steps, self.plan.steps_per_epoch)
        self.steps += 1
        for worker, lanes in list(self.owned.items())[: len(self.owned) - silent]:
            ids = self.plan.share(epoch, lanes).row_ids(offset)
            told = {"cursors": {"train": (epoch, offset)}, "hashes": {"train": row_hash(ids)}}
            self.ledger.report(worker, self.generation, [Report(self.steps, float(self.steps), ids.size, **told)])
        self.log += self.ledger.complete(float(self.steps))

    def digests(self) -> list[str | None]:
        log = [ev.from_json(ev.to_json(event)) for event in self.log + self.ledger.close(1e9)]
        epochs = summarise(log)["epochs"]
        assert [(e["rows_once"], e["rows_twice"], e["rows_never"]) for e in epochs] == [(PLAN.rows, 0, 0)] * EPOCHS
        return [epoch["digest"] for epoch in epochs]


EXPECTED = [planned_digest(frozen(), MANIFEST, epoch) for epoch in range(EPOCHS)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_it_is_the_same_for_any_number_of_workers(size) -> None:
    job = Job(size)
    while not job.done:
        job.step()
    assert job.digests() == EXPECTED
    assert len(set(EXPECTED)) == EPOCHS


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_it_is_the_same_under_churn(seed) -> None:
    """Resizes, ranks that die before they report, roll-backs that cut through what was told already."""
    rng = random.Random(seed)
    job = Job(rng.randint(1, 5))
    while not job.done:
        chance = rng.random()
        if chance < 0.6:
            job.step()
        elif chance < 0.8:
            job.form(rng.randint(1, 6), job.steps)
        elif chance < 0.9 and len(job.owned) > 1:
            job.step(silent=rng.randint(1, len(job.owned) - 1))
            job.form(rng.randint(1, 6), job.steps)
        else:
            job.form(rng.randint(1, 6), rng.randint(0, job.steps))
    assert job.digests() == EXPECTED


def test_another_order_another_row_or_another_seed_is_seen() -> None:
    batches = [(offset, PLAN.row_hash(0, offset)) for offset in range(PLAN.steps_per_epoch)]
    assert sequence_digest(batches) == EXPECTED[0]
    assert sequence_digest([*batches[1:], batches[0]]) != EXPECTED[0]
    assert sequence_digest([*batches, batches[-1]]) != EXPECTED[0]
    assert sequence_digest([*batches[:-1], (batches[-1][0], batches[-1][1] ^ 1)]) != EXPECTED[0]
    assert planned_digest(frozen(seed=8), MANIFEST, 0) != EXPECTED[0]
    assert planned_digest(frozen(shuffle=False), MANIFEST, 0) != EXPECTED[0]


def test_a_worker_that_trains_other_rows_than_its_own_is_found_out() -> None:
    job = Job(3)
    job.owned["w1"] = job.owned["w0"]
    while not job.done:
        job.step()
    log = job.log + job.ledger.close(1e9)
    checks = check_digests(summarise(log)["epochs"], [frozen()], [MANIFEST])
    assert [good for _, good in checks] == [False, False]
    assert all("DIFFERENT" in words for words, _ in checks)


def test_the_check_in_words() -> None:
    job = Job(2)
    while not job.done:
        job.step()
    log = [*job.log, *job.ledger.close(1e9)]
    epochs = summarise(log)["epochs"]
    assert check_digests(epochs, [frozen()], [MANIFEST])[1] == (
        f"train, epoch 2: sequence by plan {EXPECTED[1]}: equal",
        True,
    )
    without = [{**epoch, "digest": None} for epoch in epochs]
    assert check_digests(without, [frozen()], [MANIFEST])[0][0].endswith("NOT KNOWN from this log")
    for digest, verdict in (
        (None, "NOT KNOWN from this log"),
        ("0", "NOT KNOWN from this log"),
        (EXPECTED[0], "equal"),
    ):
        ((words, good),) = check_digests([{**epochs[0], "digest": digest}], [frozen()], [MANIFEST], whole=False)
        assert (words.endswith(f": {verdict}"), good) == (True, verdict == "equal")
    assert check_digests([{**epoch, "finished": False} for epoch in epochs], [frozen()], [MANIFEST]) == []
    other = Manifest.of("val", "/data", MANIFEST.row_groups[:1], MANIFEST.columns)
    with pytest.raises(ConfigError, match=r"'val', \w{16}, is of other data than this job's: train \w{16}"):
        check_digests(epochs, [frozen()], [other])


def test_what_no_worker_told_is_not_known() -> None:
    """Reports without hashes; a log that begins after a checkpoint."""
    ledger = Ledger()
    log = [frozen(), *ledger.begin(1, ["w0"], 0, "start", 0.0)]
    for step in range(1, PLAN.steps_per_epoch + 1):
        hashes = {} if step == 3 else {"train": 5}
        ledger.report("w0", 1, [Report(step, float(step), 16, {"train": (0, step - 1)}, hashes=hashes)])
        log += ledger.complete(0.0)
    assert summarise(log)["epochs"][0]["digest"] is None
    start = {"job_name": "j", "job_id": "i", "run_id": "", "num_proc": 1, "min_num_proc": 1, "max_num_proc": 1}
    told = ev.StepsCommitted(
        at=2.0, generation=1, first_step=2, times=(2.0,), cursors={"train": (0, 1)}, rows=16, hashes={"train": "0" * 16}
    )
    late = [frozen(), ev.JobStarted(at=0.0, resumed_step=1, resumed_cursors={"train": (0, 1)}, **start), told]
    assert summarise(late)["epochs"][0]["digest"] is None
    assert summarise([frozen(), told])["epochs"][0]["digest"] == sequence_digest([(1, 0)])
