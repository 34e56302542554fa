"""The job, decided: ``step(state, input, now) -> (state, effects)``. Pure; the clock is handed in.

Theory of operation
-------------------
*Agents* (one Spark task each) come and go; each has one *worker* (a Horovod process). A worker is ``WARMING`` until its
imports are done and the user's function is loaded, then ``READY``. A *generation* is one Horovod world::

               Ready                form                 Initialised                Asked
    WARMING ----------> READY -------------> CALLED -----------------> RUNNING ------------> ASKING --+
                                               |  Asked (init failed)                           ^      |
                                               +------------------------------------------------+      |
                                                                                 form (next generation)|
                                               +-------------------------------------------------------+
                                               v
                                             CALLED ...        Finished: RUNNING -> DONE      lost: any -> gone

A member *asks* for its next assignment when its collective failed, when it was told of a change, or when its init
failed. A generation *ends* as soon as one member is lost or asks; then every other live member is made to ask: the
rendezvous is cancelled and stuck collectives are broken (`BreakGeneration`). When **all** live members ask, the next
generation is formed from them and from READY newcomers, with the member that holds the newest step as rank 0. So there
is one way through which the world changes, whatever the cause, and every cause can strike at any moment of it: a loss
while a generation is forming is a loss in a generation that is ending already.

Joins and drains only *ask for* that change (`Notify`, repeated until acted on), and only where the world that would be
formed now differs from the one that runs; they wait for a newcomer to be READY first. So does `Unbalanced`, for the
same world with other owners of lanes. Losses are never delayed. A
generation with no survivor is formed of newcomers with ``restore=True``.

A member that finishes is DONE and stays until all are; if its process ends earlier its value stays. The job has
finished when rank 0 has finished and every other member has finished, is gone, or asks: the value of rank 0 is never
missing. Where rank 0 is lost while others are DONE, these are dismissed and replaced: the next world does their part
again.

A job that is *cancelled* goes on until a checkpoint holds what was committed when that was asked for, and no longer
than `Options.save_at_end_s`.

The guard's way back is the same change: an alarm under ``guard="rollback"`` makes the members ask, and the next world
starts from a checkpoint of before the alarm instead of from what they hold.

What is never waited for without a limit: a member that does not ask, init, a newcomer, more workers, those that finish
after rank 0 (`limits`, `settle`). What would go round for ever ends too: collectives that fail again and again
although nobody was lost, and processes that die again and again before a new step.

Modules: `state`, `inputs`, `effects` are the vocabulary; `decide` takes an input in, `limits` the time, `settle` says
what follows, `world` who is in the next generation, `turn` holds the transitions that they share.
"""

from elastic_spark.core.job.decide import start, step
from elastic_spark.core.job.effects import (
    BreakGeneration,
    Dismiss,
    Effect,
    End,
    Form,
    Kill,
    Notify,
    Record,
    Release,
    SaveNow,
    Spawn,
)
from elastic_spark.core.job.inputs import (
    ASKED_ON_PURPOSE,
    AgentDown,
    AgentHeard,
    AgentUp,
    Alarmed,
    Asked,
    Cancel,
    Draining,
    Fault,
    Finished,
    Heard,
    Initialised,
    Input,
    Reading,
    Ready,
    Tick,
    Unbalanced,
    UserError,
    WorkerDown,
    WorkerUp,
)
from elastic_spark.core.job.settle import BARREN_LIMIT, IDLE_LIMIT, PROGRESS_S, STILLBORN_LIMIT, UNFORMED_S
from elastic_spark.core.job.state import IN_WORLD, Agent, Ended, Failure, Job, Options, Stage, Worker

#: The controller sends a `Tick` so often, in seconds.
TICK_S = 0.1

__all__ = [
    "ASKED_ON_PURPOSE",
    "BARREN_LIMIT",
    "IDLE_LIMIT",
    "IN_WORLD",
    "PROGRESS_S",
    "STILLBORN_LIMIT",
    "TICK_S",
    "UNFORMED_S",
    "Agent",
    "AgentDown",
    "AgentHeard",
    "AgentUp",
    "Alarmed",
    "Asked",
    "BreakGeneration",
    "Cancel",
    "Dismiss",
    "Draining",
    "Effect",
    "End",
    "Ended",
    "Failure",
    "Fault",
    "Finished",
    "Form",
    "Heard",
    "Initialised",
    "Input",
    "Job",
    "Kill",
    "Notify",
    "Options",
    "Reading",
    "Ready",
    "Record",
    "Release",
    "SaveNow",
    "Spawn",
    "Stage",
    "Tick",
    "Unbalanced",
    "UserError",
    "Worker",
    "WorkerDown",
    "WorkerUp",
    "start",
    "step",
]
