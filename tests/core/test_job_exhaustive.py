"""The reset protocol, exhaustively: three workers, two faults, every order of what can happen.

A search over all states of a job together with its processes (`job_model.Cluster`). Processes react to the effects that
they were sent in any order, and what they say is read at any time later: also after they, or their peers, are gone.
`job_model.check` holds in every turn; and from every state in which no more faults strike, there is a way on to a
running world or to a named end, made only of what surely happens: nothing is waited for that may not come.

Time stands still, except that a tick may find that ``break_after_s`` is over: limits, which only add ways out, are
switched off. States that differ in names, in counts of what has been, or in when it was, are one.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import pytest
from job_model import Cluster, replace

from elastic_spark.core import job as core
from elastic_spark.core.job import settle

NEVER = 1e12
CUT = "the search was cut short"


def options(min_num_proc: int) -> core.Options:
    return core.Options(
        num_proc=3,
        min_num_proc=min_num_proc,
        max_num_proc=3,
        start_timeout=NEVER,
        elastic_timeout=NEVER,
        settle_s=0.0,
        memory_s=NEVER,
        join_delay_s=0.0,
        frozen_after_s=NEVER,
        silent_all_after_s=NEVER,
        init_timeout_s=NEVER,
        warm_timeout_s=NEVER,
        notify_every_s=0.0,
        break_after_s=0.5,
        watch_after_s=NEVER,
        spawn_limit=100,
    )


def at_rest(cluster: Cluster) -> Cluster:
    """All times set to 0."""
    job = cluster.job
    workers = {name: replace(worker, heard=0.0, since=0.0) for name, worker in job.workers.items()}
    agents = {name: replace(agent, heard=0.0, spawn_at=0.0) for name, agent in job.agents.items()}
    zero = {"ticked": 0.0, "paused": 0.0, "ending_since": 0.0, "bereft_since": 0.0, "arrived": 0.0}
    zero["notified"] = float("-inf")
    return replace(cluster, now=0.0, job=replace(job, workers=workers, agents=agents, **zero))


def key(cluster: Cluster, finish: bool) -> Hashable:
    """What tells two states apart. Generations and steps count from the present ones. Newcomers go by age.

    Ranks have no order, as it decides nothing but which of several draining members stays, where one must. Only where
    functions ``finish`` rank 0 is told apart.
    """
    job, base = cluster.job, max(cluster.job.formed_step, 0)

    def seen(name: str) -> Hashable:
        worker, process = job.workers.get(name), cluster.processes.get(name)
        if worker is None or process is None:
            return name in job.workers, name in cluster.processes
        agent = job.agents.get(worker.agent)
        return (
            worker.stage,
            worker.step - base if worker.step >= 0 else None,
            agent and (min(agent.failures, 2), agent.draining, agent.remembers),
            process.phase,
            process.fault,
            process.in_flight,
            process.told,
            process.broken,
            job.generation - process.generation if process.generation else None,
            process.step - base if process.step >= 0 else None,
        )

    names = sorted(job.workers.keys() | cluster.processes.keys(), key=lambda name: int(name[1:]))
    return (
        tuple(sorted((seen(name) for name in job.members), key=hash)),
        seen(job.members[0]) if job.members and finish else None,
        tuple(seen(name) for name in names if name not in job.members),
        tuple(sorted((min(a.failures, 2), a.draining, a.remembers) for a in job.agents.values() if a.worker is None)),
        len(job.agents),
        (job.generation > 0, job.ending is None, job.ending == "reset", job.broken, bool(job.lost), bool(job.perished)),
        (job.idle_resets, min(job.unformed, 3), job.barren_resets, job.stillborn, job.ran_at is None),
        (job.formed_step < 0, job.formed_step > 0, job.saved),
        job.ended,
    )


def happenings(cluster: Cluster) -> Iterator[tuple[bool, Cluster]]:
    """Everything that may happen next without another fault, and whether it surely will."""
    for name, process in cluster.processes.items():
        yield from cluster.reactions(name)
        if process.fault:
            yield True, cluster.found_out(name)
    job = cluster.job
    planned = job.ending is not None and not job.broken and not job.lost
    if planned or any(agent.worker is None for agent in job.agents.values()):
        yield True, at_rest(replace(cluster, now=0.6).feed(core.Tick()))


def faults(cluster: Cluster) -> Iterator[Cluster]:
    """Everything that may go wrong next, and a newcomer."""
    for name, process in cluster.processes.items():
        if process.fault:
            continue
        yield cluster.struck(name, "dead")
        if process.phase != "warming":
            yield cluster.struck(name, "frozen")
        if process.phase == "init":
            yield cluster.ask(name, "init failed")
        if process.phase == "running":
            yield cluster.ask(name, "collective failed")
    for agent in cluster.job.agents.values():
        yield cluster.agent_down(agent.id)
        if not agent.draining:
            yield cluster.drain(agent.id)
    if len(cluster.job.agents) < 4:
        yield cluster.agent_up()


def endings(cluster: Cluster) -> Iterator[Cluster]:
    """Processes whose function returns: its last collective was in the world that runs."""
    for name, process in cluster.processes.items():
        if process.phase == "running" and not process.fault and cluster.mesh(name) == "whole":
            yield cluster.finish(name)


@dataclass
class Graph:
    """What is reachable. ``dead_ends``: states from which what surely happens does not lead to a running world or to an
    end."""

    states: int
    turns: int
    goals: int
    dead_ends: list[Cluster]


def explore(start: Cluster, budget: int, *, finish: bool = False, refill: bool = False) -> Graph:
    """Breadth first, with at most ``budget`` faults. ``finish``: functions return; ``refill``: Spark brings agents."""
    states = [(start, budget)]
    index = {(key(start, finish), budget): 0}
    origins: list[list[int]] = [[]]
    goals: list[int] = []
    turns = 0
    for here, (state, left) in enumerate(states):  # grows while it is read
        if state.runs or state.job.ended is not None:
            goals.append(here)
        if state.job.ended is not None:
            continue
        nexts = [(sure, after, left) for sure, after in happenings(state)]
        nexts += [(bool(state.job.done_members()), after, left) for after in (endings(state) if finish else ())]
        nexts += [(True, state.agent_up(), left)] if refill and len(state.job.agents) < 3 else []
        nexts += [(False, after, left - 1) for after in (faults(state) if left else ())]
        turns += len(nexts)
        for sure, after, rest in nexts:
            there = index.setdefault((key(after, finish), rest), len(states))
            if there == len(states):
                states.append((after, rest))
                origins.append([])
            if sure:
                origins[there].append(here)
    alive, stack = set(goals), list(goals)
    while stack:
        for origin in origins[stack.pop()]:
            if origin not in alive:
                alive.add(origin)
                stack.append(origin)
    return Graph(len(states), turns, len(goals), [s for number, (s, _) in enumerate(states) if number not in alive])


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Many objects, all of which stay: looking for garbage among them would take a third of the time."""
    gc.disable()
    yield
    gc.enable()


