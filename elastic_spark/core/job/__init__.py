"""The job, decided: ``step(state, input, now) -> (state, effects)``. Pure; the clock is handed in.

Theory of operation
-------------------
*Agents* (one Spark task each) come and go; each has one *worker* (a Horovod process). A worker is ``WARMING`` until its
imports are done and the user's function is loaded, then ``READY``. A *generation* is one Horovod world::

               Ready                form                 Initialised                Asked
    WARMING ----------> READY -------------> CALLED -----------------> RUNNING ------------> ASKING --+
                          ^                    |  Asked (init failed)                           |      |
                          |                    +-----------------------------------------------+      |
                          |                                                      form (next generation)|
                          |                    +-------------------------------------------------------+
                          |                    v
                          |                  CALLED ...        Finished: RUNNING -> DONE      lost: any -> gone

A member *asks* for its next assignment when its collective failed, when it was told of a change, or when its init
failed. A generation *ends* as soon as one member is lost or asks; then every other live member is made to ask: the
rendezvous is cancelled and stuck collectives are broken (`BreakGeneration`). When **all** live members ask, the next
generation is formed from them and from READY newcomers, with the member that holds the newest step as rank 0. So there
is one way through which the world changes, whatever the cause, and every cause can strike at any moment of it: a loss
while a generation is forming is a loss in a generation that is ending already.

Joins and drains only *ask for* that change (`Notify`, repeated until acted on), and wait for a newcomer to be READY
first; losses are never delayed. A generation with no survivor is formed of newcomers with ``restore=True``.

A member that finishes is DONE and stays until all are. The job has finished when rank 0 has finished and every other
member has finished or is gone: the value of rank 0 is never missing.

Silence is judged only against others: a worker that is not heard for ``frozen_after_s`` is lost when another member
has been heard meanwhile; when all are silent, or when this driver itself was paused, nobody is to blame until
``silent_all_after_s``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_spark.core import events as ev
from elastic_spark.core.policy import Probation, is_repeated

TICK_S = 0.1
#: So many workers in a row that end with an error before they are ready: the environment cannot host any.
STILLBORN_LIMIT = 6


class Stage(enum.Enum):
    WARMING = "warming"
    READY = "ready"
    CALLED = "called"
    RUNNING = "running"
    ASKING = "asking"
    DONE = "done"


IN_WORLD = frozenset({Stage.CALLED, Stage.RUNNING, Stage.ASKING})


@dataclass(frozen=True)
class Options:
    """What the decisions depend on. Times in seconds.

    num_proc: workers wanted at the start. min_num_proc: fewer is a stop. max_num_proc: more are spares.
    start_timeout: limit for the first generation. elastic_timeout: limit for every later shortage and every reset.
    settle_s: start with fewer than num_proc when nobody has come for so long.
    join_delay_s: newcomers are gathered for so long before the world is changed for them.
    reset_limit: generations formed because of a loss; None is no limit.
    user_error_retries: how often an error of the user's code, not seen before at that step, is survived.
    """

    num_proc: int
    min_num_proc: int
    max_num_proc: int
    start_timeout: float = 600.0
    elastic_timeout: float = 600.0
    settle_s: float = 3.0
    join_delay_s: float = 0.3
    frozen_after_s: float = 4.0
    silent_all_after_s: float = 60.0
    init_timeout_s: float = 30.0
    warm_timeout_s: float = 180.0
    notify_every_s: float = 0.15
    break_after_s: float = 0.5
    watch_after_s: float = 5.0
    reset_limit: int | None = None
    user_error_retries: int = 0
    error_window_s: float = 0.5
    spawn_limit: int = 3


@dataclass(frozen=True)
class Agent:
    id: str
    slot: int
    host: str
    executor: str
    worker: str | None = None
    heard: float = 0.0
    failures: int = 0
    draining: bool = False


@dataclass(frozen=True)
class Worker:
    """``step``: the newest committed step it holds; ``heard``: when last heard; ``since``: start of the stage."""

    id: str
    agent: str
    host: str
    executor: str
    stage: Stage
    heard: float
    since: float
    step: int = -1
    where: str = "starting"


@dataclass(frozen=True)
class Failure:
    worker: str
    rank: int
    step: int
    at: float
    error: str
    traceback: str


@dataclass(frozen=True)
class Ended:
    """``status``: FINISHED, FAILED or KILLED. ``kind`` names the exception of `elastic_spark.errors` to raise."""

    status: str
    error: str = ""
    kind: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class Job:
    options: Options
    started: float
    ticked: float
    agents: Mapping[str, Agent] = field(default_factory=dict)
    workers: Mapping[str, Worker] = field(default_factory=dict)
    spawned: int = 0
    generation: int = 0
    members: tuple[str, ...] = ()
    ending: str | None = None
    ending_since: float = 0.0
    broken: bool = False
    watched: float = 0.0
    notified: float = 0.0
    short_since: float | None = None
    arrived: float = 0.0
    stillborn: int = 0
    resets: int = 0
    idle_resets: int = 0
    formed_step: int = -1
    lost: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    forgiven: tuple[Failure, ...] = ()
    failed_since: float | None = None
    probation: Probation = field(default_factory=Probation)
    last_error: str = ""
    ended: Ended | None = None

    def live_members(self) -> list[Worker]:
        """Members of the generation that are neither gone nor finished, by rank."""
        workers = (self.workers.get(name) for name in self.members)
        return [worker for worker in workers if worker is not None and worker.stage in IN_WORLD]


# ------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Input:
    """Something that happened."""


@dataclass(frozen=True)
class AgentUp(Input):
    agent: str
    slot: int
    host: str
    executor: str


@dataclass(frozen=True)
class AgentDown(Input):
    agent: str
    cause: str


@dataclass(frozen=True)
class WorkerUp(Input):
    worker: str


@dataclass(frozen=True)
class Ready(Input):
    worker: str


@dataclass(frozen=True)
class Asked(Input):
    """A member wants its next assignment. ``step``: the newest committed step it holds (consistently)."""

    worker: str
    generation: int
    step: int
    reason: str
    error: str = ""


@dataclass(frozen=True)
class Initialised(Input):
    worker: str
    generation: int


@dataclass(frozen=True)
class Heard(Input):
    """A sign of life. ``where`` says what the worker is doing, for the watchdog."""

    worker: str
    where: str = ""


@dataclass(frozen=True)
class AgentHeard(Input):
    agent: str


@dataclass(frozen=True)
class WorkerDown(Input):
    worker: str
    cause: str
    detail: str = ""
    exit_code: int | None = None
    tail: str = ""


@dataclass(frozen=True)
class Draining(Input):
    """The executor will go away; its workers leave at their next commit."""

    executor: str
    reason: str


@dataclass(frozen=True)
class Finished(Input):
    worker: str


@dataclass(frozen=True)
class UserError(Input):
    worker: str
    step: int
    at: float
    error: str
    traceback: str


@dataclass(frozen=True)
class Fault(Input):
    """Something that ends the job: ``kind`` is the name of the exception class."""

    kind: str
    error: str


@dataclass(frozen=True)
class Tick(Input):
    """Time has passed."""


# ------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True)
class Effect:
    """Something to do."""


@dataclass(frozen=True)
class Record(Effect):
    event: ev.Event


@dataclass(frozen=True)
class Spawn(Effect):
    agent: str
    worker: str


@dataclass(frozen=True)
class Kill(Effect):
    """Make sure that this worker's process is gone: it may be frozen, or cut off."""

    worker: str
    agent: str


