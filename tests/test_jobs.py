"""The jobs that a user sees first: the main job by spark-submit on a real cluster, and what the demo makes of a log."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_spark.core import events as ev
from elastic_spark.errors import NotEnoughWorkers
from elastic_spark.testing import StandaloneCluster
from elastic_spark.testing.chaos import Outcome
from elastic_spark.testing.session import spark_home
from jobs import chaos, demo, train_characters, train_flights

JOBS = Path(train_flights.__file__).parent
TRAIN_ROWS, VAL_ROWS = 295_223, 32_123  # together the flights that arrived


@pytest.mark.timeout(300)
def test_the_main_job_learns_by_spark_submit(tmp_path):
    options = ["--epochs", "1", "--num-proc", "2", "--job-name", "flights", "--work-dir", str(tmp_path)]
    options += ["--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    with StandaloneCluster(workers=2) as cluster, open(tmp_path / "out", "w") as out:
        job = cluster.spark_submit(JOBS / "train_flights.py", *options, stdout=out, stderr=subprocess.STDOUT)
        job.wait(timeout=280)
    text = (tmp_path / "out").read_text()
    assert job.returncode == 0, text[-3000:]
    told = json.loads(next(line for line in text.splitlines() if line.startswith('{"run_id"')))
    assert (told["rows_once"], told["rows_twice"], told["rows_never"]) == (TRAIN_ROWS, 0, 0)
    assert told["val_rows"] == VAL_ROWS
    assert told["val_auc"] > 0.7
    assert told["steps"] == math.ceil(TRAIN_ROWS / 1024) + 1  # the last commit is that of the validation
    assert demo.finished_runs(f"sqlite:///{tmp_path}/mlflow.db", "flights") == [("FINISHED", True)]


@pytest.mark.timeout(300)
def test_a_lost_driver_is_resumed_and_the_images_are_learnt(tmp_path):
    done = subprocess.run(
        [sys.executable, JOBS / "resume.py", "--work-dir", tmp_path, "--epochs", "15"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "all as promised" in done.stdout
    accuracy = float(re.search(r"images: ([\d.]+)%", done.stdout)[1])
    assert accuracy > 90


@pytest.mark.timeout(200)
def test_a_seed_of_churn_is_held(tmp_path):
    done = subprocess.run(
        [sys.executable, JOBS / "chaos.py", "--seeds", "3", "--blows", "1", "--epochs", "6", "--keep", tmp_path],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"blow 1 of 1 at step .*\nseed 3: held, \d+ s\n1 of 1 held\n$", done.stdout)


@pytest.mark.parametrize("words", [["--seeds", "5:2"], ["--seeds", "abc"], ["--keep", "/proc/none"]])
def test_a_seed_that_cannot_be_tried_is_no_success(words):
    done = subprocess.run([sys.executable, JOBS / "chaos.py", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert "Traceback" not in done.stderr


def test_a_job_that_never_began_says_why_in_full_and_in_one_line(tmp_path, monkeypatch, capsys):
    error = NotEnoughWorkers("few:\n" + "a word " * 100 + "the end")
    told = Outcome(due=1, error=error, promises={f"the job finished: {str(error)[:300]}": False})
    monkeypatch.setattr(chaos, "chaos", lambda *_, **__: told)
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--seeds", "3", "--keep", str(tmp_path)])
    assert chaos.main() == 1
    assert f"\n  NotEnoughWorkers: few: {'a word ' * 100}the end\n" in f"\n{capsys.readouterr().out}"


@pytest.mark.timeout(200)
def test_the_characters_are_learnt_by_spark_submit(tmp_path):
    options = ["--characters", "60000", "--epochs", "2", "--global-batch", "32", "--work-dir", str(tmp_path)]
    options += ["--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    command = ["--master", "local[2]", "--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1"]
    done = subprocess.run(
        [spark_home() / "bin" / "spark-submit", *command, JOBS / "train_characters.py", *options],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"run_id"')))
    windows = 59_999 // train_characters.WINDOW
    assert (told["rows_once"], told["rows_twice"], told["rows_never"]) == (2 * windows, 0, 0)
    assert told["bits_per_character"] < 5.2, "by chance it would be 6.6"
    assert told["sample"].startswith("The ")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_area_under_curve_is_the_share_of_pairs_in_the_right_order(late, on_time):
    pairs = [(a > b) + (a == b) / 2 for a in late for b in on_time]
    histograms = [torch.bincount(torch.tensor(scores), minlength=6) for scores in (late, on_time)]
    assert train_flights.area_under_curve(*histograms) == pytest.approx(sum(pairs) / len(pairs))


def log_of(folder, *, sizes=(3, 2, 3), twice=False, status="FINISHED"):
    """The log of a job of two epochs of 20 rows in batches of 10, killed at time 5."""
    events = [
        ev.JobStarted(at=1, job_name="demo", job_id="i", run_id="r", num_proc=3, min_num_proc=1, max_num_proc=3),
        ev.DatasetFrozen(
            at=1,
            dataset="train",
            rows=20,
            digest="d",
            lanes=2,
            seed=0,
            global_batch=10,
            steps_per_epoch=2,
            row_groups=1,
        ),
    ]
    for generation, size in enumerate(sizes):
        members = tuple(f"w{i}" for i in range(size))
        events.append(
            ev.GenerationFormed(
                at=2 + 4 * generation,
                generation=generation,
                members=members,
                joined=(),
                lost=(),
                left=(),
                cause="start",
                source="w0",
                step=0,
            )
        )
    offsets = [(0, 0), (0, 1), (1, 0), (1, 0 if twice else 1)]
    events += [
        ev.StepsCommitted(at=20 + i, generation=2, first_step=i + 1, times=(20.0 + i,), cursors={"train": at}, rows=10)
        for i, at in enumerate(offsets)
    ]
    events += [ev.MetricsReported(at=30, step=4, values={"val_auc": 0.74}), ev.JobFinished(at=31, status=status)]
    log = demo.EventLog(folder / "events.jsonl")
    text = "".join(ev.to_json(event) + "\n" for event in events)
    log.path.write_text(text[:100])  # polled in the middle of a line
    log.poll()
    log.path.write_text(text)
    log.poll()
    log.killed_at = 5.0
    return log


def problems(log, monkeypatch, exit_code=0, killed="1", left=(), runs=(("FINISHED", True),)):
    monkeypatch.setattr(demo, "finished_runs", lambda *_: list(runs))
    return demo.broken_promises(log, exit_code, 2, killed, list(left), "")


def test_the_demo_is_content_with_what_was_promised(tmp_path, monkeypatch, capsys):
    log = log_of(tmp_path)
    assert problems(log, monkeypatch) == []
    assert problems(log_of(tmp_path, sizes=(3, 2, 2, 3)), monkeypatch) == [], "lanes may change their owners"
    demo.report(log, "sqlite:///here")
    assert "40 trained once, 0 twice, 0 never" in capsys.readouterr().out


def test_the_demo_says_what_was_not_as_promised(tmp_path, monkeypatch):
    assert any("rows were trained twice" in line for line in problems(log_of(tmp_path, twice=True), monkeypatch))
    assert any("sizes after the kill" in line for line in problems(log_of(tmp_path, sizes=(3, 2)), monkeypatch))
    assert any("status is FAILED" in line for line in problems(log_of(tmp_path, status="FAILED"), monkeypatch))
    fine = log_of(tmp_path)
    assert any("exit code 1" in line for line in problems(fine, monkeypatch, exit_code=1))
    assert any("no executor was killed" in line for line in problems(fine, monkeypatch, killed=None))
    assert any("left behind" in line for line in problems(fine, monkeypatch, left=["7 python"]))
    assert any("MLflow holds" in line for line in problems(fine, monkeypatch, runs=[("RUNNING", False)]))
