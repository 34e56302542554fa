"""The whole suite, as `make test` runs it: what mostly computes or waits by itself runs beside what starts clusters.

    python -m tests [ARGUMENTS OF PYTEST]

With arguments it is pytest with these. Without, two of them run at a time; what the one beside has said follows at the
end, and the exit code is not 0 unless both are content.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Files that start no cluster and time no recovery. They need six minutes of processor time, and for as long they wait
#: for servers that do not answer.
BESIDE = (
    "core",
    *("test_architecture.py", "test_bounded.py", "test_checkpoint.py", "test_checkpoint_faults.py"),
    *("test_checkpoint_s3.py", "test_conf.py", "test_dynamo.py", "test_estimator.py", "test_freeze.py"),
    *("test_interrupts.py", "test_jobfile.py", "test_memory.py", "test_reader.py", "test_report.py", "test_saver.py"),
    *("test_setup.py", "test_slots.py", "test_status.py", "test_tail.py"),
    *("test_tracking.py", "test_tracking_parts.py"),
)


def main(arguments: Sequence[str]) -> int:
    pytest = [sys.executable, "-m", "pytest"]
    if arguments:
        return subprocess.call([*pytest, *arguments], cwd=ROOT)
    beside = [f"tests/{name}" for name in BESIDE]
    others = [f"--ignore={path}" for path in beside]
    with tempfile.TemporaryFile() as output:
        second = subprocess.Popen(
            [*pytest, "-o", "cache_dir=.pytest_cache/beside", *beside],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = subprocess.call([*pytest, *others], cwd=ROOT)
            code = second.wait() or code
        finally:
            _end(second)
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout.buffer)
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would, so that its tests end what they have started."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