@dataclass(frozen=True)
class Release(Effect):
    """End the agent's task; its slot is asked for again elsewhere."""

    agent: str
    reason: str


@dataclass(frozen=True)
class Dismiss(Effect):
    worker: str
    reason: str


@dataclass(frozen=True)
class Notify(Effect):
    workers: tuple[str, ...]


@dataclass(frozen=True)
class BreakGeneration(Effect):
    """Cancel the generation's rendezvous and break the stuck collectives of ``workers``."""

    generation: int
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Form(Effect):
    """Open the next generation. ``step`` is what rank 0 holds; with ``restore`` nobody holds anything."""

    generation: int
    members: tuple[str, ...]
    joined: tuple[str, ...]
    lost: tuple[str, ...]
    left: tuple[str, ...]
    cause: str
    step: int
    restore: bool


@dataclass(frozen=True)
class SaveNow(Effect):
    """All members will go away: write a checkpoint at once."""

    worker: str


@dataclass(frozen=True)
class End(Effect):
    ended: Ended


# ------------------------------------------------------------------------------------------------ the step


def start(options: Options, now: float) -> Job:
    return Job(options=options, started=now, ticked=now, arrived=now)


def step(job: Job, happened: Input, now: float) -> tuple[Job, list[Effect]]:
    """Decide. Unknown or late inputs (of workers that are gone, of generations that are over) change nothing."""
    turn = _Turn(job, now)
    if job.ended is None:
        _HANDLERS[type(happened)](turn, happened)
        if turn.job.ended is None:
            _settle(turn)
    return turn.job, turn.effects


