"""``elastic-spark run`` and ``resume`` as a scheduler uses them, and `ElasticRunner`: what they do and end with."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import elastic_spark as es
from elastic_spark import runner
from elastic_spark.cli import main
from elastic_spark.errors import ConfigError

pytestmark = pytest.mark.timeout(240)  # on a busy machine

TRAIN = """
    import time

    BASE = 40

    def train(ctx, added=0, endless=False, fails=False):
        import elastic_spark as es
        import horovod.torch as hvd
        import torch

        model = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        state = es.ElasticState(model=model, optimizer=optimizer, counted=0)

        @hvd.elastic.run
        def loop(state):
            begin = state.counted
            while endless or state.counted < 3:
                if fails:
                    raise ValueError("boom-7")
                state.counted += 1
                state.commit()
                time.sleep(0.02)
            return BASE + added, begin > 0

        return loop(state)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_job.py"
    path.write_text(textwrap.dedent(TRAIN))
    return path


def command(script: Path, *words: str) -> list[str]:
    options = [
        "--master",
        "local[2]",
        "--conf",
        "spark.ui.enabled=false",
        "-np",
        "2",
        "--no-tracking",
        "--verbose",
        "0",
    ]
    options += ["--work-dir", str(script.parent / "work"), "--job-name", "job"]
    return [words[0], f"{script}:train", *options, *words[1:]]


def wait_for(condition, limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.05)


# ---- jobs


def test_a_cancelled_job_is_resumed(script: Path) -> None:
    """SIGTERM, as a scheduler sends it: exit code 4, and `resume` goes on where the job was."""
    folder, output = script.parent, script.parent / "output.txt"
    with output.open("w") as stream:
        words = command(script, "run", "--arg", "endless=true", "--rpo-target-s", "0.5")
        first = subprocess.Popen([sys.executable, "-m", "elastic_spark.cli", *words], stdout=stream, stderr=stream)
        try:
            checkpoints = folder / "work" / "job" / "checkpoints"
            wait_for(
                lambda: list(checkpoints.glob("*/manifest.json")) or first.poll() is not None, 100.0, "a checkpoint"
            )
            first.send_signal(signal.SIGTERM)
            assert first.wait(45.0) == 4, output.read_text()[-3000:]
        finally:
            first.kill()
            first.wait()
    done = CliRunner().invoke(main, command(script, "resume", "--arg", "added=2"))
    assert done.exit_code == 0, done.output
    assert "rank 0: (42, True)\n" in done.stdout, "its state was there"
    again = CliRunner().invoke(main, command(script, "resume"))
    assert again.exit_code == 2
    assert "has finished" in again.stderr


def test_how_a_job_failed_is_told_by_the_exit_code(script: Path) -> None:
    failed = CliRunner().invoke(main, command(script, "run", "--arg", "fails=true"))
    assert failed.exit_code == 1
    assert "boom-7" in failed.stderr
    assert "my_job.py" in failed.stderr, "the function's own traceback"
    words = command(script, "run", "--min-np", "2", "--start-timeout", "0.5", "--job-name", "two")
    words[words.index("local[2]")] = "local[1]"
    short = CliRunner().invoke(main, words)
    assert short.exit_code == 3, short.output
    assert "min_num_proc" in short.stderr


# ---- what is resolved, without Spark


def test_dry_run_prints_what_would_be(script: Path) -> None:
    (script.parent / "job.yaml").write_text("global_batch: 64\nseed: 1\nreset_limit: 9\n")
    words = ["run", f"{script}:train", "-np", "4", "--min-np", "2", "--max-num-proc", "8"]
    words += ["--network-interfaces", "a,b", "--env", "KEY=hush"]
    words += ["--config-file", str(script.parent / "job.yaml"), "--set", "seed=2", "--set", "env.TOKEN=hush"]
    words += ["--set", "reset_limit=5", "--reset-limit", "3", "--master", "yarn", "--conf", "spark.task.cpus=2"]
    words += ["--arg", "added=1 2", "--no-tracking", "--dry-run"]
    cli = CliRunner().invoke(main, words)
    assert cli.exit_code == 0, cli.output
    settings = yaml.safe_load(cli.stdout)
    told = {name: settings[name] for name in ("num_proc", "min_num_proc", "max_num_proc", "global_batch", "seed")}
    assert told == {"num_proc": 4, "min_num_proc": 2, "max_num_proc": 8, "global_batch": 64, "seed": 2}
    assert (settings["reset_limit"], settings["nics"], settings["tracking"]) == (3, ["a", "b"], False)
    assert settings["env"] == ["KEY", "TOKEN"]
    assert "hush" not in cli.stdout
    submit = shlex.split(cli.stdout.splitlines()[0].removeprefix("# "))
    assert submit[:5] == ["spark-submit", "--master", "yarn", "--conf", "spark.task.cpus=2"]
    assert submit[5].endswith("cli.py")
    again = CliRunner().invoke(main, [*submit[6:], "--dry-run"])
    assert again.exit_code == 0, again.output
    assert yaml.safe_load(again.stdout) == settings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "SCRIPT:train", "--np", "2"], "No such option"),
        (["run", "SCRIPT:train", "-np", "0"], "num_proc=0"),
        (["run", "SCRIPT:train", "--set", "nonsense=1"], "unknown option 'nonsense'"),
        (["run", "SCRIPT:train", "--set", "seed=[1"], "cannot be read as YAML"),
        (["run", "SCRIPT:train", "--set", "seed"], "expected NAME=VALUE"),
        (["run", "SCRIPT:train", "--set", "seed=1", "--set", "seed.a=1"], "single value"),
        (["run", "SCRIPT:train", "--conf", "=1"], "expected NAME=VALUE"),
        (["run", "SCRIPT:BASE"], "has no function 'BASE'; it has train"),
        (["run", "no_such_module_at_all:train"], "cannot import no_such_module_at_all"),
        (["resume", "SCRIPT:train"], "--job-name"),
        (["resume", "SCRIPT:train", "--job-name", "none", "--work-dir", "DIR"], "there is no job 'none'"),
        (["run", "SCRIPT:train", "--work-dir", "SCRIPT"], "cannot be made"),
    ],
)
def test_wrong_usage_ends_with_2(script: Path, words: list[str], said: str) -> None:
    given = [word.replace("SCRIPT", str(script)).replace("DIR", str(script.parent)) for word in words]
    cli = CliRunner().invoke(main, given)
    assert cli.exit_code == 2, cli.output
    assert said in " ".join(cli.stderr.split())


