"""One turn of the job: the state so far, the effects so far, and the transitions that all decisions are made of."""

from __future__ import annotations

import copy
from dataclasses import replace

from elastic_spark.core import events as ev
from elastic_spark.core.job.effects import Dismiss, Effect, End, Kill, Record, Release, Spawn
from elastic_spark.core.job.state import Agent, Ended, Job, Stage, Worker

#: Workers that die before they are ready are started again after FIRST * 2 ** (how many in a row - 1) seconds.
FIRST_RESPAWN_S = 0.25
LONGEST_RESPAWN_S = 60.0


class Turn:
    """``now`` is unix time, for events; ``clock`` is the job's own time, for every comparison."""

    def __init__(self, job: Job, now: float) -> None:
        self.job, self.now, self.clock = job, now, now - job.paused
        self.effects: list[Effect] = []

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def record(self, event: ev.Event) -> None:
        self.do(Record(event))

    def set(self, **changes: object) -> None:
        self.job = copy.copy(self.job)
        self.job.__dict__.update(changes)  # frozen, but nobody has seen this copy yet; `replace` costs ten times more

    def put(self, worker: Worker) -> None:
        self.set(workers={**self.job.workers, worker.id: worker})

    def put_agent(self, agent: Agent) -> None:
        self.set(agents={**self.job.agents, agent.id: agent})

    def move(self, worker: Worker, stage: Stage, *, step: int | None = None) -> None:
        self.put(replace(worker, stage=stage, since=self.clock, step=worker.step if step is None else step))

    def drop(self, worker: Worker) -> None:
        self.set(workers={name: other for name, other in self.job.workers.items() if name != worker.id})

    def drop_agent(self, agent: Agent) -> None:
        self.set(agents={name: other for name, other in self.job.agents.items() if name != agent.id})

    def end(self, ended: Ended) -> None:
        self.set(ended=ended)
        self.record(ev.JobFinished(at=self.now, status=ended.status, error=ended.error))
        self.do(End(ended))

    def warn(self, where: str, message: str) -> None:
        self.record(ev.Warned(at=self.now, where=where, message=message))

    # ---------------------------------------------------------------------------------- workers come and go

    def spawn(self, agent: Agent) -> None:
        """Start a worker on this agent."""
        name = f"w{self.job.spawned}"
        self.set(spawned=self.job.spawned + 1)
        self.put(Worker(name, agent.id, agent.host, agent.executor, Stage.WARMING, self.clock, self.clock))
        self.put_agent(replace(agent, worker=name))
        self.do(Spawn(agent.id, name))

    def release(self, agent: Agent, reason: str) -> None:
        """Send the agent away."""
        self.drop_agent(agent)
        self.do(Release(agent.id, reason))

    def dismiss(self, worker: Worker, reason: str) -> None:
        """Let the worker go in good order."""
        self.drop(worker)
        self.record(ev.WorkerLeft(at=self.now, worker=worker.id, reason=reason))
        self.do(Dismiss(worker.id, reason))

    def dismiss_draining(self, worker: Worker) -> None:
        """First the worker, then its agent, so that the executor can go."""
        self.dismiss(worker, "draining")
        self.release(self.job.agents[worker.agent], "draining")

    def lose(
        self,
        worker: Worker,
        cause: str,
        detail: str = "",
        exit_code: int | None = None,
        tail: str = "",
        *,
        blame: bool = True,
    ) -> None:
        """Take the worker out of the job; end the generation if it was a live member; start another in its place.

        ``blame``: it counts against the machine.
        """
        agent = self.job.agents.get(worker.agent)
        if worker.stage is Stage.DONE:  # what it returned is here: its end is no loss
            if agent is not None and agent.worker == worker.id:
                self.do(Kill(worker.id, agent.id))
                self._replace_worker(agent, stillborn=False)
            return
        self.drop(worker)
        self.record(
            ev.WorkerLost(at=self.now, worker=worker.id, cause=cause, detail=detail, exit_code=exit_code, tail=tail)
        )
        if blame:
            self.set(probation=self.job.probation.failed(worker.host, self.clock))
        if worker.id in self.job.members:
            why = f"{worker.id} lost: {cause}"
            self.end_generation(why)
            if not self.job.lost:
                self.set(ending=why)  # a survivor's failed collective may have come first: this is what it came from
            self.set(lost=(*self.job.lost, worker.id))
            self.set(broken=False)  # break again: the survivors may be stuck in what this one left behind
            self.set(bereft_since=self.clock)
            if not self.job.live_members():
                self.set(stillborn=0)  # the job could host workers, so it begins to count anew
        self.do(Kill(worker.id, worker.agent))
        if agent is not None:
            self._replace_worker(agent, stillborn=worker.stage is Stage.WARMING)

    def _replace_worker(self, agent: Agent, *, stillborn: bool) -> None:
        agent = replace(agent, worker=None, failures=agent.failures + 1)
        if stillborn:
            self.set(stillborn=self.job.stillborn + 1)
        if agent.draining:
            self.release(agent, "draining")
        elif agent.failures > self.job.options.spawn_limit:
            self.release(agent, f"its worker failed {agent.failures} times in a row")
        elif stillborn:
            wait_s = min(LONGEST_RESPAWN_S, FIRST_RESPAWN_S * 2.0 ** min(self.job.stillborn - 1, 20))
            self.put_agent(replace(agent, spawn_at=self.clock + wait_s))
        else:
            self.spawn(agent)

    # ------------------------------------------------------------------------------------------- the generation

    def end_generation(self, cause: str) -> None:
        """From now on its members are gathered for the next one."""
        if self.job.ending is None:
            self.set(ending=cause, ending_since=self.clock, broken=False, watched=self.clock)
            self.record(ev.GenerationEnding(at=self.now, generation=self.job.generation, cause=cause))