def three_workers(min_num_proc: int) -> Cluster:
    """Three agents whose workers are warming."""
    cluster = Cluster(core.start(options(min_num_proc), 0.0))
    for _ in range(3):
        cluster = cluster.agent_up()
    return cluster


def running(min_num_proc: int) -> Cluster:
    cluster = three_workers(min_num_proc)
    while not cluster.runs:
        _, cluster = next(happenings(cluster))
    return cluster


def two_that_hold_a_step() -> Cluster:
    """A world of two runs, and has committed."""
    cluster = Cluster(core.start(replace(options(1), num_proc=2), 0.0)).agent_up().agent_up()
    while not cluster.runs:
        _, cluster = next(happenings(cluster))
    return at_rest(cluster.feed(core.Tick(1)))


def test_one_fault_at_any_moment_of_the_start() -> None:
    found = explore(three_workers(2), 1)
    assert found.dead_ends == []
    assert (found.states, found.turns) > (900, 2500), CUT


def test_two_faults_at_any_moments_of_a_running_world() -> None:
    found = explore(running(1), 2)
    assert found.dead_ends == []
    assert (found.states, found.turns) > (9000, 30000), CUT


def test_one_fault_where_all_workers_are_needed() -> None:
    found = explore(running(3), 1, refill=True)
    assert found.dead_ends == []
    assert (found.states, found.turns) > (250, 700), CUT


def test_one_fault_while_the_world_finishes() -> None:
    found = explore(running(2), 1, finish=True)
    assert found.dead_ends == []
    assert (found.states, found.turns) > (1200, 3000), CUT


def test_memory_is_waited_for_only_where_it_surely_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both who hold the state are lost. There is no limit here to a wait for what their agents remember."""
    waits, awaits = [], settle._awaits_memory
    monkeypatch.setattr(settle, "_awaits_memory", lambda turn: waits.append(awaits(turn)) or waits[-1])
    found = explore(two_that_hold_a_step(), 2)
    assert [end for end in found.dead_ends if end.job.agents] == [], "elsewhere elastic_timeout ends the job"
    assert (found.states, found.turns) > (3000, 8000), CUT
    assert sum(waits) > 100


def test_the_search_finds_a_driver_that_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: without `BreakGeneration`, those that wait for a frozen peer wait for ever."""
    monkeypatch.setattr(settle, "_gather", lambda turn, live: None)
    found = explore(running(1), 1)
    assert found.dead_ends != []
