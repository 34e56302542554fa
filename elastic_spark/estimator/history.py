"""Figures by epoch, read from the event log, which knows the mean over all workers whatever became of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic_spark.core import events as ev


def history(log: Iterable[ev.Event]) -> list[dict[str, Any]]:
    """For each epoch ``{"epoch": from 0, "loss": mean over its steps}``, with validation also ``val_...``.

    A step that was undone and made again counts as it was made last. A step of which a lost worker's report is missing
    is left out, because the mean over the others is not the loss of the global batch.
    """
    epoch_of: dict[int, int] = {}
    values_at: dict[int, dict[str, float]] = {}
    partial: set[int] = set()
    for event in log:
        if isinstance(event, ev.StepsCommitted) and "train" in event.cursors:
            steps = range(event.first_step, event.first_step + len(event.times))
            epoch_of.update(dict.fromkeys(steps, event.cursors["train"][0]))
            partial = partial.union(steps) if event.missing else partial.difference(steps)
        elif isinstance(event, ev.MetricsReported):
            values_at[event.step] = {name: float(value) for name, value in event.values.items()}  # the log has "nan"
    losses: dict[int, list[float]] = {}
    story: dict[int, dict[str, Any]] = {}
    epoch = 0
    for step in sorted(epoch_of.keys() | values_at.keys()):
        epoch = epoch_of.get(step, epoch)
        values = values_at.get(step, {})
        entry = story.setdefault(epoch, {"epoch": epoch, "loss": None})
        if "loss" in values and step not in partial:
            losses.setdefault(epoch, []).append(values["loss"])
            entry["loss"] = sum(losses[epoch]) / len(losses[epoch])
        entry.update({name: value for name, value in values.items() if name != "loss"})
    return [story[epoch] for epoch in sorted(story)]
