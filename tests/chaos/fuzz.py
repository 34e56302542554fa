"""`make fuzz`: many schedules, one after the other. The last line is one JSON object.

    python -m tests.chaos.fuzz --seeds 0:500

With ``--per-job 5`` five schedules strike one job, one after the other, which saves the starts and the ends. Seeds that
fail are kept with their event log and the workers' output below ``--keep``, and named at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from .schedule import schedule
from .world import run_schedules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:500", help="first:end")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "elastic-spark-fuzz")
    parser.add_argument("--per-job", type=int, default=1, help="schedules that strike one job")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no schedule after so many seconds")
    options = parser.parse_args()
    first, end = map(int, options.seeds.split(":"))
    failed: dict[str, str] = {}
    pauses: list[float] = []
    lost = faults = done = 0
    began = time.monotonic()
    for start in range(first, end, options.per_job):
        if time.monotonic() - began > options.limit_s:
            break
        seeds = range(start, min(start + options.per_job, end))
        name = "-".join(str(seed) for seed in sorted({seeds[0], seeds[-1]}))
        folder = options.keep / f"seed-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        started = time.monotonic()
        try:
            figures = run_schedules([schedule(seed) for seed in seeds], folder)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc()
        else:
            pauses += [change["pause_s"] for change in figures["changes"] if change["pause_s"] is not None]
            lost += figures["steps_lost"]
            shutil.rmtree(folder)
        done += len(seeds)
        faults += sum(len(schedule(seed).faults) for seed in seeds)
        verdict = failed.get(name, "held").splitlines()[0]
        print(f"seed {name}: {verdict} ({time.monotonic() - started:.1f} s)", file=sys.stderr, flush=True)
    pauses.sort()
    figures = {
        "schedules": done,
        "faults": faults,
        "failed": failed,
        "changes": len(pauses),
        "pause_s_p50": round(pauses[len(pauses) // 2], 3) if pauses else None,
        "steps_lost_with_all_holders": lost,
    }
    print(json.dumps(figures))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
