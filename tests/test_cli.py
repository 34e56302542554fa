"""The command line: ``elastic-spark run`` for real on local cores, and what it refuses before Spark starts."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from elastic_spark import cli as cli_module
from elastic_spark.build_horovod import BUILD_COMMAND
from elastic_spark.cli import main
from elastic_spark.config import JobConfig
from elastic_spark.core import events as ev
from elastic_spark.core.lanes import LanePlan
from elastic_spark.core.manifest import Column, Manifest, RowGroup

TRAIN = """
    import horovod.torch as hvd
    import torch

    ADDED = 40

    def train():
        hvd.init()
        return ADDED + float(hvd.allreduce(torch.ones(1), op=hvd.Sum)[0])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_training.py"
    path.write_text(textwrap.dedent(TRAIN))
    return path


def run_locally(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    conf = ["spark.ui.enabled=false", "spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1"]
    environment["PYSPARK_SUBMIT_ARGS"] = " ".join(f"--conf {option}" for option in conf) + " pyspark-shell"
    command = [
        sys.executable, "-m", "elastic_spark.cli", "run", f"{script}:train", "--master", "local[2]", "--num-proc", "2",
        "--no-tracking", "--work-dir", str(script.parent / "work"), *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=115, env=environment, cwd=script.parent)


def test_run_trains_a_function_of_a_file(script: Path) -> None:
    """Executors have no copy of the file: the function and what it uses travel by value."""
    done = run_locally(script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0: 42.0\nrank 1: 42.0\n" in done.stdout
    assert "events.jsonl" in done.stdout


def test_unusable_horovod_is_named_with_the_command_that_builds_it(script: Path) -> None:
    (script.parent / "broken" / "horovod").mkdir(parents=True)
    (script.parent / "broken" / "horovod" / "__init__.py").write_text("raise ImportError('torch was not found')\n")
    done = run_locally(script, "--env", f"PYTHONPATH={script.parent / 'broken'}")
    assert done.returncode == 1, done.stdout[-3000:]
    assert "torch was not found" in done.stderr
    assert f"against the installed torch: {BUILD_COMMAND}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere.py:train"], 2, "expected an existing FILE.py"),
        (["SCRIPT"], 2, "expected an existing FILE.py"),
        (["SCRIPT:other"], 2, "has no function 'other'"),
        (["SCRIPT:train", "--num-proc", "0"], 2, "num_proc=0"),
        (
            ["SCRIPT:train", "--min-num-proc", "3", "--max-num-proc", "2"],
            2,
            "min_num_proc=3 is more than max_num_proc=2",
        ),
        (["SCRIPT:train", "--env", "NAME"], 2, "expected NAME=VALUE"),
        (["SCRIPT:train", "--data", "x"], 2, "expected NAME=VALUE"),
        (["SCRIPT:train", "--nonsense"], 2, "No such option"),
    ],
)
def test_wrong_usage_is_told_before_spark_starts(script: Path, arguments: list[str], code: int, said: str) -> None:
    given = [argument.replace("SCRIPT", str(script)) for argument in arguments]
    cli = CliRunner().invoke(main, ["run", *given])
    assert cli.exit_code == code
    assert said in " ".join(cli.stderr.split())


def test_what_is_no_log_or_holds_no_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no event\n")
    cli = CliRunner().invoke(main, ["report", str(tmp_path / "text")])
    assert cli.exit_code == 2
    assert "is no event log" in cli.stderr
    for command in ("ls", "verify"):
        cli = CliRunner().invoke(main, ["checkpoints", command, str(tmp_path / "nowhere")])
        assert cli.exit_code == 1
        assert "no checkpoint under" in cli.stderr
    assert not (tmp_path / "nowhere").exists()


