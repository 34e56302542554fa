"""Build Horovod 0.28.1 against the installed torch, keep the wheel in a cache, install it.

Horovod is not a dependency that pip may install by itself: in pip's isolated build there is no torch, and Horovod then
builds *without* torch and says nothing. So it is built here, by ``python -m elastic_spark.build_horovod`` or
``elastic-spark build-horovod``: without isolation, torch required, Gloo on, everything else off. The source release
comes through pip (its indexes, proxies and constraints apply); the edits of `elastic_spark.horovod_mends` are applied
before the build, or only what newer compilers need with ``--stock``.

The wheel is kept under ``ELASTIC_SPARK_WHEEL_CACHE`` (else the user's cache directory) in a folder whose name says what
it was built for: Python, torch, platform, and a digest of the edits. After the installation a fresh interpreter must
import ``horovod.torch`` and name the build it found.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from elastic_spark.errors import EnvironmentUnfit
from elastic_spark.horovod_mends import MENDS, MENDS_VERSION, PORT, Edit

HOROVOD_VERSION = "0.28.1"
BUILD_COMMAND = "python -m elastic_spark.build_horovod"
# Horovod's setup.py imports pkg_resources, which setuptools 81 dropped. These go into a scratch folder for the build.
BUILD_REQUIREMENTS = ("setuptools<81", "wheel", "packaging", "cffi")
PROGRESS_S = 20.0
RUN_REQUIREMENTS = ("cffi", "cloudpickle", "packaging", "psutil", "pyyaml")

PROBE = """
import ctypes, json
import torch
import horovod.torch as hvd
from horovod.torch import mpi_ops
lib = mpi_ops._basics.MPI_LIB_CTYPES
mends = getattr(lib, "horovod_elastic_spark_mends", None)
print(json.dumps({"torch": torch.__version__, "gloo": bool(hvd.gloo_built()), "mends": mends() if mends else 0}))
"""


def build_key(torch_version: str, edits: Iterable[Edit]) -> str:
    """Name of the cache folder: what a wheel depends on."""
    digest = hashlib.sha256(repr(tuple(edits)).encode()).hexdigest()[:12]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_")
    return f"horovod-{HOROVOD_VERSION}-{python}-torch-{torch_version}-{platform}-{digest}"


def cache_root() -> Path:
    """Where wheels are kept: ``ELASTIC_SPARK_WHEEL_CACHE``, else the user's cache directory."""
    chosen = os.environ.get("ELASTIC_SPARK_WHEEL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic_spark" / "wheels"


def apply_edits(root: Path, edits: Iterable[Edit]) -> None:
    """Apply ``edits`` to the source tree under ``root``.

    Raises:
        EnvironmentUnfit: the text of an edit is not found exactly once: not the release the edits were written for.
    """
    for edit in edits:
        path = root / edit.path
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = text.count(edit.old)
        if found != 1:
            first_line = edit.old.strip().splitlines()[0]
            raise EnvironmentUnfit(
                f"mend {edit.mend!r} does not fit: {edit.path} holds the text that starts with {first_line!r} {found} "
                f"times, expected once. The edits are for the source release of Horovod {HOROVOD_VERSION}; "
                f"`{BUILD_COMMAND} --stock` builds without them"
            )
        path.write_text(text.replace(edit.old, edit.new.replace("@MENDS_VERSION@", str(MENDS_VERSION))), "utf-8")


def build_wheel(target: Path, edits: Sequence[Edit], log: Path) -> Path:
    """Fetch, edit and build; returns the wheel, which appears under ``target`` complete or not at all."""
    _require_tools()
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as scratch_name:
        scratch = Path(scratch_name)
        tools = scratch / "tools"
        _pip(["install", "-q", "--target", str(tools), *BUILD_REQUIREMENTS], log)
        environment = {
            "PYTHONPATH": str(tools),
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "MAKEFLAGS": os.environ.get("MAKEFLAGS") or f"-j{len(os.sched_getaffinity(0))}",
        }
        release = f"horovod=={HOROVOD_VERSION}"
        download = ["download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(scratch)]
        _pip([*download, release], log, environment)
        (archive,) = scratch.glob("horovod-*.tar.gz")
        with tarfile.open(archive) as source:
            source.extractall(scratch, filter="data")
        root = scratch / f"horovod-{HOROVOD_VERSION}"
        apply_edits(root, edits)
        out = scratch / "wheel"
        _pip(["wheel", "-v", "--no-build-isolation", "--no-deps", "-w", str(out), str(root)], log, environment)
        (built,) = out.glob("horovod-*.whl")
        target.mkdir(parents=True, exist_ok=True)
        partial = target / f".{built.name}.{os.getpid()}"
        shutil.copyfile(built, partial)
        os.replace(partial, target / built.name)
        return target / built.name


def ensure_horovod(*, stock: bool = False, rebuild: bool = False, target: Path | None = None) -> str:
    """Build unless cached, install, and check in a fresh interpreter. Returns one line about what is installed.

    ``target``: a folder to install to, for ``PYTHONPATH``, instead of where this interpreter's packages are.
    """
    edits = PORT if stock else PORT + MENDS
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentUnfit("Horovod is built against torch, and none is installed: pip install torch") from None
    folder = cache_root() / build_key(torch_version, edits)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    wheel = next(folder.glob("horovod-*.whl"), None)
    if wheel is None or rebuild:
        log.write_text("")
        print(f"building Horovod {HOROVOD_VERSION} against torch {torch_version} (minutes; log: {log})", flush=True)
        wheel = build_wheel(folder, edits, log)
    else:
        print(f"using {wheel}", flush=True)
    _pip(["install", "-q", *RUN_REQUIREMENTS], log)
    place = ["--upgrade", "--target", str(target)] if target is not None else ["--force-reinstall"]
    _pip(["install", "-q", *place, "--no-deps", str(wheel)], log)
    paths = [str(target)] if target is not None else []
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, env=env)
    if probe.returncode != 0:
        raise EnvironmentUnfit(f"the installed Horovod cannot be imported with torch:\n{probe.stderr[-2000:]}")
    return f"Horovod {HOROVOD_VERSION} installed: {probe.stdout.strip()}"


def _require_tools(extra_path: str = str(Path(sys.executable).parent)) -> None:
    """Name what the build needs and this machine lacks; ``extra_path``: where a cmake from PyPI lies."""
    path = os.pathsep.join([extra_path, os.environ.get("PATH", "")])
    wanted = {"g++": (os.environ.get("CXX") or "g++", "c++"), "cmake": ("cmake",), "make": ("make",)}
    missing = [name for name, names in wanted.items() if not any(shutil.which(each, path=path) for each in names)]
    if missing:
        raise EnvironmentUnfit(
            f"building Horovod needs {', '.join(missing)}. On Debian or Ubuntu: apt-get install g++ make cmake; "
            "with conda: conda install -c conda-forge cxx-compiler make cmake; cmake alone also: pip install cmake"
        )


def _pip(arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run pip of this interpreter, with the user's own pip configuration; output goes to ``log``.

    While it runs, the share that the compiler reports is printed from time to time.
    """
    command = [sys.executable, "-m", "pip", *arguments]
    scripts = str(Path(sys.executable).parent)  # a cmake from PyPI lies there
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    started = time.monotonic()
    with log.open("a", encoding="utf-8", errors="replace") as out:
        print(f"$ {' '.join(command)}", file=out, flush=True)
        process = subprocess.Popen(
            command, env={**os.environ, "PATH": path, **(environment or {})}, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=PROGRESS_S)
                    break
                except subprocess.TimeoutExpired:
                    shares = re.findall(r"^ *\[ *(\d+)%\]", log.read_text("utf-8", "replace"), re.MULTILINE)
                    share = f"{shares[-1]} %, " if shares else ""
                    print(f"  {share}{time.monotonic() - started:.0f} s", flush=True)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code != 0:
        raise EnvironmentUnfit(
            f"pip {arguments[0]} failed (whole log: {log}):\n{log.read_text('utf-8', 'replace')[-3000:]}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=BUILD_COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stock", action="store_true", help="build without the mends")
    parser.add_argument("--rebuild", action="store_true", help="build even if a wheel is in the cache")
    parser.add_argument("--target", type=Path, metavar="DIR", help="install into DIR, for PYTHONPATH")
    options = parser.parse_args(arguments)
    try:
        print(ensure_horovod(stock=options.stock, rebuild=options.rebuild, target=options.target))
    except EnvironmentUnfit as unfit:
        print(f"error: {unfit}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
