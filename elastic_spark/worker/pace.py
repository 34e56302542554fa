"""A worker's own time in a step: what tells a slow worker from one that waits for a slow one.

All members of a world make their steps at the same pace, so the time from commit to commit says nothing about a single
one. Its *own* time is what is left without two waits: for the others, which is the time inside of the optimizer's
``synchronize``, and for data. What remains is forward and backward pass, the update, and what else the loop does. It is
wall time and not processor time: a core that is shared with others, or a slow disk, holds up the world just the same.

On a GPU the work is only queued when ``synchronize`` is called; so the stream that it was queued on is waited for
first, which ``synchronize`` would have done anyway.

Where the function calls collectives of its own before the optimizer's, their wait counts as own time: then all members
look alike, and lanes stay where they are.
"""

from __future__ import annotations

import time

import torch


class StepClock:
    """Adds up the own time between two commits."""

    def __init__(self) -> None:
        self._own_s = 0.0
        self._since: float | None = None

    def works(self) -> None:
        """From here on it is own time."""
        self._since = time.perf_counter()

    def rests(self) -> None:
        """From here on it is not."""
        if self._since is not None:
            self._own_s += time.perf_counter() - self._since
            self._since = None

    def meets(self) -> None:
        """The others are waited for now."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        self.rests()

    def take(self) -> float:
        """The own seconds since the last call; a time that runs goes on."""
        running = self._since is not None
        self.rests()
        own_s, self._own_s = self._own_s, 0.0
        if running:
            self.works()
        return own_s
