"""A job under anything: random inputs at random times, up to eight workers, and nonsense in between.

No turn ever raises, and `job_model.check` holds in each. Whatever has happened: once no more faults strike, what surely
happens leads to a running world or to a named end, within the limits.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from job_model import Cluster, replace

from elastic_spark.core import job as core
from elastic_spark.core.job import Stage

#: Simulated seconds within which all must be quiet. The longest way: init, its limit twice, then elastic_timeout.
QUIET_S = 40.0
PICK = st.integers(0, 7)
NAMES = st.sampled_from([f"w{number}" for number in range(12)])
GENERATIONS = st.integers(0, 6)
STEPS = st.integers(-1, 30)

NONSENSE = st.one_of(
    st.builds(core.AgentUp, st.sampled_from(["a0", "a1", "a99"]), st.just(0), st.just("host0"), st.just("e99")),
    st.builds(core.AgentDown, st.sampled_from(["a0", "a1", "a99"]), st.just("its connection ended")),
    st.builds(core.AgentHeard, st.sampled_from(["a0", "a99"])),
    st.builds(core.WorkerUp, NAMES),
    st.builds(core.Ready, NAMES),
    st.builds(core.Heard, NAMES, st.just("somewhere")),
    st.builds(core.Initialised, NAMES, GENERATIONS),
    st.builds(core.Asked, NAMES, GENERATIONS, STEPS, st.sampled_from(["reset", "collective failed", "init failed"])),
    st.builds(core.Finished, NAMES),
    st.builds(core.WorkerDown, NAMES, st.just("process died"), st.just(""), st.sampled_from([None, -9, 0, 1])),
    st.builds(core.Draining, st.sampled_from(["e0", "e1", "e99"]), st.just("decommissioned")),
    st.builds(core.UserError, NAMES, STEPS, st.floats(0, 100), st.just("ValueError"), st.just("Traceback")),
    st.builds(core.Unbalanced, GENERATIONS),
    st.builds(core.Reading, GENERATIONS),
    st.builds(core.Alarmed, GENERATIONS, st.integers(0, 30), st.just("loss is nan")),
    st.builds(core.Cancel, st.just("terminated")),
    st.just(core.Tick()),
)


@st.composite
def job_options(draw: st.DrawFn) -> core.Options:
    num = draw(st.integers(1, 6))
    return core.Options(
        num_proc=num,
        min_num_proc=draw(st.integers(1, num)),
        max_num_proc=draw(st.integers(num, 8)),
        start_timeout=8.0,
        elastic_timeout=8.0,
        settle_s=1.0,
        memory_s=1.0,
        frozen_after_s=2.0,
        silent_all_after_s=6.0,
        init_timeout_s=3.0,
        warm_timeout_s=5.0,
        reset_limit=draw(st.none() | st.integers(0, 4)),
        user_error_retries=draw(st.integers(0, 2)),
        guard=draw(st.sampled_from(["warn", "rollback", "stop"])),
        guard_rollbacks=draw(st.integers(0, 2)),
    )


@settings(max_examples=60, stateful_step_count=50, deadline=None)
class Chaos(RuleBasedStateMachine):
    """Inputs without any sense."""

    @initialize(options=job_options())
    def begin(self, options: core.Options) -> None:
        self.cluster = Cluster(core.start(options, 0.0))

    @rule(happened=NONSENSE, dt=st.sampled_from([0.0, 0.0, 0.1, 0.4, 3.0]))
    def happens(self, happened: core.Input, dt: float) -> None:
        self.cluster = replace(self.cluster, now=self.cluster.now + dt).feed(happened)


@settings(max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
class Churn(RuleBasedStateMachine):
    """Processes that behave, under faults that do not."""

    @initialize(options=job_options(), executors=st.integers(0, 4), runs=st.sampled_from([True, True, True, False]))
    def begin(self, options: core.Options, executors: int, runs: bool) -> None:
        self.cluster = Cluster(core.start(options, 0.0))
        for _ in range(executors + (options.num_proc if runs else 0)):
            self.cluster = self.cluster.agent_up()
        if runs:
            self.all_calms_down()

    @property
    def goes_on(self) -> bool:
        return self.cluster.job.ended is None

    def some(self, number: int, *phases: str) -> str | None:
        """One of the processes without a fault, in one of these phases."""
        names = [n for n, p in self.cluster.processes.items() if not p.fault and (not phases or p.phase in phases)]
        return names[number % len(names)] if names else None

    def some_agent(self, number: int) -> str | None:
        agents = list(self.cluster.job.agents)
        return agents[number % len(agents)] if agents else None

    # ------------------------------------------------------------------------------------------------ what happens

    @precondition(lambda self: self.goes_on and len(self.cluster.job.agents) < 8)
    @rule(shared=st.booleans())
    def executor_comes(self, shared: bool) -> None:
        self.cluster = self.cluster.agent_up("shared" if shared else None)

    @precondition(lambda self: self.goes_on)
    @rule(number=PICK)
    def executor_goes(self, number: int) -> None:
        agent = self.some_agent(number)
        if agent is not None:
            self.cluster = self.cluster.agent_down(agent)

    @precondition(lambda self: self.goes_on)
    @rule(number=PICK)
    def executor_drains(self, number: int) -> None:
        agent = self.some_agent(number)
        if agent is not None:
            self.cluster = self.cluster.drain(agent)

    @precondition(lambda self: self.goes_on)
    @rule(number=PICK, fault=st.sampled_from(["dead", "frozen"]))
    def process_is_struck(self, number: int, fault: str) -> None:
        name = self.some(number)
        if name is not None:
            self.cluster = self.cluster.struck(name, fault)

    @precondition(lambda self: self.goes_on)
    @rule(number=PICK)
    def process_hangs(self, number: int) -> None:
        """It is heard, but does not come out of Horovod's init, or out of the user's code to ask."""
        name = self.some(number, "init", *(["running"] if self.cluster.job.ending is not None else []))
        if name is not None:
            self.cluster = self.cluster.with_process(name, fault="hanging")

    @precondition(lambda self: self.goes_on)
    @rule(number=PICK)
    def exit_is_reported(self, number: int) -> None:
        dead = [name for name, process in self.cluster.processes.items() if process.fault == "dead"]
        if dead:
            self.cluster = self.cluster.found_out(dead[number % len(dead)])

    @precondition(lambda self: self.goes_on)
    @rule(number=PICK, more=st.integers(0, 1))
    def collective_fails(self, number: int, more: int) -> None:
        name = self.some(number, "running")
        if name is not None:
            self.cluster = self.cluster.ask(name, "collective failed", more)

    @precondition(lambda self: self.goes_on)
    @rule(number=PICK)
    def init_fails(self, number: int) -> None:
        name = self.some(number, "init")
        if name is not None:
            self.cluster = self.cluster.ask(name, "init failed")

    @precondition(lambda self: self.goes_on)
    @rule(since=st.integers(0, 20))
    def guard_gives_an_alarm(self, since: int) -> None:
        self.cluster = self.cluster.feed(core.Alarmed(self.cluster.job.generation, since, "loss is nan"))

    @precondition(lambda self: self.goes_on)
    @rule(number=PICK)
    def function_returns(self, number: int) -> None:
        name = self.some(number, "running")
        if name is not None and self.cluster.runs:
            self.cluster = self.cluster.finish(name)

    @precondition(lambda self: self.goes_on)
    @rule(number=PICK, text=st.sampled_from(["ValueError: a", "ValueError: b"]))
    def function_raises(self, number: int, text: str) -> None:
        name = self.some(number, "running", "warming")
        if name is not None:
            process = self.cluster.processes[name]
            raised = self.cluster.with_process(name, phase="raised")
            self.cluster = raised.feed(core.UserError(name, process.step, self.cluster.now, text, "Traceback"))

    @rule(number=PICK, choice=PICK)
    def somebody_reacts(self, number: int, choice: int) -> None:
        processes = list(self.cluster.processes)
        if processes and self.goes_on:
            reactions = list(self.cluster.reactions(processes[number % len(processes)]))
            if reactions:
                _, self.cluster = reactions[choice % len(reactions)]

    @rule(steps=st.integers(1, 6))
    def steps_are_made(self, steps: int) -> None:
        if self.cluster.runs:
            for name, process in self.cluster.processes.items():
                if name in self.cluster.job.members:
                    self.cluster = self.cluster.with_process(name, step=process.step + steps)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.tick()

    @rule(seconds=st.sampled_from([2.0, 30.0, 1000.0]))
    def driver_pauses(self, seconds: float) -> None:
        self.cluster = replace(self.cluster, now=self.cluster.now + seconds)

    def tick(self) -> None:
        """A tenth of a second in which everybody who can gives signs of life."""
        cluster = replace(self.cluster, now=self.cluster.now + 0.1)
        for agent in cluster.job.agents:
            cluster = cluster.feed(core.AgentHeard(agent))
        for name, process in cluster.processes.items():
            if process.fault in ("", "hanging"):
                cluster = cluster.feed(core.Heard(name, process.phase))
        self.cluster = cluster.feed(core.Tick())

    # ----------------------------------------------------------------------------------------------------- the end

    @rule()
    def all_calms_down(self) -> None:
        """No more faults: exits are reported, processes react, Spark brings agents for the slots that are asked for."""
        deadline = self.cluster.now + QUIET_S
        while self.goes_on and not self.cluster.runs:
            assert self.cluster.now < deadline, self.describe()
            self.let_things_happen()
            self.tick()

    def let_things_happen(self) -> None:
        for name in list(self.cluster.processes):
            process = self.cluster.processes.get(name)
            if process is None or not self.goes_on:
                continue
            if process.fault == "dead":
                self.cluster = self.cluster.found_out(name)
                continue
            sure = [after for surely, after in self.cluster.reactions(name) if surely]
            if sure:
                self.cluster = sure[0]
            elif process.phase == "running" and not process.fault and self.is_finishing(name):
                self.cluster = self.cluster.finish(name)
        if self.goes_on and len(self.cluster.job.agents) < self.cluster.job.options.max_num_proc:
            self.cluster = self.cluster.agent_up()

    def is_finishing(self, name: str) -> bool:
        return bool(self.cluster.job.done_members()) and self.cluster.mesh(name) == "whole"

    def describe(self) -> str:
        job = self.cluster.job
        stages = {name: (worker.stage.value, worker.step) for name, worker in job.workers.items()}
        return f"{job.members} {job.ending!r} lost={job.lost} {stages} {self.cluster.processes}"

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.all_calms_down()
            job = self.cluster.job
            if job.ended is None:
                assert all(job.workers[name].stage in (Stage.RUNNING, Stage.DONE) for name in job.members)


TestChaos = Chaos.TestCase
TestChurn = Churn.TestCase