@pytest.mark.parametrize("words", [["run", "--job-name", "job"], ["chaos", "--job-name", "job"]])
def test_a_job_folder_that_cannot_be_made_is_named_before_anything_starts(
    script: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in ("elastic_spark.runner.session", "elastic_spark.testing.chaos.StandaloneCluster"):
        monkeypatch.setattr(start, lambda *_, **__: pytest.fail("Spark was started"))
    folder = script.parent / "work"
    folder.mkdir()
    (folder / "job").touch()
    cli = CliRunner().invoke(main, [words[0], f"{script}:train", *words[1:], "--work-dir", str(folder)])
    assert (cli.exit_code, "cannot be made" in cli.stderr) == (2, True), cli.output


@pytest.fixture
def somebody() -> Iterator[Path]:
    """A folder of a user who, unlike root, may not do everything: `os.access` asks for the real one."""
    user = os.getuid()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        if user == 0:
            os.setresuid(65534, 0, 0)
        yield Path(folder)
        os.setresuid(user, user, user)


def test_a_job_folder_that_is_ones_own_will_do(script: Path, somebody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def start(*_: object) -> None:
        raise Started

    monkeypatch.setattr(runner, "session", start)
    for name, mode in (("job", 0o777), ("", 0o555)):
        (somebody / "work" / name).mkdir(parents=True, exist_ok=True)
        (somebody / "work" / name).chmod(mode)
    words = ["run", f"{script}:train", "--work-dir", str(somebody / "work"), "--job-name"]
    assert isinstance(CliRunner().invoke(main, [*words, "job"]).exception, Started)
    (somebody / "work").chmod(0o755)
    (somebody / "work" / "job").chmod(0o555)
    refused = CliRunner().invoke(main, [*words, "job"])
    assert (refused.exit_code, "is read-only" in refused.stderr) == (2, True), refused.output


def test_a_file_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken_job.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(ConfigError, match=r"broken_job\.py cannot be loaded: ModuleNotFoundError"):
        runner.load_function(f"{tmp_path / 'broken_job.py'}:train")


def test_functions_of_installed_modules_stay_where_they_are() -> None:
    assert runner.load_function("elastic_spark.runner:session") is runner.session
    assert runner.load_function("shlex:split") is shlex.split
    with pytest.raises(ConfigError, match="has no function"):
        runner.load_function("shlex:nothing")


def test_exit_codes_are_told() -> None:
    told = CliRunner().invoke(main, ["run", "--help"]).stdout
    assert [line.split()[0] for line in told.partition("Exit codes:")[2].strip().splitlines()] == list("01234")


# ---- ElasticRunner


def add_up(scale):
    import horovod.torch as hvd
    import torch

    hvd.init()
    print("adding", flush=True)
    return scale * float(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)[0])


def test_a_runner_with_negative_np_runs_on_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trial = es.ElasticRunner(np=-2, min_np=2, driver_log_verbosity="all", work_dir=str(tmp_path), tracking=False)
    assert trial.run(add_up, scale=10.0) == 30.0
    assert len([line for line in capfd.readouterr().err.splitlines() if line.endswith("] adding")]) == 2


class Unloadable:
    """Stands for what only this process can make."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise FileNotFoundError("boom-9")


def test_what_fails_in_a_try_out_is_raised_here() -> None:
    with pytest.raises(FileNotFoundError, match="boom-9"):
        es.ElasticRunner(np=-1).run(add_up, scale=Unloadable())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"np": 0}, "np=0"),
        ({"np": 2, "min_np": 3}, "min_num_proc=3 is more than num_proc=2"),
        ({"np": -2, "max_np": 1}, "num_proc=2 is more than max_num_proc=1"),
        ({"np": 1, "driver_log_verbosity": "some"}, "'some'"),
        ({"np": 1, "nonsense": 1}, "unknown option 'nonsense'"),
    ],
)
def test_a_runner_refuses_at_once(options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        es.ElasticRunner(**options)


def test_a_runner_says_what_cannot_be_sent() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent"):
        es.ElasticRunner(np=-1).run(lambda: lock)


def test_a_try_out_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed: its child ends its job and goes."""
    code = f"""
        import os, time
        import elastic_spark as es

        def waits():
            open({str(tmp_path / "pid")!r} + ".new", "w").write(str(os.getpid()))
            os.rename({str(tmp_path / "pid")!r} + ".new", {str(tmp_path / "pid")!r})
            while True:
                time.sleep(0.1)

        es.ElasticRunner(np=-1, work_dir={str(tmp_path / "work")!r}, tracking=False).run(waits)
    """
    with open(tmp_path / "output.txt", "w") as output:
        parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=output, stderr=output)
        try:
            wait_for(lambda: (tmp_path / "pid").exists() or parent.poll() is not None, 100.0, "the worker")
            worker = int((tmp_path / "pid").read_text())
        finally:
            parent.kill()
            parent.wait()
    wait_for(lambda: not os.path.exists(f"/proc/{worker}"), 60.0, "the end of the worker")
