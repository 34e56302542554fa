"""What follows from time alone: who is silent, who takes too long, what is due.

Silence is judged only against others: a worker that is not heard for ``frozen_after_s`` is lost when another one has
been heard meanwhile; when all are silent nobody is to blame until ``silent_all_after_s``. Imports may hold the
interpreter for long, so a WARMING worker is judged by its time limit alone. A worker that has finished is judged too,
while others may still need it in their last collectives; its value stays.
"""

from __future__ import annotations

from elastic_spark.core import events as ev
from elastic_spark.core.job.inputs import STALLED
from elastic_spark.core.job.state import Agent, Stage
from elastic_spark.core.job.turn import Turn

#: The start is watched from then on: imports and the first Spark tasks take their time.
START_WATCH_S = 20.0
#: A read of storage is told from then on, and who is waited for in a collective.
STALL_WATCH_S, PEER_WATCH_S = 20.0, 60.0


def judge(turn: Turn) -> None:
    """At each tick."""
    if turn.job.cancelled is not None and _is_safe_or_late(turn):
        turn.end(turn.job.cancelled)
        return
    _judge_silence(turn)
    _judge_stages(turn)
    _judge_finish(turn)
    _judge_stall(turn)
    _spawn_due(turn)
    _watch(turn)


def _is_safe_or_late(turn: Turn) -> bool:
    """Of a job that is cancelled: whether what it holds is in a checkpoint, and every step of that was told, or it is
    waited for no longer. What had been committed until then is known at the next tick."""
    if turn.job.cancelled_step < 0:
        turn.set(cancelled_step=turn.job.committed)
    job = turn.job
    late = turn.clock - job.cancelled_at > job.options.save_at_end_s or not job.live_members()
    return late or (max(0, job.durable) >= job.cancelled_step and job.committed >= job.durable)


def take_down_agent(turn: Turn, agent: Agent, cause: str) -> None:
    """The agent is gone, and its worker with it."""
    turn.drop_agent(agent)
    turn.record(ev.AgentLost(at=turn.now, agent=agent.id, cause=cause))
    worker = turn.job.workers.get(agent.worker or "")
    if worker is not None:
        turn.lose(worker, "executor lost", cause, blame=not agent.draining)


def _judge_silence(turn: Turn) -> None:
    options = turn.job.options
    hosted = [turn.job.workers[agent.worker] for agent in turn.job.agents.values() if agent.worker is not None]
    workers = [worker for worker in hosted if worker.stage is not Stage.WARMING]
    everybody = all(turn.clock - worker.heard > options.frozen_after_s for worker in workers)
    limit = options.silent_all_after_s if everybody else options.frozen_after_s
    for worker in workers:
        silence = turn.clock - worker.heard
        if silence > limit:
            turn.lose(worker, "frozen", f"not heard for {silence:.1f} s")
    agents = list(turn.job.agents.values())
    limit = 2 * options.frozen_after_s
    if all(turn.clock - agent.heard > limit for agent in agents):
        limit = options.silent_all_after_s
    for agent in agents:
        silence = turn.clock - agent.heard
        if silence > limit:
            turn.release(agent, "silent")
            take_down_agent(turn, agent, f"not heard for {silence:.1f} s")


def _judge_stages(turn: Turn) -> None:
    options = turn.job.options
    for worker in list(turn.job.workers.values()):
        age, late = turn.clock - worker.since, turn.clock - turn.job.ending_since
        if worker.stage is Stage.WARMING and age > options.warm_timeout_s:
            turn.lose(worker, "did not start", f"not ready after {age:.0f} s")
        elif worker.stage is Stage.CALLED and age > options.init_timeout_s and turn.job.ending is None:
            turn.end_generation(f"{worker.id} did not initialise within {options.init_timeout_s:.0f} s")
        elif worker.stage is Stage.CALLED and age > 2 * options.init_timeout_s:
            turn.lose(worker, "did not reset", f"in Horovod's init for {age:.0f} s")
        elif worker.stage is Stage.RUNNING and turn.job.ending is not None and late > options.elastic_timeout:
            turn.lose(worker, "did not reset", f"did not ask for {late:.0f} s: {worker.where}")
        elif worker.stage is Stage.RUNNING and worker.stalled > options.elastic_timeout:
            turn.lose(worker, STALLED, worker.where)
            turn.set(perished=(*turn.job.perished, worker.id))  # storage may be away for those who follow, too


