"""The event log on disk, and everybody who reads along. Where the disk is full the facts wait in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_spark.core.events import Event, JobFinished, Warned, to_json
from elastic_spark.torn import is_torn

#: A process whose loop has not run for so many seconds may have been stopped, and may have lost its job meanwhile.
STOOD_STILL_S = 5.0


class Journal:
    """Appends each event as one line, then hands it to the readers. The controller's alone, so the lines are in order.

    Args:
        path: the log; created, or appended to when the job is taken up again.
        readers: called with each event; they must neither block nor raise.
        stood_still: called before anything more is told where this process may have been stopped for a while; it may
            `leave`.
    """

    def __init__(
        self,
        path: Path,
        readers: Sequence[Callable[[Event], None]] = (),
        stood_still: Callable[[], object] = lambda: None,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        torn = is_torn(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the job
        self._unwritten = bytearray(b"\n" if torn else b"")
        self._trouble: OSError | None = None
        self._said = False
        self._readers = list(readers)
        self._stood_still = stood_still
        self._beat_at = (time.monotonic(), time.time())
        self.left = False

    def leave(self) -> None:
        """Another driver writes this file now: the readers alone are told from here on."""
        self.left = True

    def beat(self) -> None:
        """The loop runs: called often."""
        monotonic, wall = self._beat_at
        if max(time.monotonic() - monotonic, time.time() - wall) > STOOD_STILL_S:
            self._stood_still()
        self._beat_at = (time.monotonic(), time.time())

    def append(self, event: Event) -> None:
        self.beat()
        if not self.left:
            self._unwritten += to_json(event).encode() + b"\n"
            self._write()
        for reader in self._readers:
            reader(event)
        if self._trouble is not None and not self._said and not isinstance(event, JobFinished):
            self._said = True
            message = f"{self.path} cannot be written ({self._trouble}): facts wait in memory until it can be"
            self.append(Warned(at=event.at, message=message, where="driver"))

    def close(self) -> None:
        """Raises OSError where the end of the log could not be written."""
        if not self.left:
            self._write()
        self._file.close()
        if self._trouble is not None and not self.left:
            raise self._trouble

    def _write(self) -> None:
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
            self._trouble = None
        except OSError as error:
            self._trouble = error
