"""The state of a job: what the decisions depend on, and all that is remembered between two of them.

Times are seconds of the job's own clock, which stands still while the driver is paused (`Job.paused`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_spark.core.policy import Probation


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
    memory_s: where nobody alive holds the state, successors of those who did, on their agents, are waited for so long,
        and no longer than ``elastic_timeout``; for ``settle_s`` where the newest step that is known was found already.
    join_delay_s: newcomers are gathered for so long before the world is changed for them.
    frozen_after_s: silence after which a worker is lost while others are heard; an agent after twice as long.
    silent_all_after_s: silence after which they are lost when nobody is heard.
    init_timeout_s, warm_timeout_s: limits for Horovod's init, and for a process to become ready.
    notify_every_s: a notice of change is repeated so often until it is acted on.
    break_after_s: members that were only notified have so long to ask before their collectives are broken.
    watch_after_s: who waits for whom is said after so long, and whenever it has doubled.
    save_at_end_s: a job that is cancelled waits so long for a checkpoint of what it holds.
    stall_after_s: where everybody waits in a collective for so long, they wait for one another for ever.
    reset_limit: generations formed because of a loss; None is no limit.
    user_error_retries: how often an error of the user's code, not seen before at that step, is survived.
    error_window_s: after the first error, so long is waited for an earlier one of another worker.
    spawn_limit: an agent whose worker failed more often than this in a row is sent away.
    guard: what an alarm of the guard leads to: "warn", "rollback" or "stop". guard_rollbacks: how many, then it stops.
    """

    num_proc: int
    min_num_proc: int
    max_num_proc: int
    start_timeout: float = 600.0
    elastic_timeout: float = 600.0
    settle_s: float = 3.0
    memory_s: float = 30.0
    join_delay_s: float = 0.3
    frozen_after_s: float = 4.0
    silent_all_after_s: float = 60.0
    init_timeout_s: float = 30.0
    warm_timeout_s: float = 180.0
    notify_every_s: float = 0.15
    break_after_s: float = 0.5
    watch_after_s: float = 5.0
    save_at_end_s: float = 5.0
    stall_after_s: float = 60.0
    reset_limit: int | None = None
    user_error_retries: int = 0
    error_window_s: float = 0.5
    spawn_limit: int = 3
    guard: str = "warn"
    guard_rollbacks: int = 3


@dataclass(frozen=True)
class Agent:
    """``failures``: workers of it that failed in a row. ``spawn_at``: when the next one is started, with none now.
    ``remembers``: a worker of it has been in a world, and may have left its last snapshot in the agent's memory."""

    id: str
    slot: int
    host: str
    executor: str
    worker: str | None = None
    heard: float = 0.0
    failures: int = 0
    draining: bool = False
    spawn_at: float = 0.0
    remembers: bool = False


@dataclass(frozen=True)
class Worker:
    """``step``: the newest committed step it holds; ``heard``: when last heard; ``since``: start of the stage.

    ``waits``: seconds since it has been in the collective that it is in now, as last heard. ``stalled``: since anything
    came of what it waits for elsewhere.

    ``found``: the step that its dead predecessor left in memory, of generation ``found_in``; -1 where nothing was left.
    """

    id: str
    agent: str
    host: str
    executor: str
    stage: Stage
    heard: float
    since: float
    step: int = -1
    where: str = "starting"
    found: int = -1
    found_in: int = 0
    waits: float = 0.0
    stalled: float = 0.0


@dataclass(frozen=True)
class Failure:
    """An error of the user's code. ``at``: unix time by the worker's clock; ``rank``: -1 outside of a world."""

    worker: str
    rank: int
    step: int
    at: float
    error: str
    traceback: str
    kind: str = "UserCodeFailed"