class _Turn:
    """One turn of the loop: the state so far and the effects so far."""

    def __init__(self, job: Job, now: float) -> None:
        self.job, self.now = job, now
        self.effects: list[Effect] = []

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def record(self, event: ev.Event) -> None:
        self.do(Record(event))

    def set(self, **changes: object) -> None:
        self.job = replace(self.job, **changes)  # type: ignore[arg-type]

    def put(self, worker: Worker) -> None:
        self.set(workers={**self.job.workers, worker.id: worker})

    def put_agent(self, agent: Agent) -> None:
        self.set(agents={**self.job.agents, agent.id: agent})

    def move(self, worker: Worker, stage: Stage, **changes: object) -> None:
        self.put(replace(worker, stage=stage, since=self.now, heard=self.now, **changes))  # type: ignore[arg-type]

    def end(self, ended: Ended) -> None:
        self.set(ended=ended)
        self.record(ev.JobFinished(at=self.now, status=ended.status, error=ended.error))
        self.do(End(ended))


def _on_agent_up(turn: _Turn, happened: AgentUp) -> None:
    if happened.agent in turn.job.agents:
        return
    turn.put_agent(Agent(happened.agent, happened.slot, happened.host, happened.executor, heard=turn.now))
    turn.set(arrived=turn.now)
    _spawn(turn, turn.job.agents[happened.agent])


def _spawn(turn: _Turn, agent: Agent) -> None:
    name = f"w{turn.job.spawned}"
    turn.set(spawned=turn.job.spawned + 1)
    turn.put(Worker(name, agent.id, agent.host, agent.executor, Stage.WARMING, turn.now, turn.now))
    turn.put_agent(replace(agent, worker=name))
    turn.do(Spawn(agent.id, name))


def _on_agent_down(turn: _Turn, happened: AgentDown) -> None:
    agent = turn.job.agents.get(happened.agent)
    if agent is None:
        return
    agents = {name: other for name, other in turn.job.agents.items() if name != agent.id}
    turn.set(agents=agents)
    turn.record(ev.AgentLost(at=turn.now, agent=agent.id, cause=happened.cause))
    worker = turn.job.workers.get(agent.worker or "")
    if worker is not None:
        _lose(turn, worker, "executor lost", happened.cause, blame=not agent.draining)


def _on_worker_up(turn: _Turn, happened: WorkerUp) -> None:
    _hear(turn, happened.worker)


