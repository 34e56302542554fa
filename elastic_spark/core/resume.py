"""What a checkpoint and the start that resumes it must have in common. Pure.

A cursor is a count of global batches: the same number means the same rows only for the same data, cut into the same
lanes, in the order of the same seed, with the same global batch. Where one of these differs, rows would be trained
twice and others never, and nobody would be told. So such a start is refused. The number of workers, machines, library
versions and everything else may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_spark.core.lanes import LanePlan

#: What a checkpoint notes of each data set, in words, and what to do where it differs.
NOTED = {
    "digest": (
        "the data",
        "give the same rows in the same frozen form: the same Parquet files or, for a DataFrame, the same data_uri",
    ),
    "global_batch": ("global_batch", "give the checkpoint's"),
    "lanes": ("lanes", "leave lanes out: those of the checkpoint are taken then"),
    "seed": ("seed", "give the checkpoint's"),
    "shuffle": ("shuffle", "give the checkpoint's"),
}


def noted(plan: LanePlan, digest: str) -> dict[str, Any]:
    """What the order of a data set's rows follows from, for a checkpoint's manifest."""
    return {
        "digest": digest,
        "global_batch": plan.global_batch,
        "lanes": plan.lanes,
        "seed": plan.seed,
        "shuffle": plan.shuffle,
    }


def differences(
    saved: Mapping[str, Mapping[str, Any]],
    now: Mapping[str, Mapping[str, Any]],
    cursors: Mapping[str, Sequence[int]],
) -> list[str]:
    """What speaks against going on from a checkpoint with ``cursors[dataset] = (epoch, offset)``: a sentence each.

    ``saved`` and ``now`` are `noted` by data set. At the start of an epoch (offset 0) nothing does, and a data set
    without a cursor was only read, never counted.
    """
    found = []
    for name in sorted(saved.keys() & cursors.keys()):
        epoch, offset = cursors[name]
        if offset == 0:
            continue
        if name not in now:
            found.append(f"it is {offset} steps into epoch {epoch} of the data set {name!r}, which is not given now")
            continue
        for key, (words, advice) in NOTED.items():
            there, here = saved[name].get(key), now[name].get(key)
            if there != here:
                found.append(f"data set {name!r}: {words} {_short(here)} now, {_short(there)} there ({advice})")
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"{text[:16]}..."
