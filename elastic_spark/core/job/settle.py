"""What follows from the state, whatever brought it about. Called at the end of every turn."""

from __future__ import annotations

from elastic_spark.core.job.effects import BreakGeneration, Form, Notify, SaveNow
from elastic_spark.core.job.inputs import ASKED_ON_PURPOSE, STALLED, UNREADABLE
from elastic_spark.core.job.state import Ended, Job, Stage, Worker
from elastic_spark.core.job.turn import Turn
from elastic_spark.core.job.world import Plan, next_world
from elastic_spark.core.policy import is_repeated

#: So many workers in a row that die before they are ready, with none in the job: the environment cannot host any.
STILLBORN_LIMIT = 6
#: So many resets in a row without a loss, a plan or a new step: the ranks call different collectives.
IDLE_LIMIT = 3
#: Worlds that did not even form may be the echo of one fault, with a Horovod that is not mended: so many are too many
#: only if it has gone on for so many seconds. Hosts that do not reach one another take longer.
UNFORMED_S = 20.0
#: So many resets in a row because processes died, without a new step: what they run kills them.
BARREN_LIMIT = 6
#: Where workers tell no step, a world that ran so long has made progress.
PROGRESS_S = 60.0


def settle(turn: Turn) -> None:
    """Act on what the state calls for."""
    if turn.job.failures:
        _judge_failures(turn)
    if turn.job.failures or _hopeless(turn) or _finished(turn):
        return
    live = turn.job.live_members()
    if live and turn.job.ending is None:
        _consider_change(turn, live)
    elif any(member.stage is not Stage.ASKING for member in live):
        _gather(turn, live)
    else:
        _supersede(turn)
        if live:
            _consider_next(turn)
        else:
            _consider_start(turn)


def _judge_failures(turn: Turn) -> None:
    """The earliest error by time is the root cause; others may still be on their way for `error_window_s`."""
    job = turn.job
    if turn.clock - job.failed_since < job.options.error_window_s:
        return
    first = min(job.failures, key=lambda failure: failure.at)
    if len(job.forgiven) < job.options.user_error_retries and not is_repeated(first.error, first.step, job.forgiven):
        turn.set(failures=(), forgiven=(*job.forgiven, first))
        for failure in job.failures:
            if failure.worker in turn.job.workers:
                turn.lose(turn.job.workers[failure.worker], "user error", failure.error, blame=False)
        return
    where = f"rank {first.rank}, worker {first.worker}, step {first.step}"
    message = f"the training function raised on {where}: {first.error}\n\n{first.traceback}"
    turn.end(Ended("FAILED", message, first.kind, first.traceback))


def _hopeless(turn: Turn) -> bool:
    """Ends the job where workers die before they are ready, one after the other, and there are no others."""
    job = turn.job
    if job.stillborn < STILLBORN_LIMIT or any(worker.stage is not Stage.WARMING for worker in job.workers.values()):
        return False
    message = f"{job.stillborn} workers in a row ended before they were ready; the last said:\n{job.last_words}"
    turn.end(Ended("FAILED", message, "EnvironmentUnfit"))
    return True


def _finished(turn: Turn) -> bool:
    """Ends the job where rank 0 has finished, and everybody else has too, is gone, or was cut off at the end."""
    job = turn.job
    live = job.live_members()
    first = job.workers.get(job.members[0]) if job.members else None
    if first is None or first.stage is not Stage.DONE or any(member.stage is not Stage.ASKING for member in live):
        return False
    for member in live:
        turn.dismiss(member, "done")
    if job.suspect_from is None:
        turn.end(Ended("FINISHED"))
    else:
        turn.end(Ended("FAILED", f"{job.alarm}; the function returned before the job went back", "GuardStopped"))
    return True


# ------------------------------------------------------------------------------------------- from world to world


def _consider_change(turn: Turn, live: list[Worker]) -> None:
    """The world runs: does a newcomer, a drain, uneven speed or the guard call for another one?"""
    job, options = turn.job, turn.job.options
    if any(member.stage is not Stage.RUNNING for member in live) or job.done_members():
        return  # still initialising, or finishing
    if job.cancelled is not None:
        if job.cancelled_step > job.durable and job.save_asked != job.generation:
            turn.set(save_asked=job.generation)
            turn.do(SaveNow(live[0].id))
        return
    plan = next_world(job, turn.clock)
    gathered = bool(plan.joined) and turn.clock - plan.joined[-1].since >= options.join_delay_s
    if plan.left or gathered or job.unbalanced or job.suspect_from is not None:
        if turn.clock - job.notified >= options.notify_every_s:
            turn.set(notified=turn.clock)
            turn.do(Notify(tuple(member.id for member in live)))
    elif not job.saved and all(job.is_draining(member) for member in live):
        turn.set(saved=True)
        turn.do(SaveNow(live[0].id))


