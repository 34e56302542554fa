"""What of the event log a tracking store is told: events in, records out. Pure.

A record is a small JSON object, so it can wait in a file while the store is away:

* ``{"kind": "metric", "key", "value", "step", "at_ms"}``; NaN and infinities are strings
* ``{"kind": "tag", "key", "value"}``
* ``{"kind": "checkpoint", "step", "uri", "digest", "bytes", "seconds", "world_size"}``
* ``{"kind": "dataset", "name", "digest", "rows", "source"}``
* ``{"kind": "text", "path", "text"}``: a text artifact

**Steps only grow.** Each metric has at most one point per step, at growing steps. What is reported again after a
roll-back or a resume goes to ``replay/<key>``, so the history of ``loss`` has every step once and nothing is hidden.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from elastic_spark.core import events as ev
from elastic_spark.core import guard
from elastic_spark.core.metrics import Pause, PauseMeter, RateMeter
from elastic_spark.core.verdict import change_line, epoch_line, headline, seconds, verdict

Record = dict[str, Any]
#: Tags and texts of a kind that one run gets at most; what comes after is in the log and in the report.
MOST = 100


class Recorder:
    """Not thread-safe. ``newest_step`` is the newest step that the run holds already: 0 for a new one."""

    def __init__(self, newest_step: int = 0) -> None:
        self._newest = newest_step
        self._last_step: dict[str, int] = {}
        self._start = newest_step
        self._pauses = PauseMeter()
        self._rates = RateMeter()
        self._sizes: dict[int, int] = {}
        self._size = 0
        self._generation = -1
        self._changes: dict[int, tuple[int, str]] = {}
        self._count: dict[str, int] = {}
        self._steps_lost = 0
        self._fresh = False

    @property
    def newest_step(self) -> int:
        """The newest step told of so far."""
        return self._newest

    def add(self, event: ev.Event) -> list[Record]:
        """The records of one event."""
        pauses = self._pauses.add(event)
        handler = self._HANDLERS.get(type(event))
        records: list[Record] = handler(self, event) if handler else []
        return records + [record for pause in pauses for record in self._pause(pause)]

    def tick(self, now: float) -> list[Record]:
        """Rates since the last tick, at the newest step; nothing where no step was committed since."""
        if not self._fresh:
            return []
        self._fresh = False
        out = [_tag("elastic.step", self._newest)]
        values: dict[str, float | None] = {"perf/steps_per_s": self._rates.steps_s}
        values["perf/rows_per_s"] = self._rates.rows_s or None
        if self._rates.rows_s and self._size:
            values["perf/rows_per_s_per_worker"] = self._rates.rows_s / self._size
        values["elastic/world_size"] = self._size or None
        for key, value in values.items():
            if value is not None:
                out += self._metric(key, value, self._newest, now, replay=False)
        return out

    def _metric(self, key: str, value: float, step: int, at: float, *, replay: bool) -> list[Record]:
        """One point, if its step is new for the key; else to ``replay/<key>`` or, without ``replay``, nothing."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            return []
        if step <= self._last_step.get(key, self._start):
            if not replay:
                return []
            key = f"replay/{key}"
        else:
            self._last_step[key] = step
        plain = number if math.isfinite(number) else str(number)
        return [{"kind": "metric", "key": key, "value": plain, "step": step, "at_ms": round(at * 1000)}]

    def _numbered(self, key: str, value: str) -> list[Record]:
        """``<key>.<n>`` for the first `MOST`, and ``<key>.count``."""
        number = self._count[key] = self._count.get(key, 0) + 1
        out = [_tag(f"{key}.count", number)]
        return [_tag(f"{key}.{number:03d}", value), *out] if number <= MOST else out

    def _pause(self, pause: Pause) -> list[Record]:
        out = self._metric("elastic/pause_s", pause.seconds, self._newest, pause.resumed_at, replay=False)
        number, text = self._changes.get(pause.generation, (MOST + 1, ""))
        if number <= MOST:
            out.append(_tag(f"elastic.change.{number:03d}", f"{text}, pause {seconds(pause.seconds)}"))
        return out

    # One method per kind of event.

    def _on_start(self, event: ev.JobStarted) -> list[Record]:
        out = [_tag(f"elastic.version.{name}", value) for name, value in event.versions.items()]
        self._start = max(self._start, self._newest)
        if event.resumed_from:
            out += [_tag("elastic.resumed_from", event.resumed_from), _tag("elastic.resumed_step", event.resumed_step)]
        return out

    def _on_dataset(self, event: ev.DatasetFrozen) -> list[Record]:
        source: dict[str, object] = {
            "rows": event.rows,
            "row_groups": event.row_groups,
            "lanes": event.lanes,
            "seed": event.seed,
        }
        source |= {"digest": event.digest, "global_batch": event.global_batch}
        return [
            {"kind": "dataset", "name": event.dataset, "digest": event.digest, "rows": event.rows, "source": source},
            _tag(f"elastic.data.{event.dataset}", event.digest),
        ]

    def _on_formed(self, event: ev.GenerationFormed) -> list[Record]:
        before, self._size = self._size, len(event.members)
        self._sizes[event.generation] = self._size
        if not before:
            return [_tag("elastic.world_size", self._size)]
        who = [f"{what} {', '.join(names)}" for what in ("joined", "lost", "left") if (names := getattr(event, what))]
        text = f"gen {event.generation}: {before} -> {self._size} workers ({event.cause}) at step {event.step}"
        text += "".join(f"; {item}" for item in who)
        text += f"; restored from {event.restored_from}" if event.restored_from else ""
        out = self._numbered("elastic.change", text)
        self._changes[event.generation] = (self._count["elastic.change"], text)
        return [*out, _tag("elastic.world_size", self._size)]

    def _on_steps(self, event: ev.StepsCommitted) -> list[Record]:
        if not event.times:
            return []
        self._rates.add(event)
        self._fresh = True
        self._newest = max(self._newest, event.first_step + len(event.times) - 1)
        out: list[Record] = []
        if event.generation != self._generation:
            self._generation = event.generation
            values = {
                "elastic/generation": event.generation,
                "elastic/world_size": self._sizes.get(event.generation, 0),
            }
            for key, value in values.items():
                out += self._metric(key, value, event.first_step, event.times[0], replay=False)
        epoch = max((epoch for epoch, _ in event.cursors.values()), default=None)
        if epoch is not None:
            out += self._metric("elastic/epoch", epoch, self._newest, event.times[-1], replay=False)
        return out

    def _on_metrics(self, event: ev.MetricsReported) -> list[Record]:
        out: list[Record] = []
        for key, value in event.values.items():
            out += self._metric(key, value, event.step, event.at, replay=True)
        self._newest = max(self._newest, event.step)
        return out

    def _on_roll_back(self, event: ev.StepsRolledBack) -> list[Record]:
        self._steps_lost += event.from_step - event.to_step
        text = f"steps {event.to_step + 1} to {event.from_step} undone: {event.cause}"
        out = self._metric("elastic/steps_lost", self._steps_lost, event.from_step, event.at, replay=False)
        return [*out, *self._numbered("elastic.rollback", text)]

    def _on_alarm(self, event: ev.GuardAlarm) -> list[Record]:
        return self._numbered("elastic.guard", guard.told(event))

    def _on_checkpoint(self, event: ev.CheckpointWritten) -> list[Record]:
        names = ("step", "uri", "digest", "bytes", "seconds", "world_size")
        out: list[Record] = [{"kind": "checkpoint", **{name: getattr(event, name) for name in names}}]
        out += [_tag("elastic.latest_checkpoint", event.uri), _tag("elastic.latest_checkpoint_step", event.step)]
        for key, value in (("checkpoint/seconds", event.seconds), ("checkpoint/megabytes", event.bytes / 1e6)):
            out += self._metric(key, value, event.step, event.at, replay=False)
        return out

    def _on_rejected(self, event: ev.CheckpointRejected) -> list[Record]:
        return self._numbered("elastic.checkpoint_rejected", f"{event.uri}: {event.reason}")

    def _on_skipped(self, event: ev.CheckpointSkipped) -> list[Record]:
        return self._numbered("elastic.checkpoint_skipped", f"step {event.step}: {event.reason}")

    def _on_lost(self, event: ev.WorkerLost) -> list[Record]:
        out = self._numbered("elastic.lost_worker", f"{event.worker}: {event.cause}. {event.detail}".rstrip(". "))
        if event.tail and self._count["elastic.lost_worker"] <= MOST:
            out.append({"kind": "text", "path": f"logs/{event.worker}.txt", "text": event.tail})
        return out

    def _on_warning(self, event: ev.Warned) -> list[Record]:
        return self._numbered("elastic.warning", event.message + (f" [{event.where}]" if event.where else ""))

    def _on_user_failure(self, event: ev.UserFailed) -> list[Record]:
        text = f"{event.worker}, rank {event.rank}, step {event.step}: {event.error}"
        path = f"logs/failure-{event.worker}.txt"
        return [*self._numbered("elastic.failure", text), {"kind": "text", "path": path, "text": event.traceback}]

    def _on_finish(self, event: ev.JobFinished) -> list[Record]:
        return [_tag("elastic.error", event.error)] if event.error else []

    _HANDLERS: dict[type[ev.Event], Any] = {  # noqa: RUF012
        ev.JobStarted: _on_start,
        ev.DatasetFrozen: _on_dataset,
        ev.GenerationFormed: _on_formed,
        ev.StepsCommitted: _on_steps,
        ev.MetricsReported: _on_metrics,
        ev.StepsRolledBack: _on_roll_back,
        ev.GuardAlarm: _on_alarm,
        ev.CheckpointWritten: _on_checkpoint,
        ev.CheckpointRejected: _on_rejected,
        ev.CheckpointSkipped: _on_skipped,
        ev.WorkerLost: _on_lost,
        ev.Warned: _on_warning,
        ev.UserFailed: _on_user_failure,
        ev.JobFinished: _on_finish,
    }


