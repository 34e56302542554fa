"""One worker of four takes twice as long for a row: throughput against the ideal, before and after. One JSON line.

    python tests/bench/bench_uneven.py [seconds] [slow factor] [workers]

Real worker processes on a Spark of its own, ``local[workers]``. A step sleeps for 4 ms a row (the slow worker: twice as
long), so that the machine's cores, of which there may be fewer than workers, are not what is measured.

* ``ideal_rows_per_s``: the sum of the workers' own rates by the sleep alone.
* ``share_equal``: rows/s of the steps before ownership followed speed, by the ideal; ``share_balanced``: from then on,
  without the pause of the change; ``share_balanced_with_pause``: with it, until the end.
* ``pause_s``: of the change. ``changes``: how many there were.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import elastic_spark as es
from elastic_spark.core import events as ev
from elastic_spark.runner import session
from elastic_spark.testing.counting import assert_exact, counting_data, train_counting

ROW_S, BATCH = 0.004, 512


def main() -> None:
    seconds, factor, workers = [*map(float, sys.argv[1:]), *(60.0, 2.0, 4.0)[len(sys.argv) - 1 :]]
    count = int(workers)
    ideal = (count - 1 + 1 / factor) / ROW_S
    rows = BATCH * max(1, round(seconds * ideal / BATCH))
    with tempfile.TemporaryDirectory(prefix="bench-uneven-") as folder:
        slow = os.path.join(folder, "slow")

        def sleep_s(batch: Any) -> float:
            try:
                os.close(os.open(slow, os.O_CREAT | os.O_EXCL))
                sleep_s.factor = factor  # type: ignore[attr-defined]
            except FileExistsError:
                pass
            return float(batch.rows * ROW_S * getattr(sleep_s, "factor", 1.0))

        spark = session(f"local[{count}]", "bench_uneven", {"spark.ui.enabled": "false"})
        result = es.run(
            train_counting,
            kwargs={"rows": rows, "step_s": sleep_s},
            num_proc=count,
            data={"train": counting_data(spark, rows)},
            global_batch=BATCH,
            tracking=False,
            verbose=0,
            work_dir=folder,
        )
        spark.stop()
        assert_exact(result[0]["w"])
        with Path(result.events_path).open(encoding="utf-8") as lines:
            log = list(ev.read_log(lines))
    print(json.dumps({"bench": "uneven", "workers": count, "factor": factor, "rows": rows, **figures(log, ideal)}))


def figures(log: list[ev.Event], ideal: float) -> dict[str, Any]:
    steps = [event for event in log if isinstance(event, ev.StepsCommitted)]
    times = {g: [t for e in steps if e.generation == g for t in e.times] for g in {e.generation for e in steps}}
    first, last = min(times), max(times)
    balanced = [t for generation in sorted(times)[1:] for t in times[generation]]
    inside = [(ts[-1] - ts[0], len(ts) - 1) for generation, ts in times.items() if generation > first and len(ts) > 1]

    def share(span_s: float, done: int) -> float:
        return round(done * BATCH / span_s / ideal, 4)

    lanes = [event.lanes["train"] for event in log if isinstance(event, ev.GenerationFormed)]
    return {
        "ideal_rows_per_s": ideal,
        "share_equal": share(times[first][-1] - times[first][0], len(times[first]) - 1),
        "share_balanced": share(sum(s for s, _ in inside), sum(n for _, n in inside)) if inside else None,
        "share_balanced_with_pause": share(balanced[-1] - times[first][-1], len(balanced)) if balanced else None,
        "pause_s": round(times[first + 1][0] - times[first][-1], 3) if balanced else None,
        "changes": last - first,
        "lanes": [[len(owned) for owned in ranks] for ranks in lanes],
        "measured_at": time.strftime("%Y-%m-%d", time.gmtime()),
    }


if __name__ == "__main__":
    main()