def _gather(turn: Turn, live: list[Worker]) -> None:
    """The generation is ending: make those ask that do not yet. Who was only notified does so on its own at first."""
    job = turn.job
    planned = not job.lost and turn.clock - job.ending_since < job.options.break_after_s
    if not job.broken and not planned:
        turn.set(broken=True)
        stuck = tuple(member.id for member in live if member.stage is not Stage.ASKING)
        turn.do(BreakGeneration(job.generation, stuck))


def _supersede(turn: Turn) -> None:
    """Members that finished under a rank 0 that did not: the next world does their part again."""
    for worker in turn.job.done_members():
        agent = turn.job.agents.get(worker.agent)
        if agent is None or agent.worker != worker.id:
            turn.drop(worker)  # its process is gone already
            continue
        turn.dismiss(worker, "not needed")
        if agent.draining:
            turn.release(agent, "draining")
        else:
            turn.spawn(agent)


def _consider_next(turn: Turn) -> None:
    """All live members ask: the next generation, as soon as it is large enough.

    Where those who held the state are gone, it may be in the memory that one of those who are about to come finds.
    """
    job, options = turn.job, turn.job.options
    if all(member.step < 0 for member in job.live_members()) and _awaits_memory(turn):
        return
    plan = next_world(job, turn.clock)
    if plan.size >= options.min_num_proc:
        _form(turn, plan)
    elif turn.clock - job.ending_since > options.elastic_timeout:
        _too_few(turn, plan.size, "elastic_timeout", options.elastic_timeout)


def _consider_start(turn: Turn) -> None:
    """Nobody is alive in the world: the first generation, or the first after the loss of all.

    Waits for ``num_proc`` workers; starts with fewer when none has come for ``settle_s`` and none is about to: one that
    failed twice is not counted on. After the loss of all it waits for those who may find the last state in memory.
    """
    job, options = turn.job, turn.job.options
    plan = next_world(job, turn.clock)
    option, limit, since = "elastic_timeout", options.elastic_timeout, job.ending_since
    if job.generation == 0:
        option, limit, since = "start_timeout", options.start_timeout, job.started
    late = turn.clock - since > limit
    settled = not _is_somebody_coming(job) and turn.clock - job.arrived >= options.settle_s
    if _awaits_memory(turn):
        return
    if plan.size >= options.num_proc or (plan.size >= options.min_num_proc and (settled or late)):
        _form(turn, plan)
    elif late:
        _too_few(turn, plan.size, option, limit)


def _is_somebody_coming(job: Job) -> bool:
    """Whether a worker is about to be ready. One that failed twice is not counted on."""
    hosting = [agent for agent in job.agents.values() if agent.failures <= 1]
    return any(agent.worker is None or job.workers[agent.worker].stage is Stage.WARMING for agent in hosting)


def _awaits_memory(turn: Turn) -> bool:
    """Whether somebody is about to come who may find what its predecessor, a member of a world, has left. There is
    nothing where the function tells no step."""
    job, options = turn.job, turn.job.options
    newest = max(job.formed_step, job.committed)
    is_found = any(job.found(worker) >= newest for worker in job.workers.values())
    limit_s = options.settle_s if is_found else min(options.memory_s, options.elastic_timeout)
    if newest < 1 or job.suspect_from is not None or turn.clock - job.bereft_since >= limit_s:
        return False
    coming = [agent for agent in job.agents.values() if agent.remembers]
    return any(agent.worker is None or job.workers[agent.worker].stage is Stage.WARMING for agent in coming)


def _too_few(turn: Turn, have: int, option: str, limit: float) -> None:
    job, options = turn.job, turn.job.options
    message = (
        f"asked for {options.num_proc} workers (min_num_proc={options.min_num_proc}), got {have} within "
        f"{option}={limit:.0f} s; {len(job.agents)} executors' slots answered. "
        f"Free cores on the cluster, lower min_num_proc, or raise {option}"
    )
    if job.last_words:
        message += f". The last worker that died said:\n{job.last_words}"
    turn.end(Ended("FAILED", message, "NotEnoughWorkers"))


