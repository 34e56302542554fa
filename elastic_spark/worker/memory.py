"""Snapshots of the state in memory that outlives the worker's process.

The memory is an anonymous file (``memfd``) that the agent has made and holds open: when the process dies, at whatever
instruction, its successor on the same executor reads from it what the last snapshot was. There is nothing to clean up:
when the agent is gone, so is the memory.

Layout: a page that holds one number, the offset of the newest complete slot (0: none); then slots. A slot is a head
(`_HEAD`: bytes of the tensors, bytes of the text), the tensors, each at a multiple of 64 bytes, and the text, which is
JSON. A slot is written whole before the number is changed, by one aligned store, so a reader never sees half of one. A
snapshot is written over an older one, into memory that is there already: it costs a copy and no page faults, which cost
ten times as much.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from elastic_spark.worker.late import LateCopy, thread

_PAGE = mmap.ALLOCATIONGRANULARITY
_HEAD = 64
_ALIGN = 64
#: Room for the text of a slot beyond what its first snapshot needs: shapes stay, numbers in it grow.
_SLACK = 1 << 16


@dataclass(frozen=True)
class Snapshot:
    """``body`` is JSON, ``tensors`` are views of the memory: good until `SnapshotMemory.write` comes to that slot.
    It is whole when ``late``, what is still to be copied, has settled."""

    step: int
    body: Any
    tensors: dict[str, torch.Tensor] = field(repr=False)
    offset: int = 0
    late: LateCopy | None = None


class SnapshotMemory:
    """The writer's side. Two slots in turn; a third one while a snapshot is leased. The first snapshot, and the first
    one of a larger state (optimizers hold nothing before their first step), has all three made, in a thread.

    Args:
        descriptor: of the memory; None makes memory that dies with this process.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._fd = os.memfd_create("elastic_spark") if descriptor is None else descriptor
        os.ftruncate(self._fd, _PAGE)
        self._newest = np.frombuffer(mmap.mmap(self._fd, _PAGE), dtype=np.uint64)
        self._newest[0] = 0
        self._end = _PAGE
        self._slots: dict[int, _Slot] = {}
        self._leased: int | None = None
        self._making: Future[None] | None = None

    def write(self, step: int, body: Any, tensors: Mapping[str, torch.Tensor], late: Collection[str] = ()) -> Snapshot:
        """A copy of ``tensors`` (on whatever device) with ``body``, which becomes the newest snapshot.

        Those named in ``late`` are copied when the snapshot's `LateCopy` is told to; the snapshot is the newest once
        they are, and nothing else may be written before that.

        Raises:
            OSError: there is no memory left for it.
        """
        extents, end = _extents(tensors)
        text = json.dumps({"step": step, "tensors": extents, "body": body}).encode()
        slot = self._free_slot(end, len(text))
        views = slot.views(extents)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name not in late:
                    views[name].copy_(tensor.detach())

        def finish() -> None:
            slot.finish(end, text)
            self._newest[0] = slot.offset

        copying = LateCopy({name: tensors[name] for name in late}, views, finish) if late else None
        if copying is None:
            finish()
        return Snapshot(step, json.loads(text)["body"], views, slot.offset, copying)

    @property
    def is_there(self) -> bool:
        """Whether `write` finds its memory made; the first one makes its own, and the rest meanwhile."""
        return self._making is None or self._making.done()

    def lease(self, snapshot: Snapshot) -> None:
        """Keep this snapshot as it is until `release`. One at a time: the one before is given up."""
        self._leased = snapshot.offset

    def release(self) -> None:
        """Nobody reads the leased snapshot any more."""
        self._leased = None

    def _free_slot(self, tensor_bytes: int, text_bytes: int) -> _Slot:
        if self._making is not None:
            self._making.result()
        newest = int(self._newest[0])
        kept = (newest, self._leased)
        for slot in list(self._slots.values()):
            if slot.offset in kept:
                continue
            if slot.capacity >= _HEAD + tensor_bytes + text_bytes:
                return slot
            del self._slots[slot.offset]
            slot.give_back()
        slot = self._make(-(-(_HEAD + tensor_bytes + text_bytes + _SLACK) // _PAGE) * _PAGE)
        self._making = thread().submit(self._make_more, slot.capacity, kept)
        return slot

    def _make_more(self, capacity: int, kept: tuple[int | None, ...]) -> None:
        """Until there are three so large; smaller ones that nobody reads go."""
        for slot in list(self._slots.values()):
            if slot.capacity < capacity and slot.offset not in kept:
                del self._slots[slot.offset]
                slot.give_back()
        while sum(slot.capacity >= capacity for slot in self._slots.values()) < 3:
            self._make(capacity).touch()

    def _make(self, capacity: int) -> _Slot:
        os.ftruncate(self._fd, self._end + capacity)
        slot = _Slot(self._fd, self._end, capacity)
        self._end += capacity
        self._slots[slot.offset] = slot
        return slot


class _Slot:
    def __init__(self, fd: int, offset: int, capacity: int) -> None:
        self.offset, self.capacity = offset, capacity
        self._map = mmap.mmap(fd, capacity, offset=offset)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views: dict[str, torch.Tensor] = {}
        self._extents: list[Any] = []

    def views(self, extents: list[Any]) -> dict[str, torch.Tensor]:
        if extents != self._extents:
            self._extents, self._views = extents, _views(self._bytes, extents)
        return self._views

    def touch(self) -> None:
        """Have the system give its pages now."""
        self._bytes.zero_()

    def finish(self, tensor_bytes: int, text: bytes) -> None:
        self._map[:16] = np.array([tensor_bytes, len(text)], dtype=np.uint64).tobytes()
        start = _HEAD + tensor_bytes
        self._map[start : start + len(text)] = text

    def give_back(self) -> None:
        """Its pages to the system; the addresses stay mapped, for whoever still holds a view."""
        self._map.madvise(mmap.MADV_REMOVE)


def read_newest(descriptor: int) -> Snapshot | None:
    """What a process that is gone wrote last into this memory; None where it wrote nothing.

    Its pages stay as long as the snapshot is referred to.
    """
    size = os.fstat(descriptor).st_size
    if size < _PAGE:
        return None
    offset = int(np.frombuffer(os.pread(descriptor, 8, 0), dtype=np.uint64)[0])
    if not offset:
        return None
    memory = mmap.mmap(descriptor, size - offset, access=mmap.ACCESS_COPY, offset=offset)
    tensor_bytes, text_bytes = np.frombuffer(memory[:16], dtype=np.uint64).tolist()
    start = _HEAD + tensor_bytes
    told = json.loads(memory[start : start + text_bytes])
    return Snapshot(
        told["step"], told["body"], _views(torch.frombuffer(memory, dtype=torch.uint8), told["tensors"]), offset
    )


def _extents(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Any], int]:
    """``[name, dtype, shape, start, end]`` in bytes from the end of the head, and where they end."""
    out, end = [], 0
    for name, tensor in tensors.items():
        start = -(-end // _ALIGN) * _ALIGN
        end = start + tensor.numel() * tensor.element_size()
        out.append([name, str(tensor.dtype)[6:], list(tensor.shape), start, end])
    return out, end


def _views(flat: torch.Tensor, extents: list[Any]) -> dict[str, torch.Tensor]:
    return {
        name: flat[_HEAD + start : _HEAD + end].view(getattr(torch, dtype)).reshape(shape)
        if end > start
        else torch.empty(shape, dtype=getattr(torch, dtype))
        for name, dtype, shape, start, end in extents
    }
