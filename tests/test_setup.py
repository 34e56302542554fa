"""Set-up: what the doctor says, edits that must fit, and that no Horovod without torch goes unsaid."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import ports
import pytest
from click.testing import CliRunner

from elastic_spark import build_horovod, doctor
from elastic_spark.cli import main
from elastic_spark.errors import EnvironmentUnfit
from elastic_spark.horovod_mends import MENDS, MENDS_VERSION, PORT, Edit

ROOT = Path(__file__).parents[1]


def test_doctor_finds_this_machine_fit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elastic_spark.cli", "doctor"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith(("ok ", "note "))]) == 9
    assert re.search(r"^ok +Horovod +0\.28\.1, torch .*, Gloo, mended$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("output", "major", "ok"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime', 17, True),
        ('java version "1.8.0_382"', 8, False),
        ('openjdk version "21" 2023-09-19', 21, True),
        ("", None, False),
    ],
)
def test_java(output: str, major: int | None, ok: bool) -> None:
    assert doctor.java_major(output) == major
    finding = doctor.check_java(output)
    assert finding.ok is ok
    assert ok or "apt-get install" in finding.advice


def test_no_java_says_what_to_install() -> None:
    finding = doctor.check_java(None)
    assert finding.ok is False
    assert "openjdk-17" in finding.line()


@pytest.mark.parametrize(("version", "ok"), [((3, 10), False), ((3, 11), True), ((3, 12), True), ((3, 13), False)])
def test_python(version: tuple[int, int], ok: bool) -> None:
    assert doctor.check_python(version).ok is ok


@pytest.mark.parametrize(
    ("version", "ok"), [(None, False), ("2.3.3", True), ("3.0.0", False), ("1.4.9", False), ("1.5.0+local.3", True)]
)
def test_package_range(version: str | None, ok: bool) -> None:
    finding = doctor.check_package("pandas", version, (1, 5), (3,))
    assert finding.ok is ok
    assert ok or finding.advice == 'pip install "pandas>=1.5,<3"'


def test_horovod_findings_name_the_command() -> None:
    command = build_horovod.BUILD_COMMAND
    probe = {"torch": "2.13.0", "gloo": True, "mends": MENDS_VERSION}
    missing = doctor.check_horovod(None, None, "")
    assert missing.ok is False
    assert command in missing.advice
    torchless = doctor.check_horovod(
        "0.28.1", None, "Traceback\nImportError: Extension horovod.torch has not been built"
    )
    assert torchless.ok is False
    assert "has not been built" in torchless.seen
    assert command in torchless.advice
    assert doctor.check_horovod("0.28.1", json.dumps(probe | {"gloo": False}), "").ok is False
    stock = doctor.check_horovod("0.28.1", json.dumps(probe | {"mends": 0}), "")
    assert stock.ok is None
    assert command in stock.advice
    assert doctor.check_horovod("0.28.1", json.dumps(probe | {"mends": MENDS_VERSION + 1}), "").ok is None
    assert doctor.check_horovod("0.28.1", json.dumps(probe), "").ok is True


def test_space() -> None:
    assert doctor.check_space("shm", "/dev/shm", None, 1, "snapshots").ok is None
    assert doctor.check_space("shm", "/dev/shm", 2**20, 2**30, "snapshots").ok is None
    assert doctor.check_space("disk", "/", 2**40, 2**30, "checkpoints").ok is True


def test_edits_must_fit_exactly(tmp_path: Path) -> None:
    (tmp_path / "a.cc").write_text("one two two")
    build_horovod.apply_edits(tmp_path, [Edit("m", "a.cc", "one", "1@MENDS_VERSION@")])
    assert (tmp_path / "a.cc").read_text() == f"1{MENDS_VERSION} two two"
    for edit in (Edit("m", "a.cc", "two", "2"), Edit("m", "a.cc", "three", "3"), Edit("m", "b.cc", "x", "y")):
        with pytest.raises(EnvironmentUnfit, match=r"--stock"):
            build_horovod.apply_edits(tmp_path, [edit])
    assert (tmp_path / "a.cc").read_text() == f"1{MENDS_VERSION} two two"


def test_a_wheel_is_kept_for_what_it_was_built_for() -> None:
    keys = {
        build_horovod.build_key("2.13.0", PORT),
        build_horovod.build_key("2.13.0", PORT + MENDS),
        build_horovod.build_key("2.12.0", PORT),
    }
    assert len(keys) == 3
    assert build_horovod.build_key("2.13.0", PORT) in keys, "the same each time"


def test_wheel_cache_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ELASTIC_SPARK_WHEEL_CACHE", str(tmp_path))
    assert build_horovod.cache_root() == tmp_path
    monkeypatch.delenv("ELASTIC_SPARK_WHEEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert build_horovod.cache_root() == tmp_path / "x" / "elastic_spark" / "wheels"


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EnvironmentUnfit, match=r"g\+\+.*cmake.*make.*apt-get install"):
        build_horovod._require_tools(extra_path="/nonexistent")


def test_pip_may_not_install_horovod_by_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [need for needs in project.get("optional-dependencies", {}).values() for need in needs]
    assert not [need for need in project["dependencies"] + extras if need.startswith("horovod")]


def test_errors_of_a_command_are_one_line() -> None:
    cli = CliRunner().invoke(main, ["checkpoints", "verify", "/nonexistent/store", "--which", "latest"])
    assert cli.exit_code == 1
    assert cli.stderr.startswith("Error: ")
    assert "Traceback" not in cli.output


def test_report_command(tmp_path: Path) -> None:
    log = ROOT / "tests" / "goldens" / "churn.jsonl"
    cli = CliRunner().invoke(main, ["report", str(log), "--html", str(tmp_path / "page.html")])
    assert cli.exit_code == 0, cli.output
    assert cli.stdout.strip()
    assert (tmp_path / "page.html").read_text().startswith("<!")


@pytest.mark.parametrize("first", ["10000", "1024", "32768"])
def test_a_free_port_is_found_where_the_systems_own_range_begins_low(tmp_path, monkeypatch, first):
    monkeypatch.setattr(ports, "RANGE", tmp_path / "range")
    ports.RANGE.write_text(f"{first}\t60999\n")
    port = ports.free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    assert port < 32768 or first != "32768"
