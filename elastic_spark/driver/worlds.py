"""A world from the core's decision to its members' first word of it: what it starts from, where they meet, who is told
what; and its end, where it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from elastic_spark.checkpoint import Checkpoint
from elastic_spark.core import events as ev
from elastic_spark.core import job as core
from elastic_spark.core.ledger import Ledger, Report
from elastic_spark.driver.checkpoints import DriverCheckpoints
from elastic_spark.driver.lanes import Lanes
from elastic_spark.driver.peers import Peers, assignments
from elastic_spark.driver.rendezvous import Rendezvous
from elastic_spark.errors import JobHeld, StorageFailed

#: A world that takes longer to meet is told, with those who hold it up. It takes tenths of a second.
MEET_S = 3.0
#: Between two tries to read a checkpoint, and between two words that it is being read.
READ_AGAIN_S = 1.0
#: A checkpoint that is newer than what is in memory may take so long to be read, or its storage be away.
NEWER_S = 10.0
#: The driver tries for so long to open a port for a world, so many seconds apart.
OPEN_S, OPEN_AGAIN_S = 20.0, 0.5
#: The ports of so many worlds before stay open: some member may not have heard yet that its own is over.
OPEN_WORLDS = 3


class Worlds:
    """Lives in the event loop's thread, as all that it is given.

    Args:
        job: the core's state now. turn: hands an input to the core. append: takes facts down. now: unix time.
        read_limit_s: how long storage may be away, or a checkpoint take to be read, before the job fails.
        formed: called when the members have been told.
    """

    def __init__(
        self,
        host: str,
        *,
        seed: int,
        read_limit_s: float,
        peers: Peers,
        lanes: Lanes,
        ledger: Ledger,
        checkpoints: DriverCheckpoints,
        job: Callable[[], core.Job],
        turn: Callable[[core.Input], None],
        append: Callable[[Sequence[ev.Event]], None],
        now: Callable[[], float],
        formed: Callable[[core.Form], None],
    ) -> None:
        self._rendezvous = Rendezvous(host)
        self._seed, self._read_limit_s = seed, read_limit_s
        self._peers, self._lanes, self._ledger, self._checkpoints = peers, lanes, ledger, checkpoints
        self._job, self._turn, self._append, self._now, self._formed = job, turn, append, now, formed
        self._opened_at = (0, 0.0)  # generation and time
        self._durable_at = now()  # when the state that is safe in a checkpoint was current
        self._found: dict[str, tuple[str, int, list[Report]]] = {}

    def durable(self, current_at: float) -> None:
        """There is a checkpoint of the state that was current at ``current_at``."""
        self._durable_at = max(self._durable_at, current_at)

    def found(self, worker: str, of: str, generation: int, reports: list[Report]) -> None:
        """What a new process has found in the memory of ``of``, its predecessor."""
        self._found[worker] = of, generation, reports

    def forget(self, worker: str) -> None:
        """The process is gone, and what it had found with it."""
        self._found.pop(worker, None)

    async def form(self, effect: core.Form) -> None:
        """Read what the world starts from, open its rendezvous, and tell each member its place."""
        restored = await self._checkpoint_for(effect)
        if self._is_over(effect.generation):
            return  # all were lost while the checkpoint was verified: a later generation has been decided
        step = restored.step if restored is not None else max(0, effect.step)
        finder, from_memory = effect.members[0], effect.found > step
        if from_memory and finder in self._found:
            step, restored = effect.found, None
            self._ledger.find(*self._found[finder])
        elif from_memory:  # it has died meanwhile: this world never forms, and what was in its memory is not told yet
            step, restored = self._ledger.committed, None
        elif effect.restore:
            self._durable_at = self._now()
        if not await self._open(effect):
            return
        self._opened_at = (effect.generation, self._now())
        environments = self._rendezvous.environment(effect.generation)
        lanes = self._lanes.begin(effect.generation, effect.members, self._now())
        self._append(self._ledger.begin(effect.generation, effect.members, step, effect.cause, self._now()))
        restore = restored.uri if restored is not None else None
        formed = ev.GenerationFormed(
            at=self._now(),
            generation=effect.generation,
            members=effect.members,
            joined=effect.joined,
            lost=effect.lost,
            left=effect.left,
            cause=effect.cause,
            source=finder,
            step=step,
            restored_from=f"memory:{finder}" if from_memory else restore,
            lanes={name: [owned[worker] for worker in effect.members] for name, owned in lanes.items()},
        )
        self._append([formed])
        safe = {"durable_s": self._now() - self._durable_at}
        starts = {"restore": restore, "memory": from_memory, "step": step, "sole_holder": effect.sole_holder}
        common = {**starts, "seed": self._seed, **safe}
        for worker, message in assignments(effect.generation, effect.members, environments, lanes, common):
            self._peers.tell_worker(worker, message)
        for old in range(max(1, effect.generation - OPEN_WORLDS), effect.generation):
            self._rendezvous.close(old)
        if self._job().broken and self._job().generation == effect.generation:
            self.break_up(effect.generation, effect.members)  # broken before it was open
        self._formed(effect)

    async def _open(self, effect: core.Form) -> bool:
        """Whether the members can meet now. The driver may be out of descriptors, or its name server away, for a
        moment."""
        deadline = self._now() + OPEN_S
        while not self._is_over(effect.generation):
            try:
                await self._rendezvous.open(effect.generation, effect.members)
                return True
            except OSError as error:
                if self._now() >= deadline:
                    message = f"the workers cannot meet, as the driver can open no port: {error}"
                    self._turn(core.Fault("EnvironmentUnfit", message))
            await asyncio.sleep(OPEN_AGAIN_S)
        return False

    def break_up(self, generation: int, workers: Sequence[str]) -> None:
        """Nobody waits in it any longer, neither in its rendezvous nor in a collective."""
        self._rendezvous.cancel(generation)
        addresses = self._rendezvous.addresses(generation)
        for worker in workers:
            self._peers.tell_worker(worker, {"type": "abort", "generation": generation, "addresses": addresses})

    def name_who_is_waited_for(self) -> None:
        """Said once of a generation that does not meet; what follows is decided by the core's limits."""
        generation, since = self._opened_at
        if self._job().generation != generation or self._job().ran_at is not None or self._now() < since + MEET_S:
            return
        waited = self._rendezvous.waited_for(generation)
        if waited:
            self._opened_at = (0, 0.0)
            message = f"workers have waited for {', '.join(waited)} for {MEET_S:g} s to form their world"
            self._append([ev.Warned(at=self._now(), message=message, where=f"generation {generation}")])

    async def close(self) -> None:
        await self._rendezvous.close_all()

    def _is_over(self, generation: int) -> bool:
        return self._job().generation != generation or self._job().ended is not None

    async def _checkpoint_for(self, effect: core.Form) -> Checkpoint | None:
        """What the generation starts from, where its members do not hold the state themselves. To read it whole may
        take long, and storage may be away for a while."""
        in_memory = effect.before is None and effect.found >= 0
        if not effect.restore or (in_memory and effect.found >= self._checkpoints.best):
            return None
        limit_s = min(self._read_limit_s, NEWER_S) if in_memory else self._read_limit_s
        deadline = self._now() + limit_s
        while not self._is_over(effect.generation):
            reading = asyncio.ensure_future(self._choose(effect))
            while not (await asyncio.wait({reading}, timeout=READ_AGAIN_S))[0] and self._now() < deadline:
                self._turn(core.Reading(effect.generation))
            try:
                if reading.done():
                    return reading.result()
                why = "it takes longer"
            except StorageFailed as error:
                why = str(error)
            except JobHeld:
                return None
            if self._now() >= deadline:
                reading.cancel()
                if not in_memory:  # that may be older, but it is there
                    message = f"no checkpoint to go on from could be read within elastic_timeout={limit_s:g} s: {why}"
                    self._turn(core.Fault("StorageFailed", message))
                return None
            await asyncio.sleep(READ_AGAIN_S)
            self._turn(core.Reading(effect.generation))
        return None

    async def _choose(self, effect: core.Form) -> Checkpoint | None:
        if effect.before is None:
            return await self._checkpoints.newest(effect.generation)
        good = await self._checkpoints.good_before(effect.before, effect.generation)
        if good is None:
            why = f"{effect.cause}; there is no good checkpoint of a step before {effect.before} to go back to"
            self._turn(core.Fault("GuardStopped", why))
        return good