def _judge_finish(turn: Turn) -> None:
    """Rank 0 has finished and others have not for long: they wait for it in a collective that will never come."""
    job = turn.job
    done = [worker for worker in job.done_members() if worker.id == job.members[0]]
    limit = job.options.elastic_timeout
    if done and job.ending is None and turn.clock - done[0].since > limit:
        turn.end_generation(f"rank 0 has finished, others have not for {limit:.0f} s")


def _judge_stall(turn: Turn) -> None:
    """All that have not finished wait in collectives, and none of them can be the one that the others wait for.

    One that evaluates alone, while the others wait for it, is in none.
    """
    job, live = turn.job, turn.job.live_members()
    limit = job.options.stall_after_s
    if live and job.ending is None and all(w.stage is Stage.RUNNING and w.waits > limit for w in live):
        who = ", ".join(worker.id for worker in live)
        turn.end_generation(f"{who} wait in collectives for {limit:.0f} s, and nobody is left to come")


def _spawn_due(turn: Turn) -> None:
    for agent in list(turn.job.agents.values()):
        if agent.worker is None and turn.clock >= agent.spawn_at:
            turn.spawn(agent)


def _watch(turn: Turn) -> None:
    """Say who waits for whom when the start or a change takes long, or a step does, less and less often."""
    job, options = turn.job, turn.job.options
    if job.generation > 0 and job.ending is None:
        _watch_world(turn)
        return
    since, first = (job.ending_since, options.watch_after_s) if job.generation else (job.started, START_WATCH_S)
    if _is_due(turn, since, first):
        who = f"{_who_waits(turn)} for {turn.clock - since:.0f} s"
        turn.warn(f"generation {job.generation}", f"{who} ({job.ending})" if job.ending else who)


def _watch_world(turn: Turn) -> None:
    """Whose storage does not answer; who is waited for in a collective, which may take its time."""
    live, where = turn.job.live_members(), f"generation {turn.job.generation}"
    stalled = max(live, key=lambda worker: worker.stalled, default=None)
    waiting = [worker for worker in live if worker.waits >= PEER_WATCH_S]
    others = ", ".join(f"{worker.id} ({worker.where})" for worker in live if worker not in waiting)
    if stalled is not None and stalled.stalled >= STALL_WATCH_S:
        if _is_due(turn, turn.clock - stalled.stalled, STALL_WATCH_S):
            turn.warn(where, f"{stalled.id}: {stalled.where}")
    elif waiting and others:
        waited = min(worker.waits for worker in waiting)
        if _is_due(turn, turn.clock - waited, PEER_WATCH_S):
            who = ", ".join(worker.id for worker in waiting)
            turn.warn(where, f"{who} wait in a collective for {others} for {waited:.0f} s")


def _is_due(turn: Turn, since: float, first_s: float) -> bool:
    """Whether what lasts ``since`` then is to be said: after ``first_s``, and whenever it has doubled."""
    due = turn.clock - since >= max(first_s, 2 * (turn.job.watched - since))
    if due:
        turn.set(watched=turn.clock)
    return due


def _who_waits(turn: Turn) -> str:
    job, live = turn.job, turn.job.live_members()
    late = [f"{worker.id} ({worker.where})" for worker in live if worker.stage is not Stage.ASKING]
    asking = ", ".join(worker.id for worker in live if worker.stage is Stage.ASKING) or "all"
    if late:
        return f"{asking} wait for {', '.join(late)}"
    ready = sum(worker.stage is Stage.READY for worker in job.workers.values())
    starting = sum(worker.stage is Stage.WARMING for worker in job.workers.values())
    wanted = f"num_proc={job.options.num_proc}, min_num_proc={job.options.min_num_proc}"
    return f"{asking} wait for more workers ({wanted}; {ready} are ready, {starting} are starting)"
