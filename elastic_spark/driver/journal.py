"""The event log on disk, and everybody who reads along."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_spark.core.events import Event, to_json
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
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long as the job
        self._readers = list(readers)
        self._stood_still = stood_still
        self._beat_at = (time.monotonic(), time.time())
        self.left = False
        if torn:
            self._file.write("\n")

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
            self._file.write(to_json(event) + "\n")
        for reader in self._readers:
            reader(event)

    def close(self) -> None:
        self._file.close()
