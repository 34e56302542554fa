"""What a job's run records besides its events: parameters, how it was made, files."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from elastic_spark import errors
from elastic_spark.config import JobConfig
from elastic_spark.core import events as ev
from elastic_spark.core.lanes import LanePlan


def params(settings: JobConfig, plans: Mapping[str, LanePlan]) -> dict[str, Any]:
    chosen = ("num_proc", "min_num_proc", "max_num_proc", "spares", "global_batch", "seed", "shuffle", "rpo_target_s")
    found: dict[str, Any] = dict(settings.params or {})
    found.update({name: getattr(settings, name) for name in chosen})
    found.update({f"{name}_rows": plan.rows for name, plan in plans.items()})
    found.update({f"{name}_lanes": plan.lanes for name, plan in plans.items()})
    return found


def command(words: Sequence[str]) -> str:
    """As it was typed, without values that may be secret."""
    shown = []
    for before, word in itertools.pairwise(["", *words]):
        hidden = before in ("--env", "--set", "--conf") and "=" in word
        shown.append(f"{word.partition('=')[0]}=HIDDEN" if hidden else word)
    return shlex.join(shown)


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("elastic_spark", "horovod", "torch", "pyspark", "mlflow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed here"
    return found


def artifacts(log: Path, name: str, status: str, say: Callable[[str], object]) -> dict[str, str]:
    """The files of a job that has ended, by artifact path; report and picture are made beside its event log."""
    found = {"elastic/events.jsonl": str(log)}
    if status == "KILLED":  # who has been told to go has no time for a report
        return found
    from elastic_spark.report import render_html, render_png

    page, picture = log.with_name("report.html"), log.with_name("timeline.png")
    try:
        with log.open(encoding="utf-8") as lines:
            events = list(ev.read_log(lines))
        page.write_text(render_html(events, name), encoding="utf-8")
        found["elastic/report.html"] = str(page)
        render_png(events, picture)
        found["elastic/timeline.png"] = str(picture)
    except errors.EnvironmentUnfit:  # no matplotlib: the page has the same picture
        pass
    except Exception as error:  # the job's end must be told whatever happens to its report
        say(f"elastic_spark: no report: {type(error).__name__}: {error}\n")
    return found