def _on_ready(turn: _Turn, happened: Ready) -> None:
    worker = turn.job.workers.get(happened.worker)
    if worker is not None and worker.stage is Stage.WARMING:
        turn.record(ev.WorkerReady(at=turn.now, worker=worker.id, seconds=turn.now - worker.since))
        turn.move(worker, Stage.READY)
        turn.set(arrived=turn.now, stillborn=0)


def _on_asked(turn: _Turn, happened: Asked) -> None:
    worker = turn.job.workers.get(happened.worker)
    if worker is None or worker.stage not in IN_WORLD or happened.generation != turn.job.generation:
        return
    turn.move(worker, Stage.ASKING, step=happened.step)
    if happened.error:
        turn.set(last_error=happened.error)
    _end_generation(turn, happened.reason)


def _on_initialised(turn: _Turn, happened: Initialised) -> None:
    worker = turn.job.workers.get(happened.worker)
    if worker is None or worker.stage is not Stage.CALLED or happened.generation != turn.job.generation:
        return
    turn.move(worker, Stage.RUNNING)
    live = turn.job.live_members()
    if turn.job.ending is None and all(member.stage is Stage.RUNNING for member in live):
        agents = turn.job.agents
        fresh = {member.agent for member in live}
        turn.set(agents={name: replace(a, failures=0) if name in fresh else a for name, a in agents.items()})
        turn.record(ev.GenerationRunning(at=turn.now, generation=turn.job.generation, seconds=turn.now - worker.since))


def _on_heard(turn: _Turn, happened: Heard) -> None:
    _hear(turn, happened.worker, happened.where)


def _hear(turn: _Turn, name: str, where: str = "") -> None:
    worker = turn.job.workers.get(name)
    if worker is not None:
        turn.put(replace(worker, heard=turn.now, where=where or worker.where))


def _on_agent_heard(turn: _Turn, happened: AgentHeard) -> None:
    agent = turn.job.agents.get(happened.agent)
    if agent is not None:
        turn.put_agent(replace(agent, heard=turn.now))


def _on_worker_down(turn: _Turn, happened: WorkerDown) -> None:
    worker = turn.job.workers.get(happened.worker)
    if worker is None:
        return
    _lose(turn, worker, happened.cause, happened.detail, happened.exit_code, happened.tail)


def _lose(
    turn: _Turn,
    worker: Worker,
    cause: str,
    detail: str = "",
    exit_code: int | None = None,
    tail: str = "",
    *,
    blame: bool = True,
) -> None:
    """Take the worker out of the job; end the generation if it was a live member; start another in its place."""
    job = turn.job
    if worker.stage is Stage.DONE:
        return  # what it returned is here: its end is no loss
    turn.set(workers={name: other for name, other in job.workers.items() if name != worker.id})
    turn.record(
        ev.WorkerLost(at=turn.now, worker=worker.id, cause=cause, detail=detail, exit_code=exit_code, tail=tail)
    )
    if worker.stage is Stage.WARMING and exit_code is not None and exit_code > 0:
        turn.set(stillborn=job.stillborn + 1)
    if blame:
        turn.set(probation=job.probation.failed(worker.host, turn.now))
    if worker.id in job.members:
        turn.set(lost=(*job.lost, worker.id))
        _end_generation(turn, f"{worker.id} lost: {cause}")
        turn.set(broken=False)  # break again: the survivors may be stuck in what this one left behind
    if turn.job.stillborn >= STILLBORN_LIMIT:
        message = f"{turn.job.stillborn} workers in a row ended before they were ready; the last said:\n{tail}"
        turn.end(Ended("FAILED", message, "EnvironmentUnfit"))
        return
    agent = turn.job.agents.get(worker.agent)
    if agent is not None and agent.worker == worker.id:
        turn.do(Kill(worker.id, agent.id))
        _replace_worker(turn, agent)