def _tag(key: str, value: object) -> Record:
    return {"kind": "tag", "key": key, "value": str(value)}


def summary_records(summary: Mapping[str, Any], made_with: Mapping[str, str], step: int, at_ms: int) -> list[Record]:
    """The verdict, changes and epochs as the run's description, its figures as metrics, and the changes as a table."""
    lines = "\n".join(f"| {label} | {text.replace('|', '/')} |" for label, text, _ in verdict(summary))
    changes = "\n".join(f"* {change_line(change)}" for change in summary["changes"][:40])
    epochs = "\n".join(f"* {epoch_line(epoch)}" for epoch in summary["epochs"][:40])
    note = f"| | |\n|---|---|\n{lines}\n" + (f"\n**Changes**\n\n{changes}\n" if changes else "")
    note += f"\n**Epochs**\n\n{epochs}\n" if epochs else ""
    made = "\n".join(f"* {name}: `{text}`" for name, text in made_with.items())
    note += f"\n**Made with**\n\n{made}\n" if made else ""
    words = {"elastic.verdict": headline(summary), "mlflow.note.content": note}
    records: list[Record] = [{"kind": "tag", "key": key, "value": text} for key, text in words.items()]
    names = ("rows_total", "rows_once", "rows_twice", "rows_never", "steps", "steps_lost", "goodput")
    for name in (*names, "pause_s_p50", "pause_s_p95", "pause_s_max", "data_wait_fraction"):
        if summary.get(name) is not None:
            value = float(summary[name])
            records.append({"kind": "metric", "key": f"summary/{name}", "value": value, "step": step, "at_ms": at_ms})
    if summary["changes"]:
        columns = ("generation", "cause", "at", "from_size", "to_size", "joined", "lost", "left", "pause_s", "rto_s")
        rows = [[_cell(change.get(name)) for name in columns] for change in summary["changes"]]
        path = "elastic/changes.json"  # as MLflow's own log_table writes it, and the tag by which its UI finds tables
        records.append({"kind": "text", "path": path, "text": json.dumps({"columns": columns, "data": rows})})
        tables = json.dumps([{"path": path, "type": "table"}])
        records.append({"kind": "tag", "key": "mlflow.loggedArtifacts", "value": tables})
    return records


def _cell(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
