"""Figures by epoch, read from the event log, which knows the mean over all workers whatever became of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic_spark.core import events as ev


def history(log: Iterable[ev.Event]) -> list[dict[str, Any]]:
    """For each epoch ``{"epoch": from 0, "loss": mean over its steps}``, with validation also ``val_...``.

    A step that was undone and made again counts as it was made last.
    """
    epoch_of: dict[int, int] = {}
    values_at: dict[int, dict[str, float]] = {}
    for event in log:
        if isinstance(event, ev.StepsCommitted) and "train" in event.cursors:
            for i in range(len(event.times)):
                epoch_of[event.first_step + i] = event.cursors["train"][0]
        elif isinstance(event, ev.MetricsReported):
            values_at[event.step] = dict(event.values)
    losses: dict[int, list[float]] = {}
    story: dict[int, dict[str, Any]] = {}
    epoch = 0
    for step in sorted(epoch_of.keys() | values_at.keys()):
        epoch = epoch_of.get(step, epoch)
        values = values_at.get(step, {})
        entry = story.setdefault(epoch, {"epoch": epoch, "loss": None})
        if "loss" in values:
            losses.setdefault(epoch, []).append(values["loss"])
            entry["loss"] = sum(losses[epoch]) / len(losses[epoch])
        entry.update({name: value for name, value in values.items() if name != "loss"})
    return [story[epoch] for epoch in sorted(story)]