@dataclass(frozen=True)
class Ended:
    """``status``: FINISHED, FAILED or KILLED. ``kind`` names the exception of `elastic_spark.errors` to raise."""

    status: str
    error: str = ""
    kind: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class Job:
    """All of it.

    started, ticked: when the job began (job's clock), when the last tick came (wall clock). paused: seconds by which
        the wall clock is ahead of the job's.
    agents, workers: by id; those that are gone are not in it. draining: executors that will go away, also for agents
        that register late.
    generation, members: the newest world; ``members[r]`` has rank r. Members that are lost stay listed until the next.
    ending: why the generation ends, or None while nothing speaks against it. broken: its collectives were broken.
    bereft_since: when a member was lost last.
    lost: members lost since it was formed. perished: among them, those whose process died under a living agent.
    unbalanced: other owners of lanes are wanted.
    ran_at: when all of its members were running; None until then.
    arrived: when an agent or a ready worker came last. stillborn: workers in a row that died before they were ready.
    resets: generations formed because of a loss. idle_resets: in a row, of worlds that ran, without a loss, a
        plan or a new step. unformed: worlds in a row that did not even form, without a loss, since ``unformed_since``.
    barren_resets: in a row, because of processes that died, without a new step. formed_step: where it started. best:
        the newest step that ever was committed. committed: the newest one now. durable: the newest one that a
        checkpoint holds.
    cancelled, cancelled_at: how the job ends, and when it was asked to, while a checkpoint of ``cancelled_step`` (-1:
        not known yet) is waited for; save_asked: the generation that was asked for it.
    failures: errors of the user's code that wait for a verdict; forgiven: those that were survived.
    restored, restored_step: the newest generation that did not go on from a survivor, and the step that it found in
        memory (-1: none). What was left in memory before, beyond that step, is another story.
    suspect_from: the guard wants the next world to start from a checkpoint of a step before this one; alarm: why.
    rollbacks: how often it wanted that. undone: alarms of worlds up to this one are settled.
    last_error, last_words: of the last failed collective, and of the last process that died.
    """

    options: Options
    started: float
    ticked: float
    paused: float = 0.0
    agents: Mapping[str, Agent] = field(default_factory=dict)
    workers: Mapping[str, Worker] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    spawned: int = 0
    generation: int = 0
    members: tuple[str, ...] = ()
    ending: str | None = None
    ending_since: float = 0.0
    bereft_since: float = 0.0
    broken: bool = False
    lost: tuple[str, ...] = ()
    perished: tuple[str, ...] = ()
    ran_at: float | None = None
    saved: bool = False
    unbalanced: bool = False
    watched: float = 0.0
    notified: float = float("-inf")
    arrived: float = 0.0
    stillborn: int = 0
    resets: int = 0
    idle_resets: int = 0
    unformed: int = 0
    unformed_since: float = 0.0
    barren_resets: int = 0
    formed_step: int = -1
    best: int = 0
    committed: int = 0
    durable: int = 0
    cancelled: Ended | None = None
    cancelled_at: float = 0.0
    cancelled_step: int = 0
    save_asked: int = 0
    restored: int = 0
    restored_step: int = -1
    failures: tuple[Failure, ...] = ()
    forgiven: tuple[Failure, ...] = ()
    failed_since: float = 0.0
    suspect_from: int | None = None
    alarm: str = ""
    rollbacks: int = 0
    undone: int = 0
    probation: Probation = field(default_factory=Probation)
    last_error: str = ""
    last_words: str = ""
    ended: Ended | None = None

    def live_members(self) -> list[Worker]:
        """Members of the generation that are neither gone nor finished, by rank."""
        workers = (self.workers.get(name) for name in self.members)
        return [worker for worker in workers if worker is not None and worker.stage in IN_WORLD]

    def done_members(self) -> list[Worker]:
        """Members that have finished, by rank."""
        workers = (self.workers.get(name) for name in self.members)
        return [worker for worker in workers if worker is not None and worker.stage is Stage.DONE]

    def found(self, worker: Worker) -> int:
        """The step that this worker can bring back from its predecessor's memory; -1 where it cannot."""
        return worker.found if worker.found_in >= self.restored or worker.found <= self.restored_step else -1

    def is_draining(self, worker: Worker) -> bool:
        agent = self.agents.get(worker.agent)
        return agent is not None and agent.draining
