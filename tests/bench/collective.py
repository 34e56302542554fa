"""Figures of the collective seam: pauses around faults, and seconds of an init by phase and size of the world.

``python tests/bench/collective.py [trials] [sizes ...]``; the last line of the output is one JSON object. What Horovod
is measured is the one that Python finds first. Seconds depend on the machine: all workers share its cores.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from collective_world import Template, World

from elastic_spark.driver import rendezvous as rendezvous_module

STEP_PAUSE_S = 0.008


async def fill(world: World, size: int) -> None:
    while len(world.alive()) > size:
        await world.leave(world.members[-1])
    while len(world.alive()) < size:
        await world.add(f"w{len(world.workers)}")
    await world.progress(size, limit=120)


async def settle(world: World, expected: set[str]) -> bool:
    """Waits until whoever is left goes on; fresh workers come where nobody is. Whether all of ``expected`` are left."""
    await world.until(lambda: not world.alive() or world.has_progress())
    ok = expected <= set(world.alive())
    if not world.alive():
        await world.add(f"w{len(world.workers)}", f"w{len(world.workers) + 1}")
        await world.progress()
    return ok


Fault = Callable[[World, random.Random], Awaitable[tuple[float, set[str]]]]


async def kill(world: World, chance: random.Random) -> tuple[float, set[str]]:
    await asyncio.sleep(chance.uniform(0, 0.1))
    victim = chance.choice(world.members)
    expected = set(world.alive()) - {victim}
    at = world.kill(victim)
    await world.until(lambda: not world.workers[victim].alive)
    return at, expected


async def kill_two(world: World, chance: random.Random) -> tuple[float, set[str]]:
    first, second = chance.sample(world.members, 2)
    expected = set(world.alive()) - {first, second}
    at = world.kill(first)
    await asyncio.sleep(chance.uniform(0, 0.3))
    if world.workers[second].alive:
        world.kill(second)
    await world.until(lambda: not {first, second} & set(world.alive()))
    return at, expected


async def kill_newcomer(world: World, chance: random.Random) -> tuple[float, set[str]]:
    expected, name = set(world.alive()), f"w{len(world.workers)}"
    await world.add(name)
    await world.until(lambda: name in world.members)
    at = time.monotonic()
    await asyncio.sleep(chance.uniform(0, 0.15))
    world.kill(name)
    await world.until(lambda: not world.workers[name].alive)
    return at, expected


async def freeze(world: World, chance: random.Random) -> tuple[float, set[str]]:
    victim = chance.choice(world.members)
    expected = set(world.alive()) - {victim}
    world.kill(victim, signal.SIGSTOP)
    await asyncio.sleep(0.1)
    at = time.monotonic()
    await world.lose(victim)
    return at, expected


async def join(world: World, chance: random.Random) -> tuple[float, set[str]]:
    """Measured from the moment the old world ends: the newcomer is warm."""
    generation, name = world.generation, f"w{len(world.workers)}"
    expected = {*world.alive(), name}
    await world.add(name)
    await world.until(lambda: world.generation > generation)
    at = max(
        step.at for member in world.members for step in world.workers[member].steps if step.generation <= generation
    )
    return at, expected


async def pauses(template: Template, fault: Fault, size: int, trials: int) -> dict[str, Any]:
    chance, seconds, ok = random.Random(size), [], 0
    async with World(template, first=size, pause=STEP_PAUSE_S) as world:
        for _ in range(trials):
            await fill(world, size)
            at, expected = await fault(world, chance)
            good = await settle(world, expected)
            ok += good
            if good:
                seconds.append(world.pause_after(at))
            for worker in world.workers.values():
                if not worker.alive and worker.exit_code is None:
                    world.kill(worker.name)
        world.check_equal_states()
    return {"ok": ok, "trials": trials, **spread(seconds)}


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [float("nan")]
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 3), "p95": round(p95, 3), "max": round(ordered[-1], 3)}


async def phases(template: Template, size: int, resets: int) -> dict[str, float]:
    """Medians of seconds over resets without a fault, from the first assignment sent to the last mesh complete."""
    times: dict[int, dict[str, list[float]]] = {}
    handle = rendezvous_module._Generation.handle

    def timed(self: Any, connection: Any, request: Any) -> None:
        scope = request.scope.replace("cross_0", "cross")
        name = "local" if scope.startswith("local_") else scope.partition("_hash_")[0]
        times.setdefault(self.number, {}).setdefault(name, []).append(time.monotonic())
        handle(self, connection, request)

    rendezvous_module._Generation.handle = timed  # type: ignore[method-assign]
    async with World(template, first=size, job="reset_often", times=resets) as world:
        await world.add(*(f"w{number}" for number in range(size)))
        await world.until(lambda: all(worker.noted("done") for worker in world.workers.values()), limit=300)
        rendezvous_module._Generation.handle = handle  # type: ignore[method-assign]
        rows = []
        for number in range(2, world.generation + 1):
            formed = world.formed_at[number]
            ends = {name: max(seen) - formed for name, seen in times[number].items()}
            inits = [i["seconds"] for w in world.workers.values() for i in w.inits if i["generation"] == number]
            rows.append(
                {
                    "first_request": min(min(seen) for seen in times[number].values()) - formed,
                    "global_mesh": ends["global"],
                    "cross_mesh": ends["cross"] - ends["global"],
                    "process_set_meshes": max(ends.values()) - ends["cross"],
                    "init": max(inits),
                    "requests": float(sum(len(seen) for seen in times[number].values())),
                }
            )
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


async def main(trials: int, sizes: list[int]) -> None:
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Template(Path(folder) / "workers.log") as template:
        result["horovod"] = "mended" if template.mended else "stock"
        for fault, size in ((kill, 3), (kill_two, 4), (kill_newcomer, 3), (freeze, 3), (join, 2)):
            result[fault.__name__] = await pauses(template, fault, size, trials)
            print(fault.__name__, result[fault.__name__], flush=True)
        result["init"] = {}
        for size in sizes:
            result["init"][str(size)] = await phases(template, size, 12 if size <= 8 else 6)
            print(size, result["init"][str(size)], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(int((sys.argv[1:] or ["20"])[0]), [int(size) for size in sys.argv[2:]] or [2, 4, 8, 16]))
