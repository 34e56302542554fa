"""Which rows were trained how often: guarantee G1, audited from the facts about steps alone.

The *final history* is what is left of all committed steps after every roll-back, so a step that was undone and made
again counts once. It is kept as segments of consecutive steps of an epoch, 16 bytes a step.

The *digest of an epoch* says what was trained and in which order: `sequence_digest` over its batches in the order of
the final history, made of what workers reported of the ids of the rows they trained. It must be equal to
`planned_digest`, which takes manifest and seed and nothing else: for any number of workers, under any churn.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastic_spark.core import events as ev
from elastic_spark.core.lanes import LanePlan
from elastic_spark.core.manifest import Manifest
from elastic_spark.errors import ConfigError


def expected_rows(frozen: ev.DatasetFrozen, offset: int) -> int:
    """Rows of the global batch at ``offset``, from 0: ``min(global_batch, rows - offset * global_batch)``.

    0 outside of ``0 <= offset < steps_per_epoch``, so what a worker says it trained there is unexplained.
    """
    if not 0 <= offset < frozen.steps_per_epoch:
        return 0
    return max(0, min(frozen.global_batch, frozen.rows - offset * frozen.global_batch))


def audit_epoch(
    frozen: ev.DatasetFrozen, epoch: int, counts: Mapping[int, int], *, finished: bool, inherited: Container[int]
) -> dict[str, Any]:
    """How often the rows of one epoch are in the final history. ``counts[offset]`` is the number of commits of a batch.

    * ``rows_once``, ``rows_twice``: rows of the batches committed exactly once; more than once (each row counted once).
    * ``rows_total``: rows trained = sum over offsets of count * rows.
    * ``rows_never``: rows of the batches without a commit in a *finished* epoch; in the others they are ``rows_open``.
    * ``rows_inherited``: rows of the ``inherited`` offsets that have no commit in this log.

    An epoch is finished when its last batch is committed, or any batch of a later epoch of the data set. So a function
    that returns in the middle of an epoch leaves open rows, and no lost ones.
    """
    out = dict.fromkeys(("rows_total", "rows_once", "rows_twice", "rows_never", "rows_open", "rows_inherited"), 0)
    for offset in range(frozen.steps_per_epoch):
        rows, count = expected_rows(frozen, offset), counts.get(offset, 0)
        out["rows_total"] += rows * count
        if count:
            out["rows_once" if count == 1 else "rows_twice"] += rows
        elif offset in inherited:
            out["rows_inherited"] += rows
        else:
            out["rows_never" if finished else "rows_open"] += rows
    return {"dataset": frozen.dataset, "epoch": epoch, "rows": frozen.rows, "finished": finished, **out}


def audit_rows(
    frozen: Mapping[str, ev.DatasetFrozen],
    committed: Iterable[tuple[str, int, int, int]],
    inherited: Iterable[tuple[str, int, int, int]],
) -> list[dict[str, Any]]:
    """`audit_epoch` of every epoch from the first to the last one seen, per data set.

    ``committed`` holds ``(dataset, epoch, first_offset, batches)`` of the final history; ``inherited`` likewise
    ``(dataset, epoch, offset, batches)``, the batches *before* that cursor. Data sets that were never frozen cannot be
    audited: left out.
    """
    counts: dict[str, dict[int, Counter[int]]] = {name: {} for name in frozen}
    for name, epoch, first, batches in committed:
        if name in frozen:
            counts[name].setdefault(epoch, Counter()).update(range(first, first + batches))
    before: dict[str, list[range]] = {name: [] for name in frozen}
    for name, epoch, offset, batches in inherited:
        if name in frozen:
            end = epoch * frozen[name].steps_per_epoch + offset
            before[name].append(range(end - batches, end))
    out = []
    for name, by_epoch in counts.items():
        length, last = frozen[name].steps_per_epoch, max(by_epoch, default=-1)
        begins = [epochs.stop // length for epochs in before[name]]
        for epoch in range(min([*by_epoch, *begins], default=0), last + 1):
            seen = by_epoch.get(epoch, Counter())
            finished = epoch < last or seen[length - 1] > 0
            held = {i - epoch * length for part in before[name] for i in _overlap(part, epoch * length, length)}
            out.append(audit_epoch(frozen[name], epoch, seen, finished=finished, inherited=held))
    return out


def sequence_digest(batches: Iterable[tuple[int, int]]) -> str:
    """SHA-256, in hex, over ``(offset, row hash)`` of each batch, as unsigned 64-bit numbers, highest byte first."""
    digest = hashlib.sha256()
    for offset, row_hash in batches:
        digest.update(struct.pack(">QQ", offset, row_hash))
    return digest.hexdigest()


def planned_digest(frozen: ev.DatasetFrozen, manifest: Manifest, epoch: int) -> str:
    """`sequence_digest` of a whole epoch as it must have been, from its manifest and the log's word on the order."""
    plan = LanePlan(manifest.group_rows, frozen.lanes, frozen.global_batch, frozen.seed, frozen.shuffle)
    return sequence_digest((offset, plan.row_hash(epoch, offset)) for offset in range(plan.steps_per_epoch))