def _replace_worker(turn: _Turn, agent: Agent) -> None:
    failures = agent.failures + 1
    if failures > turn.job.options.spawn_limit or agent.draining:
        turn.set(agents={name: other for name, other in turn.job.agents.items() if name != agent.id})
        turn.do(Release(agent.id, f"its worker failed {failures} times in a row"))
    else:
        _spawn(turn, replace(agent, failures=failures))


def _on_draining(turn: _Turn, happened: Draining) -> None:
    for agent in list(turn.job.agents.values()):
        if agent.executor == happened.executor and not agent.draining:
            turn.put_agent(replace(agent, draining=True))
            if agent.worker is not None and agent.worker in turn.job.workers:
                worker = turn.job.workers[agent.worker]
                turn.record(ev.WorkerDraining(at=turn.now, worker=worker.id, reason=happened.reason))
                if worker.stage in (Stage.WARMING, Stage.READY):
                    _dismiss_draining(turn, worker)
    live = turn.job.live_members()
    if live and all(_is_draining(turn.job, member) for member in live):
        turn.do(SaveNow(live[0].id))


def _is_draining(job: Job, worker: Worker) -> bool:
    agent = job.agents.get(worker.agent)
    return agent is not None and agent.draining


def _on_finished(turn: _Turn, happened: Finished) -> None:
    worker = turn.job.workers.get(happened.worker)
    if worker is not None and worker.stage in IN_WORLD:
        turn.move(worker, Stage.DONE)


def _on_user_error(turn: _Turn, happened: UserError) -> None:
    worker = turn.job.workers.get(happened.worker)
    if worker is None:
        return
    rank = turn.job.members.index(worker.id) if worker.id in turn.job.members else -1
    failure = Failure(worker.id, rank, happened.step, happened.at, happened.error, happened.traceback)
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
    turn.set(failures=(*turn.job.failures, failure), failed_since=turn.job.failed_since or turn.now)


def _on_fault(turn: _Turn, happened: Fault) -> None:
    status = "KILLED" if happened.kind == "JobCancelled" else "FAILED"
    turn.end(Ended(status, happened.error, happened.kind))


def _on_tick(turn: _Turn, happened: Tick) -> None:
    job, gap = turn.job, turn.now - turn.job.ticked
    turn.set(ticked=turn.now)
    if gap > 1.0:  # this driver was paused or starved: nobody's silence can be judged by it
        turn.set(
            workers={name: replace(worker, heard=turn.now) for name, worker in job.workers.items()},
            agents={name: replace(agent, heard=turn.now) for name, agent in job.agents.items()},
        )
        return
    _judge_silence(turn)
    _judge_stages(turn)
    _watch(turn)


def _judge_silence(turn: _Turn) -> None:
    """Workers and agents not heard for long, while others were: frozen, or cut off.

    Imports may hold the interpreter for long, so a WARMING worker is judged by its time limit alone.
    """
    options = turn.job.options
    workers = [w for w in turn.job.workers.values() if w.stage not in (Stage.WARMING, Stage.DONE)]
    everybody = all(turn.now - worker.heard > options.frozen_after_s for worker in workers)
    limit = options.silent_all_after_s if everybody else options.frozen_after_s
    for worker in workers:
        silence = turn.now - worker.heard
        if silence > limit:
            _lose(turn, worker, "frozen", f"not heard for {silence:.1f} s")
    agents = list(turn.job.agents.values())
    patience = 2 * options.frozen_after_s
    if all(turn.now - agent.heard > patience for agent in agents):
        patience = options.silent_all_after_s
    for agent in agents:
        if turn.now - agent.heard > patience:
            turn.do(Release(agent.id, "silent"))
            _on_agent_down(turn, AgentDown(agent.id, f"not heard for {turn.now - agent.heard:.1f} s"))


