"""``elastic-spark doctor``: is this machine fit to run a job, and what to do where it is not.

Each check is a function that returns one `Finding`; what a check needs from outside (output of a command, a version)
is read by the small functions at the end, so that the judgement itself can be tested. A check never raises and takes
seconds at most. `None` for ``ok`` is a remark that is no fault.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic_spark.build_horovod import BUILD_COMMAND, HOROVOD_VERSION, PROBE
from elastic_spark.horovod_mends import MENDS_VERSION

GIB = 2**30
INSTALL_JAVA = (
    "Debian, Ubuntu: apt-get install -y openjdk-17-jre-headless; conda: conda install -c conda-forge openjdk=17; "
    "then JAVA_HOME or PATH must lead to it"
)


@dataclass(frozen=True)
class Finding:
    """Outcome of one check: ``ok`` True, False, or None for a remark; ``advice`` says what to do."""

    name: str
    ok: bool | None
    seen: str
    advice: str = ""

    def line(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "note"}[self.ok]
        return f"{mark:<5} {self.name:<9} {self.seen}" + (f"\n      {'':<9} -> {self.advice}" if self.advice else "")


def check_python(version: tuple[int, int]) -> Finding:
    seen = f"{version[0]}.{version[1]} ({sys.executable})"
    if (3, 11) <= version < (3, 13):
        return Finding("Python", True, seen)
    return Finding("Python", False, seen, "use Python 3.11 or 3.12")


def java_major(version_output: str) -> int | None:
    """Major version from the output of ``java -version``: 8 for ``1.8.0_382``, 17 for ``17.0.9``."""
    match = re.search(r'version "(?:1\.)?(\d+)', version_output)
    return int(match.group(1)) if match else None


def check_java(version_output: str | None) -> Finding:
    """``version_output`` is what ``java -version`` printed; None: there is no java."""
    if version_output is None:
        return Finding("Java", False, "none in JAVA_HOME or on the PATH", INSTALL_JAVA)
    major = java_major(version_output)
    first = version_output.strip().splitlines()[0] if version_output.strip() else "no output"
    if major is None or major < 17:
        return Finding("Java", False, first, f"Spark needs Java 17 or newer. {INSTALL_JAVA}")
    return Finding("Java", True, first)


def check_package(name: str, version: str | None, at_least: tuple[int, ...], below: tuple[int, ...]) -> Finding:
    """An importable package in a range of versions, the upper end open."""
    low, high = (".".join(map(str, end)) for end in (at_least, below))
    wanted = f'pip install "{name}>={low},<{high}"'
    if version is None:
        return Finding(name, False, "not installed", wanted)
    release = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    return Finding(name, True, version) if at_least <= release < below else Finding(name, False, version, wanted)


def check_horovod(version: str | None, probe: str | None, error: str) -> Finding:
    """``probe``: JSON printed by `elastic_spark.build_horovod.PROBE`, None if it failed with ``error``."""
    if version is None:
        return Finding("Horovod", False, "not installed", f"build it against the installed torch: {BUILD_COMMAND}")
    if probe is None:
        reason = next((line for line in reversed(error.strip().splitlines()) if line.strip()), "no output")
        return Finding(
            "Horovod", False, f"{version}, without usable torch support: {reason}",
            f"it was built without torch or for another torch. Build it for this one: {BUILD_COMMAND} --rebuild",
        )  # fmt: skip
    found = json.loads(probe)
    if not found["gloo"]:
        return Finding("Horovod", False, f"{version}, built without Gloo", f"{BUILD_COMMAND} --rebuild")
    if version != HOROVOD_VERSION or found["mends"] == 0:
        return Finding(
            "Horovod", None, f"{version}, stock build",
            f"works; a worker that dies while others initialise takes them along. Mended build: {BUILD_COMMAND}",
        )  # fmt: skip
    if found["mends"] != MENDS_VERSION:
        seen = f"{version}, mends of version {found['mends']}, this package has {MENDS_VERSION}"
        return Finding("Horovod", None, seen, BUILD_COMMAND)
    return Finding("Horovod", True, f"{version}, torch {found['torch']}, Gloo, mended")


def check_space(name: str, path: str, free_bytes: int | None, wanted_bytes: int, used_for: str) -> Finding:
    if free_bytes is None:
        return Finding(name, None, f"{path} does not exist", f"used for {used_for}")
    seen = f"{free_bytes / GIB:.1f} GiB free in {path}"
    if free_bytes >= wanted_bytes:
        return Finding(name, True, seen)
    return Finding(name, None, seen, f"less than {wanted_bytes / GIB:.1f} GiB; used for {used_for}")


def examine() -> list[Finding]:
    """All checks on this machine, in the order in which things are needed."""
    checks: list[Callable[[], Finding]] = [
        lambda: check_python((sys.version_info.major, sys.version_info.minor)),
        lambda: check_java(_java_version()),
        lambda: check_package("torch", _version("torch"), (2, 1), (3,)),
        lambda: check_horovod(_version("horovod"), *_probe_horovod()),
        lambda: check_package("pyspark", _version("pyspark"), (3, 5), (5,)),
        lambda: check_package("mlflow", _version("mlflow") or _version("mlflow-skinny"), (2, 13), (4,)),
        lambda: check_package("pandas", _version("pandas"), (1, 5), (3,)),
        lambda: check_space(
            "disk", os.getcwd(), _free("."), 2 * GIB, "checkpoints and event logs, unless put elsewhere"
        ),
        lambda: check_space("shm", "/dev/shm", _free("/dev/shm"), GIB // 4, "snapshots of the training state"),
    ]
    return [check() for check in checks]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _java_version() -> str | None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        return None
    try:
        return subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None


def _probe_horovod() -> tuple[str | None, str]:
    """Import Horovod in an interpreter of its own: a library that does not fit may end the process."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return None, "import did not end within 120 s"
    if done.returncode != 0:
        return None, done.stderr or f"exit code {done.returncode}"
    return done.stdout.strip().splitlines()[-1], ""


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