def _form(turn: Turn, plan: Plan) -> None:
    job = turn.job
    held = plan.survivors[0].step if plan.survivors else -1
    if job.generation > 0 and not _may_reset(turn, held):
        return
    for member in plan.left:
        turn.dismiss_draining(member)
    before, found = job.suspect_from, -1
    members = [*plan.survivors, *plan.joined]
    if before is not None:
        held = -1
    elif held < 0:
        finder = max(members, key=job.found)
        found = job.found(finder)
        if found >= 0:
            members = [finder, *(member for member in members if member is not finder)]
    if held < 0:
        turn.set(restored=job.generation + 1, restored_step=found)
    for member in members:
        turn.move(member, Stage.CALLED, step=held)
    form = Form(
        generation=job.generation + 1,
        members=tuple(member.id for member in members),
        joined=tuple(member.id for member in plan.joined),
        lost=job.lost,
        left=tuple(member.id for member in plan.left),
        cause=_cause(job, plan) if before is None else f"guard: {job.alarm}",
        step=held,
        restore=held < 0,
        found=found,
        before=before,
        sole_holder=len(members) > 1 and sum(member.step == held >= 0 for member in plan.survivors) == 1,
    )
    turn.do(form)
    turn.set(
        generation=form.generation,
        members=form.members,
        ending=None,
        broken=False,
        lost=(),
        perished=(),
        ran_at=None,
        saved=False,
        unbalanced=False,
        notified=float("-inf"),
        formed_step=held,
        suspect_from=None,
        undone=job.generation if before is not None else job.undone,
    )


def _cause(job: Job, plan: Plan) -> str:
    """Why the next world is formed. Of a change that was announced, the first to ask may be one whose collective failed
    because another one had left before."""
    announced = not job.lost and job.notified > float("-inf")
    if announced or job.ending == ASKED_ON_PURPOSE:
        if plan.is_change:
            return "draining" if plan.left else "joined"
        if job.unbalanced:
            return "uneven speed"
    return job.ending or "start"


def _may_reset(turn: Turn, held: int) -> bool:
    """Count this reset; False where it ends the job."""
    job, options = turn.job, turn.job.options
    ran_s = turn.clock - job.ran_at if job.ran_at is not None else 0.0
    stalled = (job.ending or "").endswith(STALLED)  # then it ran, and did nothing
    if held > job.formed_step or (held < 0 and ran_s >= PROGRESS_S and not stalled):
        turn.set(idle_resets=0, unformed=0, barren_resets=0)
    elif job.perished:
        turn.set(barren_resets=job.barren_resets + 1)
    elif not (job.lost or job.ending == ASKED_ON_PURPOSE):
        if job.ran_at is None:
            turn.set(unformed=job.unformed + 1, unformed_since=job.unformed_since if job.unformed else turn.clock)
        else:
            turn.set(idle_resets=job.idle_resets + 1, unformed=0)
    turn.set(resets=job.resets + bool(job.lost))
    job = turn.job
    if options.reset_limit is not None and job.resets > options.reset_limit:
        message = (
            f"reset {job.resets} times because of lost workers, reset_limit={options.reset_limit}; last: {job.ending}"
        )
        turn.end(Ended("FAILED", message, "ResetLimitReached"))
    elif job.barren_resets >= BARREN_LIMIT:
        message = (
            f"workers died in {job.barren_resets} worlds in a row without a step after {max(job.best, held)}"
            f"; last: {job.ending}. The last one said:\n{job.last_words}"
        )
        unread = (job.ending or "").endswith((UNREADABLE, STALLED))
        turn.end(Ended("FAILED", message, "StorageFailed" if unread else "UserCodeFailed"))
    elif job.idle_resets >= IDLE_LIMIT:
        message = (
            f"collectives failed {job.idle_resets} times in a row at step {held} although no worker was lost: do all "
            f"ranks call the same collectives with the same shapes? The last error was: {job.last_error or job.ending}"
        )
        turn.end(Ended("FAILED", message, "UserCodeFailed"))
    elif job.unformed >= IDLE_LIMIT and turn.clock >= job.unformed_since + UNFORMED_S:
        message = (
            f"Horovod could not be initialised {job.unformed} times in a row although no worker was lost "
            f"({job.ending}): can the workers' hosts reach one another? Name their common interface with nics"
        )
        turn.end(Ended("FAILED", message, "EnvironmentUnfit"))
    return turn.job.ended is None