def _judge_stages(turn: _Turn) -> None:
    options = turn.job.options
    for worker in list(turn.job.workers.values()):
        age = turn.now - worker.since
        if worker.stage is Stage.WARMING and age > options.warm_timeout_s:
            _lose(turn, worker, "process died", f"not ready after {age:.0f} s")
        elif worker.stage is Stage.CALLED and age > options.init_timeout_s:
            if turn.job.ending is None:
                _end_generation(turn, f"{worker.id} did not initialise within {options.init_timeout_s:.0f} s")
            elif age > 2 * options.init_timeout_s:
                _lose(turn, worker, "did not reset", f"in Horovod's init for {age:.0f} s")
        elif (
            worker.stage is Stage.RUNNING
            and turn.job.ending is not None
            and turn.now - turn.job.ending_since > options.elastic_timeout
        ):
            _lose(turn, worker, "did not reset", f"did not ask for {options.elastic_timeout:.0f} s: {worker.where}")


def _watch(turn: _Turn) -> None:
    """Say who waits for whom when a change takes long."""
    job = turn.job
    if job.ending is None or turn.now - max(job.ending_since, job.watched) < job.options.watch_after_s:
        return
    turn.set(watched=turn.now)
    late = [f"{w.id} ({w.where})" for w in job.live_members() if w.stage is not Stage.ASKING]
    waiting = [w.id for w in job.live_members() if w.stage is Stage.ASKING]
    whom = f"wait for {', '.join(late)}" if late else f"wait for more workers (need {job.options.min_num_proc})"
    since = turn.now - job.ending_since
    turn.record(
        ev.Warned(
            at=turn.now,
            where=f"generation {job.generation}",
            message=f"{', '.join(waiting) or 'all'} {whom} for {since:.0f} s ({job.ending})",
        )
    )


_HANDLERS: Mapping[type[Input], Callable[[_Turn, Any], None]] = {
    AgentUp: _on_agent_up,
    AgentDown: _on_agent_down,
    WorkerUp: _on_worker_up,
    Ready: _on_ready,
    Asked: _on_asked,
    Initialised: _on_initialised,
    Heard: _on_heard,
    AgentHeard: _on_agent_heard,
    WorkerDown: _on_worker_down,
    Draining: _on_draining,
    Finished: _on_finished,
    UserError: _on_user_error,
    Fault: _on_fault,
    Tick: _on_tick,
}


# ------------------------------------------------------------------------------- what follows from the state


def _end_generation(turn: _Turn, cause: str) -> None:
    if turn.job.ending is None:
        turn.set(ending=cause, ending_since=turn.now, broken=False, watched=turn.now)
        turn.record(ev.GenerationEnding(at=turn.now, generation=turn.job.generation, cause=cause))


def _settle(turn: _Turn) -> None:
    if _settle_failures(turn) or _settle_finish(turn):
        return
    live = turn.job.live_members()
    if turn.job.ending is not None and live:
        _gather(turn, live)
    elif live:
        _consider_change(turn, live)
    else:
        _consider_start(turn)


def _settle_failures(turn: _Turn) -> bool:
    """The earliest error by time is the root cause; others may still be on their way for `error_window_s`."""
    job = turn.job
    if job.failed_since is None or turn.now - job.failed_since < job.options.error_window_s:
        return False
    first = min(job.failures, key=lambda failure: failure.at)
    if len(job.forgiven) < job.options.user_error_retries and not is_repeated(first.error, first.step, job.forgiven):
        turn.set(failures=(), failed_since=None, forgiven=(*job.forgiven, first))
        for failure in job.failures:
            if failure.worker in turn.job.workers:
                _lose(turn, turn.job.workers[failure.worker], "user error", failure.error, blame=False)
        return False
    where = f"rank {first.rank}, worker {first.worker}, step {first.step}"
    message = f"the training function raised on {where}: {first.error}\n\n{first.traceback}"
    turn.end(Ended("FAILED", message, "UserCodeFailed", first.traceback))
    return True


