"""A bounded file of records that wait for a store that is away. One writer, which is its reader too.

``<path>`` holds one JSON object a line; ``<path>.sent`` the number of bytes that have arrived, written after each
delivery. A crash between a delivery and that note delivers the last records once more, so deliveries are idempotent.
Flushed to the operating system, not to the platter: a killed process loses nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from elastic_spark.torn import is_torn


class Spool:
    """``limit_bytes`` bounds what waits. Beyond it metrics are cut and counted; others may use half as much again."""

    def __init__(self, path: str | Path, limit_bytes: int = 64 << 20) -> None:
        self.path = Path(path)
        self.cut = 0
        self._limit = limit_bytes
        self._marker = self.path.with_name(self.path.name + ".sent")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._size = self.path.stat().st_size if self.path.exists() else 0
        self._sent = min(_number(self._marker), self._size)
        if is_torn(self.path):
            self._write(b"\n")

    @property
    def waiting_bytes(self) -> int:
        return self._size - self._sent

    def __bool__(self) -> bool:
        return self.waiting_bytes > 0

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Puts records behind those that wait: all that there is room for, or with an OSError none."""
        lines, room, cut = [], self._limit - self.waiting_bytes, 0
        for record in records:
            line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
            room -= len(line)
            if room < 0 and (record.get("kind") == "metric" or room < -self._limit // 2):
                room += len(line)
                cut += 1
            else:
                lines.append(line)
        if lines:
            self._write(b"".join(lines))
        self.cut += cut

    def read(self, most: int) -> list[tuple[dict[str, Any], int]]:
        """The first records that wait, in order, each with the mark for `delivered`. Torn lines are passed over."""
        out: list[tuple[dict[str, Any], int]] = []
        if not self:
            return out
        with self.path.open("rb") as file:
            file.seek(self._sent)
            mark = self._sent
            for line in file:
                mark += len(line)
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if isinstance(record, dict):
                    out.append((record, mark))
                if len(out) == most:
                    break
        if not out:
            self.delivered(mark)
        return out

    def delivered(self, mark: int) -> None:
        """Records up to ``mark`` have arrived; the file is emptied with the last of them."""
        self._sent = mark
        if self._sent >= self._size:
            self.path.unlink(missing_ok=True)
            self._marker.unlink(missing_ok=True)
            self._size = self._sent = 0
        else:
            with contextlib.suppress(OSError):  # the disk is full: a crash now would deliver them once more
                self._marker.write_text(str(mark))

    def _write(self, data: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "ab", buffering=0) as file:
            left = memoryview(data)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                with contextlib.suppress(OSError):  # else a torn line is left, which is passed over
                    file.truncate(self._size)
                raise
        self._size += len(data)


def _number(path: Path) -> int:
    try:
        return max(0, int(path.read_text()))
    except (OSError, ValueError):
        return 0
