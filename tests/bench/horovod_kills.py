"""Kill ranks of the installed Horovod at random moments of init and of training; count what becomes of the survivors.

    python tests/bench/horovod_kills.py [TRIALS] [RANKS] [SEED]

Each trial forms a world, kills one rank (half of the time a second one too) at a random moment, and then forms the next
world from the survivors and fresh ranks: survivors must end each time with a Python error, never with their process.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from horovod_ranks import Rank, Rendezvous, world


def main(trials: int = 20, size: int = 3, seed: int = 0) -> None:
    randomness = random.Random(seed)
    counts: Counter[str] = Counter()
    to_error: list[float] = []
    ranks: list[Rank] = []
    for _ in range(trials):
        while len(ranks) < size:
            ranks.append(Rank())
            ranks[-1].answer()
        server = Rendezvous()
        numbers, tensors = randomness.choice([(10, 50), (10, 1), (100_000, 4)])
        for number, rank in enumerate(ranks):
            rank.tell("init", env=world(server, number, size, timeout_s=4))
            rank.tell("train", numbers=numbers, tensors=tensors)
        delay = randomness.choice([randomness.uniform(0, 0.15), randomness.uniform(0, 1.0)])
        victims = randomness.sample(ranks, randomness.choice([1, 1, 2]) if size > 2 else 1)
        time.sleep(delay)
        for victim in victims:
            victim.process.kill()
        killed_at = time.time()
        survivors = [rank for rank in ranks if rank not in victims]
        ranks = []
        for rank in survivors:
            try:
                outcome = _outcome(rank)
            except AssertionError as problem:
                counts["LOST: " + str(problem).splitlines()[0][:300]] += 1
                rank.__exit__()
                continue
            counts[outcome["what"]] += 1
            to_error.append(outcome["at"] - killed_at)
            rank.tell("shutdown")
            rank.answer()
            ranks.append(rank)
        for victim in victims:
            victim.__exit__()
        threading.Thread(target=server.close).start()
    for rank in ranks:
        rank.__exit__()
    to_error.sort()
    print(f"{trials} trials, {size} ranks, seed {seed}: {dict(counts)}")
    if to_error:
        p50, p95 = to_error[len(to_error) // 2], to_error[int(len(to_error) * 0.95)]
        print(f"kill to error, s: p50 {p50:.3f}, p95 {p95:.3f}, max {to_error[-1]:.3f}")


def _outcome(rank: Rank) -> dict[str, float | str]:
    """What init and training ended with: both answers are read, so that the next world starts clean."""
    init = rank.answer(60)
    in_init = "error" in init
    last = rank.answer(60)
    if last.get("training"):
        last = rank.answer(60)
    if in_init:
        return {"what": "error in init" if init["error"] == "ValueError" else str(init), "at": init["at"]}
    return {"what": "error in training" if last["error"] == "HorovodInternalError" else str(last), "at": last["at"]}


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
