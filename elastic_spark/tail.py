"""An event log that somebody else still writes, read as it grows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from elastic_spark.core.events import Event, read_log

_BLOCK = 1 << 20


class Tail:
    """Each event once. A log that takes the place of this one, as a new job's does, is read from its beginning.

    ``from_end``: what is there already is passed over.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset, self._rest = 0, b""
        self._file_id = 0
        if from_end and path.exists():
            found = path.stat()
            self._offset, self._file_id = found.st_size, found.st_ino

    def read(self) -> Iterator[Event]:
        """What was added since; nothing while there is no log. Its last line may be half written: it comes later."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file_id:
                self._offset, self._rest, self._file_id = 0, b"", found.st_ino
            file.seek(self._offset)
            while block := file.read(_BLOCK):
                self._offset += len(block)
                *lines, self._rest = (self._rest + block).split(b"\n")
                yield from read_log(line.decode("utf-8", "replace") for line in lines)
