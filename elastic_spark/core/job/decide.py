"""`step`: what happened, taken into the state. What follows from that is in `settle`, what from time in `limits`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elastic_spark.core import events as ev
from elastic_spark.core.job import inputs as i
from elastic_spark.core.job.effects import Effect
from elastic_spark.core.job.limits import judge, take_down_agent
from elastic_spark.core.job.settle import settle
from elastic_spark.core.job.state import IN_WORLD, Agent, Ended, Failure, Job, Options, Stage, Worker
from elastic_spark.core.job.turn import Turn


def start(options: Options, now: float) -> Job:
    """A job without agents, at unix time ``now``."""
    return Job(options=options, started=now, ticked=now, arrived=now, watched=now)


def step(job: Job, happened: i.Input, now: float) -> tuple[Job, list[Effect]]:
    """Decide. Unknown or late inputs (of workers that are gone, of generations that are over) change nothing.

    ``now`` never decreases from one call to the next, and a `Tick` comes every `TICK_S` seconds.
    """
    if job.ended is not None:
        return job, []
    turn = Turn(_awake(job, now), now)
    _HANDLERS[type(happened)](turn, happened)
    if turn.job.ended is None:
        settle(turn)
    return turn.job, turn.effects


def _awake(job: Job, now: float) -> Job:
    """Where ticks stayed away, this driver was paused or starved: that time did not happen, for nobody.

    The clock still goes on a little, so that every limit is reached even where each tick is late.
    """
    longest = job.options.frozen_after_s / 4
    gap = now - job.ticked
    return job if gap <= longest else replace(job, paused=job.paused + gap - longest, ticked=now)


def _on_agent_up(turn: Turn, happened: i.AgentUp) -> None:
    if happened.agent in turn.job.agents:
        return
    agent = Agent(happened.agent, happened.slot, happened.host, happened.executor, heard=turn.clock)
    if agent.executor in turn.job.draining:
        turn.release(agent, "draining")
        return
    turn.set(arrived=turn.clock)
    turn.spawn(agent)


def _on_agent_down(turn: Turn, happened: i.AgentDown) -> None:
    agent = turn.job.agents.get(happened.agent)
    if agent is not None:
        take_down_agent(turn, agent, happened.cause)


def _on_agent_heard(turn: Turn, happened: i.AgentHeard) -> None:
    agent = turn.job.agents.get(happened.agent)
    if agent is not None:
        turn.put_agent(replace(agent, heard=turn.clock))


def _on_worker_up(turn: Turn, happened: i.WorkerUp) -> None:
    _hear(turn, happened.worker)


def _on_heard(turn: Turn, happened: i.Heard) -> None:
    worker = _hear(turn, happened.worker)
    if worker is not None:
        waits = worker.waits if happened.waits is None else happened.waits
        stalled = worker.stalled if happened.stalled is None else happened.stalled
        turn.put(replace(worker, where=happened.where or worker.where, waits=waits, stalled=stalled))


def _hear(turn: Turn, name: str) -> Worker | None:
    """The worker, heard just now; None where it is gone."""
    worker = turn.job.workers.get(name)
    if worker is not None:
        worker = replace(worker, heard=turn.clock)
        turn.put(worker)
    return worker


def _on_ready(turn: Turn, happened: i.Ready) -> None:
    worker = _hear(turn, happened.worker)
    if worker is not None and worker.stage is Stage.WARMING:
        turn.record(ev.WorkerReady(at=turn.now, worker=worker.id, seconds=turn.clock - worker.since))
        turn.put(replace(worker, found=happened.step, found_in=happened.generation))
        turn.move(turn.job.workers[worker.id], Stage.READY)
        turn.set(arrived=turn.clock, stillborn=0)


def _on_initialised(turn: Turn, happened: i.Initialised) -> None:
    worker = _hear(turn, happened.worker)
    if worker is None or worker.stage is not Stage.CALLED or happened.generation != turn.job.generation:
        return
    turn.move(worker, Stage.RUNNING)
    turn.put_agent(replace(turn.job.agents[worker.agent], remembers=True))
    live = turn.job.live_members()
    if turn.job.ending is None and all(member.stage is Stage.RUNNING for member in live):
        fresh = {member.agent for member in live}
        agents = {name: replace(a, failures=0) if name in fresh else a for name, a in turn.job.agents.items()}
        turn.set(agents=agents, ran_at=turn.clock)
        seconds = turn.clock - worker.since
        turn.record(ev.GenerationRunning(at=turn.now, generation=turn.job.generation, seconds=seconds))


def _on_asked(turn: Turn, happened: i.Asked) -> None:
    worker = _hear(turn, happened.worker)
    if worker is None or worker.stage not in IN_WORLD or happened.generation != turn.job.generation:
        return
    turn.move(worker, Stage.ASKING, step=happened.step)
    if happened.error:
        turn.set(last_error=happened.error)
    turn.end_generation(happened.reason)


def _on_finished(turn: Turn, happened: i.Finished) -> None:
    worker = _hear(turn, happened.worker)
    if worker is not None and worker.stage in IN_WORLD:
        turn.move(worker, Stage.DONE)


def _on_worker_down(turn: Turn, happened: i.WorkerDown) -> None:
    worker = turn.job.workers.get(happened.worker)
    if worker is None:
        return
    if happened.tail:
        turn.set(last_words=happened.tail)
    if worker.stage in IN_WORLD:
        turn.set(perished=(*turn.job.perished, worker.id))
    # where a collective failed under a plain function, the peer that broke it is to blame, not this one
    blame = happened.cause != "collective failed"
    turn.lose(worker, happened.cause, happened.detail, happened.exit_code, happened.tail, blame=blame)


def _on_user_error(turn: Turn, happened: i.UserError) -> None:
    worker = _hear(turn, happened.worker)
    if worker is None:
        return
    rank = turn.job.members.index(worker.id) if worker.id in turn.job.members else -1
    failure = Failure(worker.id, rank, happened.step, happened.at, happened.error, happened.traceback, happened.kind)
    turn.record(
        ev.UserFailed(
            at=turn.now,
            worker=worker.id,
            rank=rank,
            step=happened.step,
            error=happened.error,
            traceback=happened.traceback,
        )
    )
    since = turn.job.failed_since if turn.job.failures else turn.clock
    turn.set(failures=(*turn.job.failures, failure), failed_since=since)


def _on_draining(turn: Turn, happened: i.Draining) -> None:
    turn.set(draining=turn.job.draining | {happened.executor})
    for agent in list(turn.job.agents.values()):
        if agent.executor != happened.executor or agent.draining:
            continue
        turn.put_agent(replace(agent, draining=True))
        worker = turn.job.workers.get(agent.worker or "")
        if worker is None:
            turn.release(agent, "draining")
            continue
        turn.record(ev.WorkerDraining(at=turn.now, worker=worker.id, reason=happened.reason))
        if worker.stage in (Stage.WARMING, Stage.READY):
            turn.dismiss_draining(worker)


def _on_unbalanced(turn: Turn, happened: i.Unbalanced) -> None:
    turn.set(unbalanced=happened.generation == turn.job.generation)


def _on_alarmed(turn: Turn, happened: i.Alarmed) -> None:
    job, options = turn.job, turn.job.options
    if options.guard == "warn" or happened.generation <= job.undone:
        return
    if job.suspect_from is not None:  # the way back is under way already
        turn.set(suspect_from=min(job.suspect_from, happened.suspect_from))
    elif options.guard == "stop":
        turn.end(Ended("FAILED", f"{happened.why}; guard='stop' ends the job there", "GuardStopped"))
    elif job.rollbacks >= options.guard_rollbacks:
        message = f"{happened.why}; the job has been rolled back {job.rollbacks} times already (guard_rollbacks)"
        turn.end(Ended("FAILED", message, "GuardStopped"))
    else:
        turn.set(suspect_from=happened.suspect_from, alarm=happened.why, rollbacks=job.rollbacks + 1)


def _on_fault(turn: Turn, happened: i.Fault) -> None:
    status = "KILLED" if happened.kind == "JobCancelled" else "FAILED"
    turn.end(Ended(status, happened.error, happened.kind))


def _on_cancel(turn: Turn, happened: i.Cancel) -> None:
    job, ended = turn.job, Ended("KILLED", happened.error, happened.kind)
    if job.cancelled is None and job.live_members():
        turn.set(cancelled=ended, cancelled_at=turn.clock, cancelled_step=-1)
    else:
        turn.end(ended)


def _on_reading(turn: Turn, happened: i.Reading) -> None:
    """The time of those who are called begins later."""
    for worker in turn.job.live_members() if happened.generation == turn.job.generation else ():
        if worker.stage is Stage.CALLED:
            turn.put(replace(worker, since=turn.clock))


def _on_tick(turn: Turn, happened: i.Tick) -> None:
    turn.set(ticked=turn.now)
    if happened.committed is not None:
        turn.set(committed=happened.committed)
    if happened.durable is not None:
        turn.set(durable=happened.durable)
    if turn.job.committed > turn.job.best:
        turn.set(best=turn.job.committed, idle_resets=0, unformed=0, barren_resets=0)
    judge(turn)


_HANDLERS: Mapping[type[i.Input], Callable[[Turn, Any], None]] = {
    i.AgentUp: _on_agent_up,
    i.AgentDown: _on_agent_down,
    i.AgentHeard: _on_agent_heard,
    i.WorkerUp: _on_worker_up,
    i.WorkerDown: _on_worker_down,
    i.Ready: _on_ready,
    i.Heard: _on_heard,
    i.Initialised: _on_initialised,
    i.Asked: _on_asked,
    i.Finished: _on_finished,
    i.UserError: _on_user_error,
    i.Draining: _on_draining,
    i.Unbalanced: _on_unbalanced,
    i.Reading: _on_reading,
    i.Alarmed: _on_alarmed,
    i.Cancel: _on_cancel,
    i.Fault: _on_fault,
    i.Tick: _on_tick,
}