def check_digests(
    epochs: Iterable[Mapping[str, Any]],
    frozen: Iterable[ev.DatasetFrozen],
    manifests: Iterable[Manifest],
    *,
    whole: bool = True,
) -> list[tuple[str, bool]]:
    """Whether the digest of each finished epoch of the data of these manifests is the planned one: in words, and as
    such. ``epochs`` are those of a summary. What is not known is not so: where no worker told what a batch held, or
    where lines of the log are missing (``whole`` is False) and what is left is not the plan.

    Raises ConfigError for a manifest of data that is not among the ``frozen``.
    """
    by_name = {item.dataset: item for item in frozen}
    out = []
    for manifest in manifests:
        names = [name for name, item in by_name.items() if item.digest == manifest.digest]
        if not names:
            known = ", ".join(f"{name} {item.digest[:16]}" for name, item in by_name.items()) or "none"
            raise ConfigError(
                f"the manifest of {manifest.name!r}, {manifest.digest[:16]}, is of other data than this job's: {known}"
            )
        for epoch in (epoch for epoch in epochs if epoch["dataset"] in names and epoch["finished"]):
            planned = planned_digest(by_name[epoch["dataset"]], manifest, epoch["epoch"])
            told = epoch["digest"]
            verdict = "equal" if told == planned else "DIFFERENT" if told and whole else "NOT KNOWN from this log"
            words = f"{epoch['dataset']}, epoch {epoch['epoch'] + 1}: sequence by plan {planned}: {verdict}"
            out.append((words, told == planned))
    return out


