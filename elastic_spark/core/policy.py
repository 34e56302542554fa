"""Failure policy: who is to blame, and for how long. Pure.

A machine is remembered by its real host name with a score that every failure raises by one and that halves every
`HALF_LIFE_S`. From `SUSPECT_SCORE` on its newcomers wait, the longer the higher the score, never for ever, and only
where another machine does better by more than chance: on a cluster of one machine, or when all machines fail alike, the
machine is not the cause.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

HALF_LIFE_S = 300.0
SUSPECT_SCORE = 2.5
#: A machine is suspect only where another one's score is lower by at least this.
MARGIN = 1.5
FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 600.0


@dataclass(frozen=True)
class Probation:
    """``scores[host] = (score, time of the last failure)``."""

    scores: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def score(self, host: str, now: float) -> float:
        """score * 2 ** (-(now - last failure) / HALF_LIFE_S)"""
        score, at = self.scores.get(host, (0.0, now))
        return float(score * 2.0 ** (-max(0.0, now - at) / HALF_LIFE_S))

    def failed(self, host: str, now: float) -> Probation:
        return Probation({**self.scores, host: (self.score(host, now) + 1.0, now)})

    def wait_s(self, host: str, now: float) -> float:
        """How long after its last failure the host stays on probation: FIRST_WAIT_S * 2 ** (score - SUSPECT_SCORE)."""
        score = self.score(host, now)
        if score < SUSPECT_SCORE:
            return 0.0
        return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (score - SUSPECT_SCORE)))

    def is_on(self, host: str, hosts: Collection[str], now: float) -> bool:
        """Whether newcomers of ``host`` wait, given all the ``hosts`` that serve the job."""
        others = [self.score(other, now) for other in hosts if other != host]
        if not others or min(others) + MARGIN > self.score(host, now):
            return False
        _, at = self.scores.get(host, (0.0, now))
        return now - at < self.wait_s(host, now)


class SeenError(Protocol):
    @property
    def error(self) -> str: ...
    @property
    def step(self) -> int: ...


def is_repeated(error: str, step: int, before: Iterable[SeenError]) -> bool:
    """The same error at the same step as before: deterministic, so trying again cannot help."""
    return any(seen.error == error and seen.step == step for seen in before)
