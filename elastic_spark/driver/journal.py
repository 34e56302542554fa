"""The event log on disk, and everybody who reads along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_spark.core.events import Event, to_json
from elastic_spark.torn import is_torn


class Journal:
    """Appends each event as one line, then hands it to the readers. The controller's alone, so the lines are in order.

    Args:
        path: the log; created, or appended to when the job is taken up again.
        readers: called with each event; they must neither block nor raise.
    """

    def __init__(self, path: Path, readers: Sequence[Callable[[Event], None]] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        torn = is_torn(path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long as the job
        self._readers = list(readers)
        self._left = False
        if torn:
            self._file.write("\n")

    def leave(self) -> None:
        """Another driver writes this file now: the readers alone are told from here on."""
        self._left = True

    def append(self, event: Event) -> None:
        if not self._left:
            self._file.write(to_json(event) + "\n")
        for reader in self._readers:
            reader(event)

    def close(self) -> None:
        self._file.close()
