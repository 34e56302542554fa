"""When to save, and which checkpoints may go. Pure policies: the caller's clock comes in, the reason comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Share of the RPO target that is aimed at.
AIM = 0.97


def due(
    now: float,
    last_save_at: float,
    cost_s: float,
    step_s: float,
    *,
    rpo_target_s: float = 10.0,
    budget: float = 0.01,
    write_s: float = 0.0,
) -> tuple[bool, str]:
    """Whether a checkpoint is to be taken at this commit, and if so why (the bound that decides is named).

    All in seconds by one clock. ``last_save_at``: when the state last saved was current.
    ``cost_s``: training time that one save takes away. ``step_s``: until the next commit, the next chance.
    ``write_s``: from the state being current until it is durable.

    Two bounds ask for an interval T between saves: losing everything just before a save is durable loses
    ``T + write_s``, so ``T <= rpo_target_s - write_s``, a step less because saves happen only at commits, and of
    ``rpo_target_s`` only `AIM`, because the next write may take longer than the last one; and a share
    ``cost_s / T`` of the time goes into saving, so ``T >= cost_s / budget``. Where both cannot hold the
    budget does, and the reason gives the RPO that remains.
    """
    elapsed = now - last_save_at
    wanted = max(AIM * rpo_target_s - write_s - step_s, 0.0)
    allowed = cost_s / budget if budget > 0 else math.inf if cost_s > 0 else 0.0
    if elapsed < max(wanted, allowed):
        return False, ""
    if allowed > wanted:
        return True, (
            f"ckpt_budget binds: a save costs {cost_s:.3g} s, so one in {allowed:.3g} s; "
            f"RPO is {allowed + write_s + step_s:.3g} s, over rpo_target_s = {rpo_target_s:g}"
        )
    return True, f"rpo_target_s = {rpo_target_s:g} binds: one save in {wanted:.3g} s"


@dataclass(frozen=True)
class Stored:
    """A stored checkpoint as retention sees it. ``score``: lower is better; None or not finite is never the best.
    ``good`` is False where its own writer found NaN in it: valid, and no place to go back to."""

    name: str
    step: int
    created_unix: float = 0.0
    valid: bool = True
    score: float | None = None
    good: bool = True


def to_delete(checkpoints: Sequence[Stored], keep: int, *, keep_best: int = 0) -> list[Stored]:
    """Those that may go, oldest first: all but the newest ``keep``, the ``keep_best`` valid ones with the lowest score,
    and the newest valid one and the newest that is good besides, which stay whatever the numbers say. Where none is
    valid, nothing goes."""
    newest_first = sorted(checkpoints, key=lambda item: (item.step, item.created_unix, item.name), reverse=True)
    newest_valid = next((item for item in newest_first if item.valid), None)
    if newest_valid is None:
        return []
    ranked = [
        (item.score, -item.step, item.name) for item in newest_first if item.valid and item.good and _finite(item.score)
    ]
    best = {name for _, _, name in sorted(ranked)[: max(keep_best, 0)]}
    kept = {item.name for item in newest_first[: max(keep, 0)]} | best | {newest_valid.name}
    kept |= {item.name for item in [item for item in newest_first if item.valid and item.good][:1]}
    return [item for item in reversed(newest_first) if item.name not in kept]


def _finite(score: float | None) -> bool:
    return score is not None and math.isfinite(score)
