"""The figures of a running job in the text format of Prometheus (exposition format 0.0.4). Pure.

Names begin with ``elastic_spark_``; times are unix seconds by the driver's clock, so that an alert can be on the age of
the last commit or of the newest checkpoint: ``time() - elastic_spark_last_commit_timestamp_seconds > 60``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from elastic_spark.core import events as ev
from elastic_spark.core.metrics import PauseMeter, RateMeter

#: Metrics of the user's, by name, that are kept at most: names are theirs, and memory is ours.
MOST_NAMES = 50

#: Name, type, meaning.
TABLE = (
    ("info", "gauge", "Always 1; the labels say which job this is."),
    ("step", "gauge", "The job's count of committed steps."),
    ("steps_committed_total", "counter", "Steps committed, those that were undone later among them."),
    ("rows_committed_total", "counter", "Rows that workers reported to have trained."),
    ("steps_rolled_back_total", "counter", "Committed steps that were undone."),
    ("data_wait_seconds_total", "counter", "Time that steps waited for rows: of each step, that of the slowest rank."),
    ("guard_alarms_total", "counter", "Values that the guard did not expect, by kind."),
    ("epoch", "gauge", "The epoch that is trained, from 0."),
    ("steps_per_second", "gauge", "Over the last 10 s of commits."),
    ("rows_per_second", "gauge", "Over the last 10 s of commits."),
    ("last_commit_timestamp_seconds", "gauge", "When the newest step was committed."),
    ("workers", "gauge", "Members of the world."),
    ("workers_wanted", "gauge", "Workers that the job was started with."),
    ("generation", "gauge", "Number of the world."),
    ("changes_total", "counter", "Worlds formed after the first."),
    ("workers_lost_total", "counter", "Workers lost, by cause."),
    ("workers_left_total", "counter", "Workers that left in good order, by reason."),
    ("pause_seconds", "summary", "The longest gap between two commits around each change."),
    ("checkpoints_written_total", "counter", "Checkpoints written."),
    ("checkpoints_skipped_total", "counter", "Checkpoints that were due and not written."),
    ("checkpoints_rejected_total", "counter", "Checkpoints that did not verify."),
    ("checkpoint_step", "gauge", "Step of the newest checkpoint."),
    ("checkpoint_timestamp_seconds", "gauge", "When the newest checkpoint was written."),
    ("warnings_total", "counter", "Warnings."),
    ("metric", "gauge", "What the training function gave to commit, by name."),
)

_COUNTED: Mapping[type[ev.Event], str] = {
    ev.CheckpointWritten: "checkpoints_written_total",
    ev.CheckpointSkipped: "checkpoints_skipped_total",
    ev.CheckpointRejected: "checkpoints_rejected_total",
    ev.Warned: "warnings_total",
}


class Gauges:
    """Feed it the events of a log; `text` may be asked at any time. Memory does not grow with the job."""

    def __init__(self) -> None:
        self._plain: dict[str, float] = {name: 0.0 for name, kind, _ in TABLE if kind == "counter"}
        self._labelled: dict[str, dict[str, float]] = {"info": {}, "epoch": {}, "metric": {}}
        self._lost: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._alarms: Counter[str] = Counter()
        self._pauses, self._rates = PauseMeter(), RateMeter()
        self._formed = False
        for name in ("workers_lost_total", "workers_left_total", "guard_alarms_total"):
            del self._plain[name]  # these have labels

    def add(self, event: ev.Event) -> None:
        """Takes in the next event of the log."""
        plain = self._plain
        for pause in self._pauses.add(event):
            plain["pause_seconds_sum"] = plain.get("pause_seconds_sum", 0.0) + pause.seconds
            plain["pause_seconds_count"] = plain.get("pause_seconds_count", 0.0) + 1
        if type(event) in _COUNTED:
            plain[_COUNTED[type(event)]] += 1
        if isinstance(event, ev.StepsCommitted) and event.times:
            self._commit(event)
        elif isinstance(event, ev.MetricsReported):
            known = self._labelled["metric"]
            for name, value in event.values.items():
                label = _labels(name=name)
                if label in known or len(known) < MOST_NAMES:
                    known[label] = float(value)
        elif isinstance(event, ev.JobStarted):
            self._labelled["info"] = {_labels(job=event.job_name, job_id=event.job_id, run_id=event.run_id): 1.0}
            plain["workers_wanted"], plain["step"] = event.num_proc, event.resumed_step
        elif isinstance(event, ev.GenerationFormed):
            plain["workers"], plain["generation"] = len(event.members), event.generation
            plain["changes_total"] += self._formed
            self._formed = True
        elif isinstance(event, ev.StepsRolledBack):
            plain["steps_rolled_back_total"] += event.from_step - event.to_step
            plain["step"] = event.to_step
        elif isinstance(event, ev.WorkerLost):
            self._lost[_labels(cause=event.cause)] += 1
        elif isinstance(event, ev.WorkerLeft):
            self._left[_labels(reason=event.reason)] += 1
        elif isinstance(event, ev.GuardAlarm):
            self._alarms[_labels(kind=event.kind)] += 1
        elif isinstance(event, ev.CheckpointWritten):
            plain["checkpoint_step"], plain["checkpoint_timestamp_seconds"] = event.step, event.at

    def _commit(self, event: ev.StepsCommitted) -> None:
        plain = self._plain
        self._rates.add(event)
        plain["step"] = event.first_step + len(event.times) - 1
        plain["steps_committed_total"] += len(event.times)
        plain["rows_committed_total"] += event.rows
        plain["data_wait_seconds_total"] += event.wait_s
        plain["last_commit_timestamp_seconds"] = event.times[-1]
        for dataset, (epoch, _) in event.cursors.items():
            self._labelled["epoch"][_labels(dataset=dataset)] = epoch

    def text(self) -> str:
        """All of it; what is not known yet is left out."""
        lines = []
        for name, kind, meaning in TABLE:
            samples = list(self._samples(name))
            if samples:
                lines += [f"# HELP elastic_spark_{name} {meaning}", f"# TYPE elastic_spark_{name} {kind}"]
                lines += [f"elastic_spark_{label} {_number(value)}" for label, value in samples]
        return "\n".join(lines) + "\n"

    def _samples(self, name: str) -> Iterator[tuple[str, float]]:
        rates = {"steps_per_second": self._rates.steps_s, "rows_per_second": self._rates.rows_s}
        labelled: dict[str, Mapping[str, float]] = {
            **self._labelled,
            "workers_lost_total": self._lost,
            "workers_left_total": self._left,
            "guard_alarms_total": self._alarms,
        }
        if name in labelled:
            yield from ((name + labels, value) for labels, value in labelled[name].items())
        elif name in rates:
            value = rates[name]
            if value is not None:
                yield name, value
        else:
            for part in (name, f"{name}_sum", f"{name}_count"):
                if part in self._plain:
                    yield part, self._plain[part]


def _labels(**labels: str) -> str:
    """``{name="value"}``, escaped as the format asks."""

    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
