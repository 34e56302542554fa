"""Which world comes next: who stays, who joins, who leaves, who is rank 0."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_spark.core.job.state import Job, Stage, Worker


@dataclass(frozen=True)
class Plan:
    """``survivors``: members that stay, by their new ranks; ``joined``: newcomers, after them; ``left``: members that
    go in good order."""

    survivors: tuple[Worker, ...]
    joined: tuple[Worker, ...]
    left: tuple[Worker, ...]

    @property
    def size(self) -> int:
        return len(self.survivors) + len(self.joined)

    @property
    def is_change(self) -> bool:
        """Whether it differs from the world of the live members."""
        return bool(self.joined or self.left)


def next_world(job: Job, clock: float) -> Plan:
    """The world to form now.

    Draining members leave, except where nobody else holds the newest step, or where without them the world would be
    too small (then all of them stay), or where nobody at all would take over. READY workers join, the longest waiting
    first, up to ``max_num_proc``; those of hosts on probation only where there would be too few otherwise. Where nobody
    alive holds anything, those come first who have found the newest snapshot in memory; the first one on whatever host.
    """
    options, live = job.options, job.live_members()
    trusted, suspect = _newcomers(job, clock)
    staying = [member for member in live if not job.is_draining(member)]
    pool = trusted if len(staying) + len(trusted) >= options.min_num_proc else trusted + suspect
    if all(member.stage is Stage.ASKING and member.step < 0 for member in live):
        finder = max(trusted + suspect, key=job.found, default=None)
        pool = sorted(pool, key=job.found, reverse=True)
        if finder is not None and finder not in pool and job.found(finder) >= 0:
            pool = [finder, *pool]
    if live and (staying or pool):
        holders = _holders(live)
        if not any(member in staying for member in holders):
            staying.append(holders[0])
    if len(staying) + len(pool) < options.min_num_proc or not staying:
        staying = live
    joined = pool[: max(0, options.max_num_proc - len(staying))]
    left = [member for member in live if member not in staying]
    return Plan(tuple(_ranked(job, staying)), tuple(joined), tuple(left))


def _newcomers(job: Job, clock: float) -> tuple[list[Worker], list[Worker]]:
    """READY workers whose host is trusted, and those whose host is on probation, both by how long they wait."""
    ready = [worker for worker in job.workers.values() if worker.stage is Stage.READY]
    ready.sort(key=lambda worker: (worker.since, worker.id))
    hosts = {agent.host for agent in job.agents.values()}
    suspect = [worker for worker in ready if job.probation.is_on(worker.host, hosts, clock)]
    return [worker for worker in ready if worker not in suspect], suspect


def _holders(live: list[Worker]) -> list[Worker]:
    """Live members that hold the newest step, by rank: all, while it is not known of each what it holds."""
    if any(member.stage is not Stage.ASKING for member in live):
        return live
    newest = max(member.step for member in live)
    return [member for member in live if member.step == newest]


def _ranked(job: Job, staying: list[Worker]) -> list[Worker]:
    """By the old ranks, with the first one that holds the newest step in front."""
    ranks = {name: rank for rank, name in enumerate(job.members)}
    by_rank = sorted(staying, key=lambda member: ranks[member.id])
    source = max(by_rank, key=lambda member: member.step, default=None)
    return by_rank if source is None else [source, *(member for member in by_rank if member is not source)]
