"""A bench for `elastic_spark.core.job`: steps that are checked, scripts of inputs, and workers that react as real ones.

`check` holds what is true of every turn whatever happened. `Script` feeds inputs at given times and checks each turn.
`Cluster` adds processes: they ask, initialise and die by the effects that they were sent, in an order that the test
chooses; `Cluster.quiesce` lets everything happen that is due, as a fair scheduler would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from elastic_spark.core import events as ev
from elastic_spark.core import job as core
from elastic_spark.core.job import Stage

K = TypeVar("K")
JOB_FIELDS = {item.name for item in fields(core.Job)}


def of(effects: list[core.Effect], kind: type[K]) -> list[K]:
    """The effects, or the recorded facts, of one kind."""
    if issubclass(kind, ev.Event):
        return [e.event for e in effects if isinstance(e, core.Record) and isinstance(e.event, kind)]
    return [e for e in effects if isinstance(e, kind)]


def one(effects: list[core.Effect], kind: type[K], **expected: Any) -> K:
    """The only effect (or fact) of its kind; its fields are as ``expected``, the others as they like."""
    found = of(effects, kind)
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {effects}"
    for name, value in expected.items():
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
    assert vars(job).keys() == JOB_FIELDS
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
    assert job.rollbacks <= job.options.guard_rollbacks
    assert job.suspect_from is None or job.options.guard == "rollback"


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
    had_process = {agent.worker for agent in before.agents.values()}
    has_process = {agent.worker for agent in after.agents.values()}
    assert set(leaving) <= had_process - has_process or after.ended
    assert (before.workers.keys() - after.workers.keys()) & had_process <= set(leaving)
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
    assert (form.before, after.suspect_from) == (before.suspect_from, None), "the guard's way back is taken at once"
    held = max((steps[name] for name in (*survivors, *form.left)), default=-1)
    if survivors:
        assert form.found >= 0 or steps[form.members[0]] == held
    assert form.step == (held if form.before is None else -1)
    finds = [after.found(after.workers[name]) for name in form.members]
    assert form.found == (-1 if form.step >= 0 else finds[0])
    assert form.step >= 0 or form.found == max(finds)
    assert form.restore == (form.step < 0)
    assert {after.workers[name].stage for name in form.members} == {Stage.CALLED}
    ready = {w.id for w in before.workers.values() if w.stage is Stage.READY}
    if isinstance(happened, core.Ready):
        ready.add(happened.worker)
    assert set(form.joined) <= ready
    assert not any(after.is_draining(after.workers[name]) for name in form.joined)
    _check_draining(after, form, steps, survivors, held)
    assert (after.ending, after.lost, after.broken) == (None, (), False)


def _check_draining(job: core.Job, form: core.Form, steps: dict[str, int], survivors: list[str], held: int) -> None:
    """A draining member stays only where it is needed."""
    draining = [name for name in survivors if job.is_draining(job.workers[name])]
    firm = [name for name in survivors if name not in draining]
    if draining and not form.left:
        spare = [w for w in job.workers.values() if w.stage is Stage.READY]
        alone = all(steps[name] < held for name in firm)
        short = len(firm) + len(form.joined) + len(spare) < job.options.min_num_proc
        assert alone or short, f"{draining} could have left"
    elif draining:
        assert len(draining) == 1, "one holder of the newest step is enough"
        assert all(steps[name] < held for name in firm)


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


def replace(item: K, **changes: Any) -> K:
    """As that of dataclasses, several times faster."""
    changed = object.__new__(type(item))
    changed.__dict__.update(item.__dict__, **changes)
    return changed


@dataclass(frozen=True)
class Process:
    """A worker's process.

    ``phase``: warming, waiting (for an assignment), init, running, done. ``generation``: of its assignment.
    ``step``: the newest that it has committed. ``told``: a notice has come; ``broken``: this generation was broken.
    ``fault``: "dead", "frozen" or "hanging": it does nothing any more; whoever waits for one that is not dead waits.
    ``in_flight``: what it sent before may still arrive.
    """

    id: str
    agent: str
    phase: str = "warming"
    generation: int = 0
    step: int = -1
    told: bool = False
    broken: bool = False
    fault: str = ""
    in_flight: bool = False


@dataclass(frozen=True)
class Cluster:
    """The job and its processes. Immutable, so that a search can go back.

    A process reacts and is heard in one turn; a message that takes long is a process that reacts late. What differs is
    only what it knew when it spoke, so `reactions` has all that it may have said: an init may have succeeded before
    the world was torn.
    """

    job: core.Job
    now: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    agents: int = 0
    effects: tuple[core.Effect, ...] = ()

    def feed(self, happened: core.Input) -> Cluster:
        """One checked turn, and what its effects do to the processes."""
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
        elif isinstance(effect, core.Release):
            for name in [p.id for p in processes.values() if p.agent == effect.agent]:
                del processes[name]
        elif isinstance(effect, core.Notify):
            for name in effect.workers:
                self._change(name, told=True)
        elif isinstance(effect, core.BreakGeneration):
            for name in effect.workers:
                self._change(name, broken=True)
        elif isinstance(effect, core.Form):
            for name in effect.members:
                news = {"generation": effect.generation, "told": False, "broken": False, "in_flight": False}
                self._change(name, phase="init", **news)

    def _change(self, name: str, **changes: Any) -> None:
        if name in self.processes:
            self.processes[name] = replace(self.processes[name], **changes)

    def with_process(self, name: str, **changes: Any) -> Cluster:
        after = replace(self, processes=dict(self.processes))
        after._change(name, **changes)
        return after

    # ------------------------------------------------------------------------------------ agents come and go

    def agent_up(self, executor: str | None = None) -> Cluster:
        number = self.agents
        up = core.AgentUp(f"a{number}", number, f"host{number % 3}", executor or f"e{number}")
        return replace(self, agents=number + 1).feed(up)

    def agent_down(self, agent: str) -> Cluster:
        processes = {name: process for name, process in self.processes.items() if process.agent != agent}
        return replace(self, processes=processes).feed(core.AgentDown(agent, "its connection ended"))

    def drain(self, agent: str) -> Cluster:
        return self.feed(core.Draining(self.job.agents[agent].executor, "decommissioned"))

    # ------------------------------------------------------------------------------- what befalls a process

    def struck(self, name: str, fault: str) -> Cluster:
        return self.with_process(name, fault=fault, in_flight=True)

    def found_out(self, name: str) -> Cluster:
        """The driver learns of the process that is dead or frozen."""
        if self.processes[name].fault == "dead":
            return self.feed(core.WorkerDown(name, "process died", "signal 9", -9, "Killed"))
        return self.feed(core.WorkerDown(name, "frozen", "not heard for 4.1 s"))

    # ----------------------------------------------------------------------------- what a process does of itself

    def mesh(self, name: str) -> str:
        """How it finds its world: "whole"; "stuck" where a peer will never answer; "torn" where one is gone."""
        process = self.processes[name]
        if process.broken or process.generation != self.job.generation:
            return "torn"
        peers = [self.processes.get(other) for other in self.job.members]
        if any(p is None or p.phase not in MESHED or p.fault == "dead" for p in peers):
            return "torn"
        return "stuck" if any(p is not None and p.fault for p in peers) else "whole"

    def ask(self, name: str, reason: str, more: int = 0) -> Cluster:
        """It wants another world, and has committed ``more`` steps in this one."""
        process = self.processes[name]
        step = process.step + more if process.step >= 0 else -1
        after = self.with_process(name, phase="waiting", step=step)
        return after.feed(core.Asked(name, process.generation, step, reason))

    def initialise(self, name: str) -> Cluster:
        process = self.processes[name]
        held = max(process.step, self.job.formed_step, 0)
        return self.with_process(name, phase="running", step=held).feed(core.Initialised(name, process.generation))

    def finish(self, name: str) -> Cluster:
        return self.with_process(name, phase="done").feed(core.Finished(name))

    def reactions(self, name: str) -> Iterator[tuple[bool, Cluster]]:
        """All that may be heard of it next without a fault of its own; and whether it surely will, sooner or later.

        Only a notice, or the driver's breaking of its world, surely makes a member ask: whether it notices by itself
        that a peer is gone depends on who its neighbours are. Where a peer ends that had finished already nothing is
        broken, and Gloo's own limit is waited for.
        """
        process = self.processes[name]
        if process.fault and not process.in_flight:
            return
        mesh = self.mesh(name)
        surely = process.broken or any(done.id not in self.processes for done in self.job.done_members())
        if process.phase == "warming":
            yield True, self.with_process(name, phase="waiting").feed(core.Ready(name))
        elif process.phase == "init":
            yield mesh == "whole", self.initialise(name)
            if mesh == "torn":
                yield surely, self.ask(name, "init failed")
        elif process.phase == "running" and process.told:
            yield True, self.ask(name, "reset", 1)
        elif process.phase == "running" and mesh == "torn":
            for more in (0, 1):
                yield surely, self.ask(name, "collective failed", more)

    @property
    def runs(self) -> bool:
        """A world runs, for the driver and in truth."""
        members = [self.processes.get(name) for name in self.job.members]
        return (
            self.job.ending is None
            and all(worker.stage is Stage.RUNNING for worker in self.job.live_members())
            and bool(members)
            and all(p is not None and p.phase == "running" and not p.fault for p in members)
        )
