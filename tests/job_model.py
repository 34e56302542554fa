"""A bench for `elastic_spark.core.job`: steps that are checked, scripts of inputs, and workers that react as real ones.

`check` holds what is true of every turn whatever happened. `Script` feeds inputs at given times and checks each turn.
`Cluster` adds processes: they ask, initialise and die by the effects that they were sent, in an order that the test
chooses; `Cluster.quiesce` lets everything happen that is due, as a fair scheduler would.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from elastic_spark.core import events as ev
from elastic_spark.core import job as core
from elastic_spark.core.job import Stage

K = TypeVar("K")


def of(effects: list[core.Effect], kind: type[K]) -> list[K]:
    """The effects, or the recorded facts, of one kind."""
    if issubclass(kind, ev.Event):
        return [e.event for e in effects if isinstance(e, core.Record) and isinstance(e.event, kind)]
    return [e for e in effects if isinstance(e, kind)]


def one(effects: list[core.Effect], kind: type[K], **fields: Any) -> K:
    """The only effect (or fact) of its kind; its ``fields`` are as given."""
    found = of(effects, kind)
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {effects}"
    for name, value in fields.items():
        assert getattr(found[0], name) == value, found[0]
    return found[0]


# ------------------------------------------------------------------------------------------------ invariants


def check(before: core.Job, happened: core.Input, after: core.Job, effects: list[core.Effect]) -> None:
    """What every turn keeps."""
    _check_state(before, after)
    _check_end(before, after, effects)
    _check_addressees(before, happened, after, effects)
    forms = of(effects, core.Form)
    assert len(forms) <= 1
    assert after.generation == before.generation + len(forms)
    if forms:
        _check_form(before, happened, after, forms[0])
    else:
        assert after.members == before.members
    for notice in of(effects, core.Notify):
        assert after.ending is None
        assert [after.workers[name].stage for name in after.members] == [Stage.RUNNING] * len(after.members)
        assert notice.workers == after.members
    for broken in of(effects, core.BreakGeneration):
        assert after.ending is not None
        assert broken.generation == after.generation
        stuck = [w.id for w in after.live_members() if w.stage is not Stage.ASKING]
        assert list(broken.workers) == stuck != []


def _check_state(before: core.Job, job: core.Job) -> None:
    assert len(set(job.members)) == len(job.members)
    assert len(job.members) <= job.options.max_num_proc
    for name, worker in job.workers.items():
        assert name == worker.id
        if worker.stage in core.IN_WORLD or worker.stage is Stage.DONE:
            assert name in job.members, f"{name} is {worker.stage} and no member"
        else:
            assert name not in job.members
        if worker.stage is not Stage.DONE:
            assert job.agents[worker.agent].worker == name
    for name, agent in job.agents.items():
        assert name == agent.id
        assert agent.worker is None or job.ended or job.workers[agent.worker].agent == name
        assert agent.failures <= job.options.spawn_limit
        assert agent.draining == (agent.executor in job.draining)
    for name in job.lost:
        assert name in job.members
        assert name not in job.workers
    assert set(job.perished) <= set(job.lost)
    gone = [name for name in job.members if name not in job.workers]
    assert job.ended is not None or not gone or job.ending is not None, "a member is gone and the generation goes on"
    assert {int(name[1:]) for name in job.workers.keys() - before.workers.keys()} <= set(
        range(before.spawned, job.spawned)
    ), "an id was used twice"
    assert len(job.forgiven) <= job.options.user_error_retries


def _check_end(before: core.Job, after: core.Job, effects: list[core.Effect]) -> None:
    assert before.ended is None or (after is before and effects == [])
    ends, facts = of(effects, core.End), of(effects, ev.JobFinished)
    assert len(ends) == len(facts) == (1 if after.ended is not None and before.ended is None else 0)
    if ends:
        assert effects[-1] == ends[0] == core.End(after.ended)
        assert effects[-2] == core.Record(facts[0])
        assert after.ended.status in ("FINISHED", "FAILED", "KILLED")
        assert (after.ended.status == "FINISHED") == (after.ended.kind == "" == after.ended.error)


def _check_addressees(before: core.Job, happened: core.Input, after: core.Job, effects: list[core.Effect]) -> None:
    """Nothing is asked of those that are gone, or that never were."""
    spawned = [effect.worker for effect in of(effects, core.Spawn)]
    assert spawned == [f"w{number}" for number in range(before.spawned, after.spawned)]
    for effect in of(effects, core.Spawn):
        assert after.agents[effect.agent].worker == effect.worker
    leaving = [e.worker for e in effects if isinstance(e, (core.Kill, core.Dismiss))]
    assert len(set(leaving)) == len(leaving)
    assert set(leaving) == before.workers.keys() - after.workers.keys()
    released = [e.agent for e in of(effects, core.Release)]
    assert len(set(released)) == len(released)
    known = before.agents.keys() | ({happened.agent} if isinstance(happened, core.AgentUp) else set())
    assert set(released) <= known - after.agents.keys()
    down = {happened.agent} if isinstance(happened, core.AgentDown) else set()
    assert before.agents.keys() - after.agents.keys() <= set(released) | down
    told = [name for e in effects if isinstance(e, (core.Notify, core.BreakGeneration)) for name in e.workers]
    told += [name for e in of(effects, core.Form) for name in e.members]
    told += [e.worker for e in of(effects, core.SaveNow)]
    assert set(told) <= after.workers.keys()


def _check_form(before: core.Job, happened: core.Input, after: core.Job, form: core.Form) -> None:
    """A generation is formed of all live members, every one of which asks, and of READY newcomers."""
    options = after.options
    steps = {w.id: w.step for w in before.live_members() if w.stage is Stage.ASKING}
    if isinstance(happened, core.Asked) and happened.worker in before.members:
        steps[happened.worker] = happened.step
    survivors = [name for name in form.members if name not in form.joined]
    assert form.generation == after.generation
    assert form.members == after.members
    assert options.min_num_proc <= len(form.members) <= options.max_num_proc
    assert set(survivors) | set(form.left) <= steps.keys(), "formed over the head of one that did not ask"
    for member in before.live_members():
        assert member.id in form.members + form.left or member.id not in after.workers
    assert not set(form.lost) & set(form.members + form.left)
    assert not set(form.left) & set(form.members)
    assert not set(form.left) & after.workers.keys()
    if survivors:
        held = max(steps[name] for name in (*survivors, *form.left))
        assert steps[form.members[0]] == held == form.step
    else:
        assert form.step == -1
    assert form.restore == (form.step < 0)
    assert {after.workers[name].stage for name in form.members} == {Stage.CALLED}
    ready = {w.id for w in before.workers.values() if w.stage is Stage.READY}
    if isinstance(happened, core.Ready):
        ready.add(happened.worker)
    assert set(form.joined) <= ready
    assert not any(after.is_draining(after.workers[name]) for name in form.joined)
    _check_draining(after, form, steps, survivors)
    assert (after.ending, after.lost, after.broken) == (None, (), False)


def _check_draining(job: core.Job, form: core.Form, steps: dict[str, int], survivors: list[str]) -> None:
    """A draining member stays only where it is needed."""
    draining = [name for name in survivors if job.is_draining(job.workers[name])]
    firm = [name for name in survivors if name not in draining]
    if draining and not form.left:
        spare = [w for w in job.workers.values() if w.stage is Stage.READY]
        alone = all(steps[name] < form.step for name in firm)
        short = len(firm) + len(form.joined) + len(spare) < job.options.min_num_proc
        assert alone or short, f"{draining} could have left"
    elif draining:
        assert len(draining) == 1, "one holder of the newest step is enough"
        assert all(steps[name] < form.step for name in firm)


# --------------------------------------------------------------------------------------------------- scripts


class Script:
    """A job under inputs at given times: ``script(input, dt)`` returns the effects of one checked turn."""

    def __init__(self, num_proc: int = 3, min_num_proc: int = 1, max_num_proc: int | None = None, **options: Any):
        settings = {"elastic_timeout": 30.0, "start_timeout": 30.0, **options}
        self.now = self.started = 1000.0
        self.options = core.Options(num_proc, min_num_proc, max_num_proc or num_proc, **settings)
        self.job = core.start(self.options, self.now)
        self.facts: list[ev.Event] = []

    def __call__(self, happened: core.Input, dt: float = 0.0) -> list[core.Effect]:
        self.now += dt
        before = self.job
        self.job, effects = core.step(before, happened, self.now)
        check(before, happened, self.job, effects)
        self.facts += of(effects, ev.Event)
        return effects

    def wait(self, seconds: float, *heard: str, agents: bool = True) -> list[core.Effect]:
        """Ticks for so long, while the workers ``heard`` and all agents give signs of life. "*" is everybody."""
        effects: list[core.Effect] = []
        for _ in range(round(seconds / core.TICK_S)):
            for name in self.job.workers if "*" in heard else heard:
                effects += self(core.Heard(name, "in the training function"))
            for name in self.job.agents if agents else ():
                effects += self(core.AgentHeard(name))
            effects += self(core.Tick(), core.TICK_S)
        return effects

    def agent(self, number: int, host: str | None = None, executor: str | None = None) -> list[core.Effect]:
        return self(core.AgentUp(f"a{number}", number, host or f"host{number}", executor or f"e{number}"))

    def hosts(self, count: int, **kwargs: Any) -> None:
        for number in range(count):
            self.agent(number, **kwargs)

    def ready(self, *workers: str) -> list[core.Effect]:
        return [effect for name in workers for effect in self(core.Ready(name))]

    def initialise(self, *workers: str) -> list[core.Effect]:
        """These, or all members, initialise."""
        names = workers or self.job.members
        return [e for name in names for e in self(core.Initialised(name, self.job.generation))]

    def ask(self, *workers: str, step: int = 10, reason: str = "collective failed") -> list[core.Effect]:
        """These, or all live members, ask."""
        names = workers or tuple(w.id for w in self.job.live_members())
        generation = self.job.generation
        return [e for name in names for e in self(core.Asked(name, generation, step, reason, f"{name}: closed"))]

    def down(
        self, worker: str, cause: str = "process died", code: int | None = -9, tail: str = ""
    ) -> list[core.Effect]:
        return self(core.WorkerDown(worker, cause, "", code, tail))

    def running(self, count: int | None = None, **kwargs: Any) -> Script:
        """A world of ``count`` (or num_proc) members runs; its members are w0, w1, ..."""
        count = count or self.options.num_proc
        self.hosts(count, **kwargs)
        self.ready(*list(self.job.workers))
        if self.job.generation == 0:
            self.wait(self.options.settle_s + 0.2, "*")
        self.initialise()
        assert self.stages() == {f"w{n}": "running" for n in range(count)}
        return self

    def stages(self) -> dict[str, str]:
        return {name: worker.stage.value for name, worker in self.job.workers.items()}

    @property
    def ended(self) -> core.Ended | None:
        return self.job.ended


# --------------------------------------------------------------------------------------------------- processes


#: Phases in which a process is, or is about to be, part of a mesh.
MESHED = ("init", "running", "done")


@dataclass(frozen=True)
class Process:
    """A worker's process. ``outbox``: what it has sent and nobody has read yet. ``generation``: of its assignment.

    ``told``: a notice has come; ``broken``: the newest generation that was broken under it; ``frozen``: it will never
    do anything again, and whoever waits for it waits.
    """

    id: str
    agent: str
    phase: str = "warming"  # warming, waiting, init, running, done, dead
    frozen: bool = False
    generation: int = 0
    step: int = -1
    told: bool = False
    broken: int = 0
    outbox: tuple[core.Input, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """The job, its processes, and what is on its way. Immutable, so that a search can go back.

    ``exits``: deaths that the agent has yet to report. ``mesh[generation]``: the members of each world.
    """

    job: core.Job
    now: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    exits: tuple[str, ...] = ()
    agents: int = 0
    effects: tuple[core.Effect, ...] = ()

    def feed(self, happened: core.Input) -> Cluster:
        """One checked turn, and what its effects do to the processes at once."""
        job, effects = core.step(self.job, happened, self.now)
        check(self.job, happened, job, effects)
        after = replace(self, job=job, processes=dict(self.processes), effects=tuple(effects))
        for effect in effects:
            after._do(effect)
        return after

    def _do(self, effect: core.Effect) -> None:
        processes = self.processes
        if isinstance(effect, core.Spawn):
            processes[effect.worker] = Process(effect.worker, effect.agent)
        elif isinstance(effect, (core.Kill, core.Dismiss)):
            processes.pop(effect.worker, None)
        elif isinstance(effect, core.Notify):
            for name in effect.workers:
                self._change(name, told=True)
        elif isinstance(effect, core.BreakGeneration):
            for name in effect.workers:
                self._change(name, broken=effect.generation)
        elif isinstance(effect, core.Form):
            for name in effect.members:
                if processes[name].phase == "waiting":
                    self._change(name, phase="init", generation=effect.generation, told=False, broken=0)
        elif isinstance(effect, core.Release):
            for name in [p.id for p in processes.values() if p.agent == effect.agent]:
                processes.pop(name)

    def _change(self, name: str, **changes: Any) -> None:
        if name in self.processes:
            self.processes[name] = replace(self.processes[name], **changes)

    def with_process(self, name: str, **changes: Any) -> Cluster:
        after = replace(self, processes=dict(self.processes))
        after._change(name, **changes)
        return after

    # --------------------------------------------------------------------------- what a process does of itself

    def said(self, name: str, *inputs: core.Input, **changes: Any) -> Cluster:
        return self.with_process(name, outbox=self.processes[name].outbox + inputs, **changes)

    def ask(self, name: str, reason: str, step: int | None = None) -> Cluster:
        process = self.processes[name]
        step = process.step if step is None else step
        asked = core.Asked(name, process.generation, step, reason)
        return self.said(name, asked, phase="waiting", step=step, told=False)

    def mesh(self, name: str) -> str:
        """How it finds its world: "whole"; "stuck" where a peer will never answer; "torn" where one is gone."""
        process = self.processes[name]
        if process.broken == process.generation or process.generation != self.job.generation:
            return "torn"
        peers = [self.processes.get(other) for other in self.job.members]
        if any(p is None or p.generation != process.generation or p.phase not in MESHED for p in peers):
            return "torn"
        return "stuck" if any(p is not None and p.frozen for p in peers) else "whole"

    def deliver(self, name: str) -> Cluster:
        first, *rest = self.processes[name].outbox
        return self.with_process(name, outbox=tuple(rest)).feed(first)

    def react(self, name: str) -> Cluster | None:
        """What the process does next without a fault of its own, None where it waits for others."""
        process = self.processes[name]
        if process.frozen:
            return None
        if process.phase == "warming":
            return self.said(name, core.Ready(name), phase="waiting")
        mesh = self.mesh(name)
        if process.phase == "init":
            if mesh == "whole":
                held = max(process.step, self.job.formed_step, 0)
                return self.said(name, core.Initialised(name, process.generation), phase="running", step=held)
            return self.ask(name, "init failed") if mesh == "torn" else None
        if process.phase == "running":
            if process.told:
                return self.ask(name, "reset", process.step + 1)
            return self.ask(name, "collective failed") if mesh == "torn" else None
        return None

    def die(self, name: str) -> Cluster:
        after = self.with_process(name, phase="dead")
        return replace(after, exits=(*after.exits, name))

    def report_exit(self, name: str) -> Cluster:
        after = replace(self, exits=tuple(other for other in self.exits if other != name))
        return after.feed(core.WorkerDown(name, "process died", "signal 9", -9))

    @property
    def runs(self) -> bool:
        live = self.job.live_members()
        return self.job.ending is None and bool(live) and all(w.stage is Stage.RUNNING for w in live)
