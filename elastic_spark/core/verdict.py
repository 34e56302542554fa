"""What a reviewer wants to know in thirty seconds: the figures of a summary as labelled lines. Pure.

The terminal, the report and the description of the MLflow run all show these lines, so they never differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

#: A label, the figure in words, and how to take it: "ok", "bad", or "" for plain facts.
Line = tuple[str, str, str]


def verdict(summary: Mapping[str, Any]) -> list[Line]:
    """The lines for a summary of `core.metrics`, what matters first: MLflow shows four, and the rest on demand."""
    return [
        ("status", _status(summary), {"FINISHED": "ok", "FAILED": "bad", "KILLED": "bad"}.get(summary["status"], "")),
        ("rows", _rows(summary), "bad" if summary["rows_twice"] or summary["rows_never"] else "ok"),
        ("workers", _sizes(summary["world_sizes"]), ""),
        ("changes", _changes(summary["changes"]), ""),
        ("pause at a change", _pauses(summary), ""),
        ("lost by roll-back", _lost(summary), "bad" if summary["steps_lost"] else "ok"),
        ("steps", f"{summary['steps']:,}", ""),
        ("guard", _guard(summary), "bad" if summary["guard_alarms"] else "ok"),
        ("goodput", "-" if summary["goodput"] is None else f"{summary['goodput']:.1%} of the ideal rate", ""),
        ("waiting for data", _waiting(summary["data_wait_fraction"]), ""),
        ("checkpoints", _checkpoints(summary), "bad" if _end_is_lost(summary) else ""),
        ("resumed from", summary["resumed_from"] or "-", ""),
        ("data", _data(summary["datasets"]), ""),
        ("time", f"{seconds(summary['wall_s'])}, warnings: {summary['warnings']}", ""),
    ]


def headline(summary: Mapping[str, Any]) -> str:
    """The verdict in one line: ``FINISHED: rows 77,100 once, 0 twice, 0 never; lost by roll-back nothing; ...``."""
    said = [f"rows {_rows(summary)}", f"lost by roll-back {_lost(summary)}"]
    if summary["changes"]:
        said.append(f"{len(summary['changes'])} changes, pause {_pauses(summary)}")
    return f"{summary['status']}: {'; '.join(said)}"


def seconds(value: float | None) -> str:
    """A time for people: ``0.21 s``, ``12.3 s``, ``4 min 05 s``, ``2 h 03 min``; ``-`` for None."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.2f} s"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def change_line(change: Mapping[str, Any]) -> str:
    """One change in words: ``gen 3: 4 -> 3 workers (executor lost), pause 0.21 s``."""
    what = f"gen {change['generation']}: {change['from_size']} -> {change['to_size']} workers ({change['cause']})"
    restored = f", restored from {change['restored_from']}" if change.get("restored_from") else ""
    pause = f", pause {seconds(change['pause_s'])}" if change.get("pause_s") is not None else ""
    return what + restored + pause


def epoch_line(epoch: Mapping[str, Any]) -> str:
    """One epoch in words: ``train, epoch 2: 1,200 once, 0 twice, 0 never, sequence 3f0c9a...``."""
    counts = ", ".join(f"{epoch[f'rows_{what}']:,} {what}" for what in ("once", "twice", "never"))
    rest = "" if epoch["finished"] else f", {epoch['rows_open']:,} open"
    rest += f", {epoch['rows_inherited']:,} known from a checkpoint only" if epoch["rows_inherited"] else ""
    digest = epoch["digest"] or "not known"
    return f"{epoch['dataset']}, epoch {epoch['epoch'] + 1}: {counts}{rest}, sequence {digest}"


def _status(summary: Mapping[str, Any]) -> str:
    error = str(summary["error"]).strip()
    return f"{summary['status']}: {error.splitlines()[-1][:200]}" if error else str(summary["status"])


def _sizes(sizes: list[tuple[float, int]]) -> str:
    if not sizes:
        return "never started"
    if len(sizes) <= 12:
        return " -> ".join(str(size) for _, size in sizes)
    low, high = min(size for _, size in sizes), max(size for _, size in sizes)
    return f"{sizes[0][1]} -> {sizes[-1][1]}, between {low} and {high}"


def _changes(changes: list[dict[str, Any]]) -> str:
    causes = Counter(re.sub(r"^w\d+ lost: ", "", change["cause"]) for change in changes)
    return f"{len(changes)}" + (
        f": {', '.join(f'{n} x {cause}' for cause, n in causes.most_common())}" if causes else ""
    )


def _rows(summary: Mapping[str, Any]) -> str:
    if not summary["datasets"]:
        return "not audited: the function reads its own data"
    parts = [f"{summary[f'rows_{what}']:,} {what}" for what in ("once", "twice", "never")]
    for what, words in (("open", "in an unfinished epoch"), ("inherited", "known from a checkpoint only")):
        if summary[f"rows_{what}"]:
            parts.append(f"{summary[f'rows_{what}']:,} {words}")
    unexplained = summary["rows_unexplained"]
    note = f"; {unexplained:,} differ from what workers reported" if unexplained else ""
    return ", ".join(parts) + note


def _pauses(summary: Mapping[str, Any]) -> str:
    if summary["pause_s_max"] is None:
        return "-"
    names = (("p50", "pause_s_p50"), ("p95", "pause_s_p95"), ("max", "pause_s_max"))
    text = ", ".join(f"{name} {seconds(summary[key])}" for name, key in names)
    rto = summary["rto_s_p50"]
    return text + (f"; back at 90 % of its rate after {seconds(rto)} (p50)" if rto is not None else "")


def _lost(summary: Mapping[str, Any]) -> str:
    if not summary["steps_lost"]:
        return "nothing"
    figures = (f"{summary['steps_lost']:,} steps", f"{summary['rows_lost']:,} rows", seconds(summary["seconds_lost"]))
    return f"{', '.join(figures)}: trained again"


def _waiting(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.2%} of the time"


def _guard(summary: Mapping[str, Any]) -> str:
    alarms = summary["guard_alarms"]
    return f"{len(alarms)} alarms, the first: {alarms[0]}" if alarms else "nothing"


def _checkpoints(summary: Mapping[str, Any]) -> str:
    found = summary["checkpoints"]
    parts = [f"{len(found)} written" + (f", newest at step {found[-1]['step']:,}" if found else "")]
    if summary["rpo_s_max"] is not None:
        parts.append(f"RPO at worst {seconds(summary['rpo_s_max'])}")
    for what in ("skipped", "rejected"):
        if summary[f"checkpoints_{what}"]:
            parts.append(f"{summary[f'checkpoints_{what}']} {what}")
    return ", ".join(parts) + (", the end of training is not in one" if _end_is_lost(summary) else "")


def _end_is_lost(summary: Mapping[str, Any]) -> bool:
    """The job finished, and its last state was to be written and could not be."""
    newest = summary["checkpoints"][-1]["step"] if summary["checkpoints"] else 0
    return summary["status"] == "FINISHED" and bool(summary["checkpoints_skipped"]) and newest < summary["steps"]


def _data(datasets: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{n}: {item['rows']:,} rows, {item['digest'][:19]}" for n, item in datasets.items()) or "-"