def test_a_report_says_what_it_could_not_read_or_write(tmp_path: Path) -> None:
    """Exit code 1 is for a sequence that differs or is not known, and for nothing else."""
    log, junk = tmp_path / "events.jsonl", tmp_path / "junk"
    told = ev.to_json(ev.Warned(at=1.0, message="m"))
    log.write_text(f'{told}\n{{"event": "OfANewerVersion"}}\n\n[1]\n{told[:20]}')
    junk.write_bytes(b"\xff\x00\xfe")
    cli = CliRunner().invoke(main, ["report", str(log)])
    assert (cli.exit_code, cli.stderr) == (0, "2 of 5 lines could not be read: what they told is missing above\n")
    for words in (["--manifest", str(junk)], ["--manifest", str(log)], ["--html", str(tmp_path / "no" / "x.html")]):
        cli = CliRunner().invoke(main, ["report", str(log), *words])
        assert (cli.exit_code, type(cli.exception)) == (2, SystemExit), cli.output


def test_a_picture_without_matplotlib_is_a_matter_of_the_surroundings(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(ev.to_json(ev.Warned(at=1.0, message="m")))
    (tmp_path / "matplotlib.py").write_text("raise ImportError\n")
    done = subprocess.run(
        [sys.executable, "-m", "elastic_spark.cli", "report", "events.jsonl", "--png", "x.png"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(cli_module.__file__).parents[1]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "Error: a picture needs matplotlib: pip install matplotlib\n")


def test_every_option_has_a_flag() -> None:
    flags = {parameter.name for parameter in main.commands["run"].params}
    assert {item.name for item in dataclasses.fields(JobConfig)} <= flags


def test_report_recomputes_the_sequence_from_a_manifest(tmp_path: Path) -> None:
    """Equal, or exit code 1 where a batch held other rows than planned; a manifest of other data is refused."""
    manifest = Manifest.of("train", "/data", [RowGroup("/data/a.parquet", 0, 40, 1)], [Column("x", "int64")])
    plan = LanePlan(manifest.group_rows, lanes=4, global_batch=16, seed=3)
    sizes = {"num_proc": 1, "min_num_proc": 1, "max_num_proc": 1}
    frozen = {"dataset": "train", "rows": 40, "digest": manifest.digest, "lanes": 4, "seed": 3, "row_groups": 1}
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    other = Manifest.of("val", "/data", manifest.row_groups, [Column("y", "int64")])
    (tmp_path / "other.json").write_text(other.to_json())

    def write(lines: list[ev.Event]) -> list[str]:
        (tmp_path / "log.jsonl").write_text("".join(ev.to_json(event) + "\n" for event in lines))
        return ["report", str(tmp_path / "log.jsonl"), "--manifest", f"{tmp_path}/manifest.json"]

    for wrong in (0, 1):
        sums = [f"{plan.row_hash(0, offset) ^ wrong:016x}" for offset in range(3)]
        log = [
            ev.JobStarted(at=0.0, job_name="j", job_id="i", run_id="", **sizes),
            ev.DatasetFrozen(at=0.0, global_batch=16, steps_per_epoch=3, **frozen),
            *(
                ev.StepsCommitted(
                    **{"at": 3.0, "generation": 1, "first_step": offset + 1, "times": (offset + 1.0,), "rows": rows},
                    **{"cursors": {"train": (0, offset)}, "hashes": {"train": sums[offset]}},
                )
                for offset, rows in enumerate((16, 16, 8))
            ),
        ]
        done = CliRunner().invoke(main, write(log))
        assert done.exit_code == wrong, done.output
        assert done.output.splitlines()[-1].endswith("DIFFERENT" if wrong else "equal")
        assert "train, epoch 1: 40 once, 0 twice, 0 never, sequence " in done.output
    for torn, verdict in (("", "DIFFERENT"), ('{"event": "StepsComm', "NOT KNOWN from this log")):
        arguments = write(log[:3] + log[4:])  # without its second batch
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write(torn)
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 1
        assert done.stdout.splitlines()[-1].endswith(f": {verdict}")
    done = CliRunner().invoke(main, ["report", str(tmp_path / "log.jsonl"), "--manifest", f"{tmp_path}/other.json"])
    assert done.exit_code == 2
    assert "is of other data than this job's" in done.stderr