def _settle_finish(turn: _Turn) -> bool:
    job = turn.job
    if not job.members:
        return False
    first = job.workers.get(job.members[0])
    if first is None or first.stage is not Stage.DONE:
        return False
    live = job.live_members()
    if all(member.stage is Stage.ASKING for member in live):  # rank 0 has it all: those that were cut off are done too
        for member in live:
            turn.do(Dismiss(member.id, "done"))
        turn.end(Ended("FINISHED"))
        return True
    return False


def _newcomers(turn: _Turn) -> list[Worker]:
    """READY workers that may join, the longest waiting first; a host on probation waits unless it is needed."""
    job = turn.job
    ready = [w for w in job.workers.values() if w.stage is Stage.READY and not _is_draining(job, w)]
    hosts = {agent.host for agent in job.agents.values()}
    trusted = [w for w in ready if not job.probation.is_on(w.host, hosts, turn.now)]
    short = len(job.live_members()) < job.options.min_num_proc
    return sorted(ready if short and len(trusted) < len(ready) else trusted, key=lambda w: (w.since, w.id))


def _staying(turn: _Turn, live: list[Worker], newcomers: list[Worker]) -> list[Worker]:
    """The live members that the next world keeps: all but the draining, unless without them it would be too small, or
    one of them alone holds the newest step."""
    staying = [member for member in live if not _is_draining(turn.job, member)]
    if len(staying) + len(newcomers) < turn.job.options.min_num_proc or not staying:
        return live
    newest = max(member.step for member in live)
    if all(member.step < newest for member in staying):
        return staying + [member for member in live if member.step == newest and member not in staying]
    return staying


def _consider_change(turn: _Turn, live: list[Worker]) -> None:
    """The world runs: does a newcomer or a drain call for another one?"""
    job, options = turn.job, turn.job.options
    if any(member.stage is not Stage.RUNNING for member in live) or len(live) < len(
        [m for m in job.members if m in job.workers]
    ):
        return  # still initialising, or finishing
    newcomers = _newcomers(turn)
    staying = [member for member in live if not _is_draining(job, member)]
    leaving = len(staying) < len(live) and len(staying) > 0 and len(staying) + len(newcomers) >= options.min_num_proc
    leaving = leaving or (not staying and len(newcomers) >= options.min_num_proc)
    room = options.max_num_proc - len(staying)
    joining = room > 0 and bool(newcomers) and turn.now - newcomers[-1].since >= options.join_delay_s
    if (leaving or joining) and turn.now - job.notified >= options.notify_every_s:
        turn.set(notified=turn.now)
        turn.do(Notify(tuple(member.id for member in live)))


def _gather(turn: _Turn, live: list[Worker]) -> None:
    """The generation is ending: make the rest ask, and when all do, form the next one."""
    job, options = turn.job, turn.job.options
    if any(member.stage is not Stage.ASKING for member in live):
        planned = not job.lost and turn.now - job.ending_since < options.break_after_s
        if not job.broken and not planned:
            turn.set(broken=True)
            turn.do(BreakGeneration(job.generation, tuple(m.id for m in live if m.stage is not Stage.ASKING)))
        return
    newcomers = _newcomers(turn)
    staying = _staying(turn, live, newcomers)
    if len(staying) + len(newcomers) < options.min_num_proc:
        _wait_for_more(turn, len(staying) + len(newcomers), options.elastic_timeout, turn.job.ending_since)
        return
    _form(turn, live, staying, newcomers)


def _consider_start(turn: _Turn) -> None:
    """Nobody is alive in the world: the first generation, or the first after the loss of all."""
    job, options = turn.job, turn.job.options
    ready = _newcomers(turn)
    first = job.generation == 0
    since = job.started if first else job.ending_since
    limit = options.start_timeout if first else options.elastic_timeout
    warming = any(worker.stage is Stage.WARMING for worker in job.workers.values())
    settled = not warming and turn.now - job.arrived >= options.settle_s
    if len(ready) >= options.num_proc or (len(ready) >= options.min_num_proc and settled):
        _form(turn, [], [], ready)
    else:
        _wait_for_more(turn, len(ready), limit, since)


