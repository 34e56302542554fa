"""A worker's own time in a step: what tells a slow worker from one that waits for a slow one.

All members of a world make their steps at the same pace, so the time from commit to commit says nothing about a single
one. Its *own* time is what is left without two waits: for the others, which is the time inside of Horovod's
``synchronize``, and for data. What remains is forward and backward pass, the update, and what else the loop does. It is
wall time and not processor time: a core that is shared with others, or a slow disk, holds up the world just the same.

On a GPU the work is only queued when ``synchronize`` is called; so the stream that it was queued on is waited for
first, which ``synchronize`` would have done anyway.

Where the function waits for others by other means than Horovod's (`torch.distributed`, say), that counts as own time:
then all members look alike, and lanes stay where they are.
"""

from __future__ import annotations

import time

import torch


class StepClock:
    """Adds up, between two commits, the own time and the wait for data. What passes otherwise is in neither."""

    def __init__(self) -> None:
        self._seconds = {"own": 0.0, "data": 0.0}
        self._runs: str | None = None
        self._before: str | None = None
        self._since = 0.0

    def works(self) -> None:
        """From here on it is own time."""
        self._turn("own")

    def awaits_data(self) -> None:
        """From here on the next batch is waited for."""
        self._turn("data")

    def awaits_others(self) -> None:
        """From here on the other ranks are."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        self._before = self._runs
        self._turn(None)

    def goes_on(self) -> None:
        """The others are there: as before."""
        self._turn(self._before)

    def rests(self) -> None:
        """From here on it is neither."""
        self._turn(None)

    def take(self) -> tuple[float, float]:
        """Own seconds and seconds of waiting for data since the last call. The time that runs goes on."""
        self._turn(self._runs)
        taken, self._seconds = self._seconds, {"own": 0.0, "data": 0.0}
        return taken["own"], taken["data"]

    def stop(self) -> None:
        """Forget what was taken; nothing runs."""
        self._turn(None)
        self.take()

    def _turn(self, to: str | None) -> None:
        now = time.perf_counter()
        if self._runs is not None:
            self._seconds[self._runs] += now - self._since
        self._runs, self._since = to, now