def _overlap(part: range, start: int, length: int) -> range:
    return range(max(part.start, start), min(part.stop, start + length))


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of the final history that consumed consecutive batches. ``times`` grows with them, and so do
    ``hashes``: 16 hexadecimal digits a step, as eight bytes, by data set; too few where nobody told them."""

    first: int
    times: array[float]
    cursors: Mapping[str, tuple[int, int]]
    hashes: Mapping[str, bytearray]

    def extend(self, event: ev.StepsCommitted) -> None:
        """By the steps of an event that continues it."""
        for name in self.cursors:
            if len(self.hashes[name]) == 8 * len(self.times):
                self.hashes[name].extend(bytes.fromhex(event.hashes.get(name, "")))
        self.times.extend(event.times)

    def continued_by(self, event: ev.StepsCommitted) -> bool:
        n = len(self.times)
        after = {name: (epoch, offset + n) for name, (epoch, offset) in self.cursors.items()}
        return event.first_step == self.first + n and after == {k: tuple(v) for k, v in event.cursors.items()}

    def cut(self, to_step: int) -> Segment | None:
        """Without the steps after ``to_step``."""
        keep = to_step - self.first + 1
        hashes = {name: told[: 8 * keep] for name, told in self.hashes.items()}
        return Segment(self.first, self.times[:keep], self.cursors, hashes) if keep > 0 else None


@dataclass(frozen=True)
class Assumed:
    """``count`` steps up to ``last`` that a checkpoint holds and this log does not: it ends before they were told, or
    begins after. ``cursors`` is what follows them; empty while unknown."""

    last: int
    count: int
    cursors: Mapping[str, tuple[int, int]]

    def cut(self, to_step: int) -> Assumed | None:
        """Without the steps after ``to_step``."""
        back = max(0, self.last - to_step)
        cursors = {name: (epoch, offset - back) for name, (epoch, offset) in self.cursors.items()}
        return Assumed(self.last - back, self.count - back, cursors) if back < self.count else None


class History:
    """The final history, and what roll-backs cost: steps, rows and seconds (RPO)."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.assumed: list[Assumed] = []
        self.top = 0
        self.steps_lost = 0
        self.rows_lost = 0
        self.seconds_lost = 0.0
        self._newest_loss: int | None = None  # steps of the newest roll-back, while nothing was committed since

    def add(self, event: ev.StepsCommitted) -> None:
        if event.times:
            if self.assumed and not self.assumed[-1].cursors and event.first_step == self.top + 1:
                self.assumed[-1] = replace(self.assumed[-1], cursors=event.cursors)
            if not (self.segments and self.segments[-1].continued_by(event)):
                hashes = {name: bytearray() for name in event.cursors}
                self.segments.append(Segment(event.first_step, array("d"), event.cursors, hashes))
            self.segments[-1].extend(event)
            self.top = max(self.top, event.first_step + len(event.times) - 1)
            self._newest_loss = None

    def assume(self, last: int, cursors: Mapping[str, tuple[int, int]]) -> None:
        """A checkpoint holds the steps up to ``last``, of which this log tells fewer; ``cursors`` follow it."""
        if last > self.top:
            self.assumed.append(Assumed(last, last - self.top, cursors))
            self.top = last

    def roll_back(self, from_step: int, to_step: int, frozen: Mapping[str, ev.DatasetFrozen]) -> None:
        """RPO: ``max(from_step, newest step) - to_step`` steps; the rows of those in the log; seconds from the last
        commit that stays (else the first that goes) to the last that goes. Said twice (by a new driver and by its
        controller) it counts once."""
        steps = max(0, max(from_step, self.top) - to_step)
        counted = self._newest_loss if self._newest_loss is not None and self.top == to_step else 0
        self.steps_lost += max(0, steps - (counted or 0))
        self._newest_loss = max(steps, counted or 0)
        kept, gone = [], []
        for segment in self.segments:
            left = segment.cut(to_step)
            if left is not None:
                kept.append(left)
            done = len(left.times) if left is not None else 0
            gone += list(segment.times[done:])
            for name, (_, offset) in segment.cursors.items():
                if name in frozen:
                    self.rows_lost += sum(
                        expected_rows(frozen[name], offset + i) for i in range(done, len(segment.times))
                    )
        if gone:
            self.seconds_lost += max(gone) - (kept[-1].times[-1] if kept else min(gone))
        self.segments, self.top = kept, to_step
        self.assumed = [held for item in self.assumed if (held := item.cut(to_step)) is not None]

    def batches(self) -> Iterable[tuple[str, int, int, int]]:
        """``(dataset, epoch, first_offset, batches)`` of every segment."""
        for segment in self.segments:
            for name, (epoch, offset) in segment.cursors.items():
                yield name, epoch, offset, len(segment.times)

    def digests(self) -> dict[tuple[str, int], str]:
        """`sequence_digest` of each ``(dataset, epoch)`` of which it is known what all its batches held."""
        told: dict[tuple[str, int], list[tuple[int, int]]] = {}
        unknown: set[tuple[str, int]] = set()
        for segment in self.segments:
            for name, (epoch, first) in segment.cursors.items():
                hashes = segment.hashes[name]
                if len(hashes) != 8 * len(segment.times):
                    unknown.add((name, epoch))
                    continue
                sums = struct.unpack(f">{len(segment.times)}Q", hashes)
                told.setdefault((name, epoch), []).extend((first + i, value) for i, value in enumerate(sums))
        return {key: sequence_digest(batches) for key, batches in told.items() if key not in unknown}

    def inherited(self) -> Iterable[tuple[str, int, int, int]]:
        """``(dataset, epoch, offset, batches)``: the batches before that cursor are in a checkpoint at least."""
        for item in self.assumed:
            for name, (epoch, offset) in item.cursors.items():
                yield name, epoch, offset, item.count