def _wait_for_more(turn: _Turn, have: int, limit: float, since: float) -> None:
    options = turn.job.options
    if turn.now - since > limit:
        option = "start_timeout" if turn.job.generation == 0 else "elastic_timeout"
        turn.end(
            Ended(
                "FAILED",
                f"asked for {options.num_proc} workers (min_num_proc={options.min_num_proc}), got {have} "
                f"within {option}={limit:.0f} s; {len(turn.job.agents)} executors' slots answered. "
                f"Free cores on the cluster, lower min_num_proc, or raise {option}",
                "NotEnoughWorkers",
            )
        )


def _form(turn: _Turn, live: list[Worker], staying: list[Worker], newcomers: list[Worker]) -> None:
    job, options = turn.job, turn.job.options
    ranks = {name: rank for rank, name in enumerate(job.members)}
    survivors = sorted(staying, key=lambda member: (-member.step, ranks[member.id]))
    first, rest = survivors[:1], sorted(survivors[1:], key=lambda member: ranks[member.id])
    room = max(0, options.max_num_proc - len(survivors))
    joined = newcomers[:room]
    members = [*first, *rest, *joined]
    left = [member for member in live if member not in staying]
    held = survivors[0].step if survivors else -1
    if not _resets_allowed(turn, held, changed=bool(joined or left or job.lost)):
        return
    cause = job.ending or "start"
    for member in left:
        _dismiss_draining(turn, member)
    for name in job.members:  # finished under a rank 0 that was lost: what they returned is superseded
        if name in turn.job.workers and turn.job.workers[name].stage is Stage.DONE:
            done = turn.job.workers[name]
            turn.set(workers={other: w for other, w in turn.job.workers.items() if other != name})
            turn.do(Dismiss(name, "not needed"))
            if done.agent in turn.job.agents:
                _spawn(turn, turn.job.agents[done.agent])
    for member in members:
        turn.move(member, Stage.CALLED)
    names = tuple(member.id for member in members)
    turn.do(
        Form(
            generation=job.generation + 1,
            members=names,
            joined=tuple(member.id for member in joined),
            lost=job.lost,
            left=tuple(member.id for member in left),
            cause=cause,
            step=held,
            restore=held < 0,
        )
    )
    turn.set(generation=job.generation + 1, members=names, ending=None, broken=False, lost=(), formed_step=held)


def _dismiss_draining(turn: _Turn, worker: Worker) -> None:
    """In good order: the worker, then its agent, so that the executor can go; the slot is asked for again elsewhere."""
    turn.set(
        workers={name: other for name, other in turn.job.workers.items() if name != worker.id},
        agents={name: other for name, other in turn.job.agents.items() if name != worker.agent},
    )
    turn.record(ev.WorkerLeft(at=turn.now, worker=worker.id, reason="draining"))
    turn.do(Dismiss(worker.id, "draining"))
    turn.do(Release(worker.agent, "draining"))


def _resets_allowed(turn: _Turn, held: int, *, changed: bool) -> bool:
    """Count this reset; False when it ends the job."""
    job, options = turn.job, turn.job.options
    if job.generation == 0:
        return True
    resets = job.resets + (1 if job.lost else 0)
    idle = 0 if changed or held > job.formed_step else job.idle_resets + 1
    turn.set(resets=resets, idle_resets=idle)
    if options.reset_limit is not None and resets > options.reset_limit:
        message = f"reset {resets} times because of lost workers, reset_limit={options.reset_limit}; last: {job.ending}"
        turn.end(Ended("FAILED", message, "ResetLimitReached"))
        return False
    if idle >= 3:
        message = (
            f"collectives failed {idle} times in a row at step {held} although no worker was lost: do all ranks call "
            f"the same collectives with the same shapes? The last error was: {job.last_error or job.ending}"
        )
        turn.end(Ended("FAILED", message, "UserCodeFailed"))
        return False
    return True
