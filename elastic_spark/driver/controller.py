"""The controller: one thread, one loop, the only writer of the driver's state.

Everything that happens becomes an `Input` of `elastic_spark.core.job`; every `Effect` that comes back is done here, and
nothing is decided here. The channel's server, the rendezvous and the clock live in the same event loop, so there is
nothing to lock. What may block (verifying and committing checkpoints) runs in a thread of its own and comes back as a
callback in the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import platform
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_spark.checkpoint import Checkpoint, CheckpointStore, WrittenPart
from elastic_spark.core import events as ev
from elastic_spark.core import job as core
from elastic_spark.core.guard import Guard, told
from elastic_spark.core.lanes import LanePlan
from elastic_spark.core.ledger import Ledger
from elastic_spark.driver import discovery
from elastic_spark.driver.checkpoints import DriverCheckpoints
from elastic_spark.driver.journal import Journal
from elastic_spark.driver.lanes import Lanes
from elastic_spark.driver.peers import Peers, agent_news, refuse, reports, worker_news
from elastic_spark.driver.worlds import Worlds
from elastic_spark.errors import UserCodeFailed
from elastic_spark.transport import Address, Connection, Message, Server

#: How long a lost connection waits for the agent's word on how the process ended.
EXIT_GRACE_S = 0.3
FAREWELL_S = 3.0
#: A member list that could not be written is tried again so many seconds later.
PUBLISH_AGAIN_S = 1.0
#: At the end commits that are under way, and then the deletion of old checkpoints, may take so long.
STORAGE_S = 30.0
_log = logging.getLogger(__name__)


class Controller:
    """Runs a job from the first agent to the end.

    Args:
        options: what the decisions depend on.
        host: the interface to bind to. key: the job's key. job_id: of the checkpoints to resume from.
        plans: the order of each data set. seed: of the job. balance: give slow workers fewer lanes.
        journal: where facts go.
        store: of checkpoints. keep: how many. noted: fields of each checkpoint's manifest.
        resumed: the checkpoint that the first generation starts from.
        members_path: where the member list is published.
        worker_output: called with lines of the workers' output.
        on_generation: called with ``(generation, cause, size)``. on_agent: with ``(slot, executor)``.
        on_notice: with an executor whose machine will go.
        read: makes values of what the ranks returned.
        require_ours: raises JobHeld where another driver has taken the job, StorageFailed where it cannot tell.
    """

    def __init__(
        self,
        options: core.Options,
        *,
        host: str,
        key: bytes,
        job_id: str,
        plans: Mapping[str, LanePlan],
        seed: int,
        balance: bool,
        journal: Journal,
        store: CheckpointStore,
        keep: int,
        noted: Mapping[str, Any],
        resumed: Checkpoint | None,
        members_path: Path,
        worker_output: Callable[[str, tuple[str, ...]], None],
        on_generation: Callable[[int, str, int], None],
        on_agent: Callable[[int, str], None],
        on_notice: Callable[[str], None],
        read: Callable[[Sequence[bytes | None]], list[Any]] = list,
        require_ours: Callable[[], None] = lambda: None,
    ) -> None:
        self._journal = journal
        self._members_path, self._publish_at = members_path, 0.0
        self._published: int | None = 0  # None: what is there is out of date
        self._worker_output, self._on_generation = worker_output, on_generation
        self._on_agent, self._on_notice = on_agent, on_notice
        self._read, self._values = read, list[Any]()
        self._wall, self._mono = time.time(), time.monotonic()
        self._job = core.start(options, self._now())
        self._ledger = Ledger(
            resumed.step if resumed is not None else 0,
            planned=lambda name, epoch, offset: plans[name].row_hash(epoch, offset),
        )
        self._lanes = Lanes(plans, balance=balance)
        self._guard = Guard()
        self._peers = Peers()
        self._results: dict[str, bytes] = {}
        self._warned: set[str] = set()
        self._checkpoints = DriverCheckpoints(
            store,
            job_id=job_id,
            noted=noted,
            keep=keep,
            only_good=options.guard != "warn",
            resumed=resumed,
            append=journal.append,
            now=self._now,
            require_ours=require_ours,
        )
        self._commits: dict[asyncio.Task[None], int] = {}  # those under way, of which step
        self._background: set[asyncio.Task[Any]] = set()
        self._worlds = Worlds(
            host,
            seed=seed,
            read_limit_s=options.elastic_timeout,
            peers=self._peers,
            lanes=self._lanes,
            ledger=self._ledger,
            checkpoints=self._checkpoints,
            job=lambda: self._job,
            turn=self._turn,
            append=self._take_down,
            now=self._now,
            formed=self._formed,
        )
        self._server = Server(host, key, opened=self._opened, received=self._received, closed=self._closed)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._started = threading.Event()
        self._finished = threading.Event()
        self._failure: BaseException | None = None
        self._last_fact: ev.JobFinished | None = None
        self.address: Address = (host, 0)
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    # ------------------------------------------------------------------------------------- from other threads

    def start(self) -> Address:
        """Begin to listen; the address for agents and workers."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        return self.address

    def post(self, happened: core.Input) -> None:
        """Something happened. Safe from any thread; after the end it is passed over."""
        self._from_thread(lambda: self._turn(happened))

    def record(self, make: Callable[[float], ev.Event]) -> None:
        """Append a fact, made with the time of now. Safe from any thread."""
        self._from_thread(lambda: self._journal.append(make(self._now())))

    def _from_thread(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: the job is over
            self._loop.call_soon_threadsafe(action)

    def wait(self, limit_s: float) -> bool:
        """Whether the job has ended, within ``limit_s`` seconds.

        Raises:
            Exception: the loop itself failed; that is a defect of this package, and never swallowed.
        """
        ended = self._finished.wait(limit_s)
        if ended and self._failure is not None:
            raise self._failure
        return ended

    def outcome(self) -> tuple[core.Ended, list[Any]]:
        """How the job ended, and what ``read`` made of what the last world's ranks returned, if it finished."""
        assert self._job.ended is not None
        return self._job.ended, self._values

    # ------------------------------------------------------------------------------------------------ the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self._failure = error
            _log.exception("the controller failed")
        finally:
            self._checkpoints.close()
            self._loop.close()
            self._started.set()
            self._finished.set()

    def _unexpected(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A defect in a callback must end the job, not pass unseen."""
        self._failure = self._failure or context.get("exception") or RuntimeError(context["message"])
        self._over.set()

    async def _main(self) -> None:
        self._loop.set_exception_handler(self._unexpected)
        self.address = await self._server.start()
        self._started.set()
        try:
            while not self._over.is_set():
                self._journal.beat()
                self._take_down(self._ledger.complete(self._now(), self._gone()))
                self._turn(core.Tick(self._ledger.committed, self._checkpoints.best))
                self._consider_speed()
                self._worlds.name_who_is_waited_for()
                await asyncio.sleep(core.TICK_S)
            await self._farewell()
        finally:
            await self._worlds.close()
            await self._server.stop()

    def _now(self) -> float:
        """Unix time that never jumps: set once, then the monotonic clock."""
        return self._wall + (time.monotonic() - self._mono)

    def _turn(self, happened: core.Input) -> None:
        self._job, effects = core.step(self._job, happened, self._now())
        for effect in effects:
            _DO[type(effect)](self, effect)
        if effects or self._published is None:
            self._publish_members()

    def _consider_speed(self) -> None:
        fact = self._lanes.unbalanced(self._now())
        if fact is not None:
            self._journal.append(fact)
            self._turn(core.Unbalanced(fact.generation))

    def _take_down(self, facts: Sequence[ev.Event]) -> None:
        for fact in facts:
            self._journal.append(fact)
            for alarm in self._guard.add(fact):
                self._checkpoints.alarmed(alarm.suspect_from)
                self._journal.append(alarm)
                self._turn(core.Alarmed(alarm.generation, alarm.suspect_from, told(alarm)))

    def _gone(self) -> frozenset[str]:
        """Members that will report no more."""
        workers = self._job.workers
        return frozenset(
            name for name in self._job.members if name not in workers or workers[name].stage is core.Stage.DONE
        )

    def _publish_members(self) -> None:
        listed = [
            discovery.Member(worker.id, worker.host)
            for worker in self._job.workers.values()
            if worker.stage is not core.Stage.WARMING and not self._is_draining(worker)
        ]
        version = hash(tuple(sorted(member.id for member in listed)))
        if version == self._published or self._journal.left or self._now() < self._publish_at:
            return
        try:
            discovery.publish(self._members_path, listed, self._job.generation)
            self._published = version
        except OSError as error:  # nothing hangs on it here
            self._published, self._publish_at = None, self._now() + PUBLISH_AGAIN_S
            self._warn(f"the member list cannot be written: {error.strerror}", "driver")

    def _warn(self, message: str, where: str) -> None:
        """Once."""
        if message not in self._warned:
            self._warned.add(message)
            self._journal.append(ev.Warned(at=self._now(), message=message, where=where))

    def _is_draining(self, worker: core.Worker) -> bool:
        agent = self._job.agents.get(worker.agent)
        return agent is not None and agent.draining

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._settle_task)
        return task

    def _settle_task(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._unexpected(self._loop, {"exception": task.exception()})

    # ------------------------------------------------------------------------------------------ what peers say

    def _opened(self, connection: Connection) -> None:
        hello = connection.hello
        if hello["role"] == "agent":
            if _minor(hello["python"]) != _minor(platform.python_version()):
                self._turn(core.Fault("EnvironmentUnfit", _other_python(hello)))
                return
            name = self._peers.add_agent(connection)
            about = {key: hello[key] for key in ("slot", "host", "executor", "pid")}
            self._journal.append(ev.AgentRegistered(at=self._now(), agent=name, **about))
            self._on_agent(hello["slot"], hello["executor"])
            self._turn(core.AgentUp(name, hello["slot"], hello["host"], hello["executor"]))
        elif hello["worker"] in self._job.workers and hello["worker"] not in self._peers.workers:
            self._peers.add_worker(hello["worker"], connection)
            self._turn(core.WorkerUp(hello["worker"]))
        else:
            refuse(connection, "not a worker of this job any more")

    def _closed(self, connection: Connection) -> None:
        agent, worker = self._peers.agent(connection), self._peers.worker(connection)
        self._peers.forget(connection)
        if agent is not None:
            self._turn(core.AgentDown(agent, "its connection ended"))
        elif worker is not None:
            self._worlds.forget(worker)
            self._loop.call_later(EXIT_GRACE_S, self._turn, core.WorkerDown(worker, "process died", "connection ended"))

    def _received(self, connection: Connection, message: Message, blob: bytes) -> None:
        agent, worker = self._peers.agent(connection), self._peers.worker(connection)
        if agent is not None:
            self._agent_says(agent, message)
        elif worker is not None:
            self._worker_says(worker, message, blob)

    def _agent_says(self, agent: str, message: Message) -> None:
        known = self._job.agents.get(agent)
        host, executor = (known.host, known.executor) if known is not None else ("", "")
        match message["type"]:
            case "spawned":
                about = {"worker": message["worker"], "pid": message["pid"]}
                spawned = ev.WorkerSpawned(at=self._now(), agent=agent, host=host, executor=executor, **about)
                self._journal.append(spawned)
            case "output":
                self._worker_output(message["worker"], tuple(message["lines"]))
            case "warning":
                self._warn(message["text"], f"executor {executor}")
            case "notice" if known is not None:
                self._on_notice(executor)
                self._turn(core.Draining(executor, message["reason"]))
        for news in agent_news(agent, message):
            self._turn(news)

    def _worker_says(self, worker: str, message: Message, blob: bytes) -> None:
        match message["type"]:
            case "progress":
                told_of = reports(message["reports"])
                self._ledger.report(worker, message["generation"], told_of)
                self._lanes.report(worker, message["generation"], told_of)
                taken = {"type": "taken", "generation": message["generation"], "count": len(told_of)}
                self._peers.tell_worker(worker, taken)
            case "ready":
                self._worlds.found(worker, message["of"], message["generation"], reports(message["reports"]))
            case "checkpoint":
                self._commit_checkpoint(worker, message)
            case "plan_parts":
                if message["generation"] == self._job.generation and worker in self._job.members:
                    for member in self._job.members:
                        self._peers.tell_worker(member, {**message, "type": "parts"})
            case "checkpoint_skipped":
                skipped = ev.CheckpointSkipped(at=self._now(), step=message["step"], reason=message["reason"])
                self._journal.append(skipped)
            case "result":
                if worker in self._job.members:
                    self._take_down(self._ledger.complete(self._now(), self._gone()))  # the guard first
                    self._results[worker] = blob
                    self._turn(core.Finished(worker))
        news = worker_news(worker, message)
        if news is not None:
            self._turn(news)

    def _commit_checkpoint(self, worker: str, message: Message) -> None:
        """A part has been written. Only a living member's counts."""
        part, seconds = WrittenPart.from_dict(message["part"]), float(message["seconds"])
        if worker not in self._job.members or worker not in self._job.workers:
            reason = f"{worker} has left the world that it is of"
            self._journal.append(ev.CheckpointSkipped(at=self._now(), step=part.step, reason=reason))
            return
        current_at, size = self._now() - float(message["age_s"]), len(self._job.members)

        async def commit() -> None:
            if await self._checkpoints.commit(part, message["fields"], world_size=size, seconds=seconds):
                self._worlds.durable(current_at)

        task = self._spawn(commit())
        self._commits[task] = part.step
        task.add_done_callback(self._commits.pop)

    # ------------------------------------------------------------------------------------- doing what was decided

    def _do_record(self, effect: core.Record) -> None:
        if isinstance(effect.event, ev.JobFinished):
            self._last_fact = effect.event  # the log ends with it; checkpoints may still be on their way
        else:
            self._journal.append(effect.event)

    def _do_spawn(self, effect: core.Spawn) -> None:
        self._peers.tell_agent(effect.agent, {"type": "spawn", "worker": effect.worker})

    def _do_kill(self, effect: core.Kill) -> None:
        """Through the agent, which can kill a stopped process, and directly, for where the agent is cut off."""
        self._peers.tell_agent(effect.agent, {"type": "kill", "worker": effect.worker})
        self._peers.fence(effect.worker, "declared lost")
        self._worlds.forget(effect.worker)

    def _do_release(self, effect: core.Release) -> None:
        self._peers.release(effect.agent, effect.reason)

    def _do_dismiss(self, effect: core.Dismiss) -> None:
        self._peers.tell_worker(effect.worker, {"type": "leave", "reason": effect.reason})
        self._results.pop(effect.worker, None)

    def _do_notify(self, effect: core.Notify) -> None:
        for worker in effect.workers:
            self._peers.tell_worker(worker, {"type": "notify"})

    def _do_save_now(self, effect: core.SaveNow) -> None:
        self._peers.tell_worker(effect.worker, {"type": "save"})

    def _do_break(self, effect: core.BreakGeneration) -> None:
        self._worlds.break_up(effect.generation, effect.workers)

    def _do_form(self, effect: core.Form) -> None:
        self._spawn(self._worlds.form(effect))

    def _formed(self, effect: core.Form) -> None:
        self._on_generation(effect.generation, effect.cause, len(effect.members))

    def _do_end(self, effect: core.End) -> None:
        self._take_down(self._ledger.close(self._now()) if effect.ended.status == "FINISHED" else [])
        self._over.set()

    async def _read_values(self) -> None:
        """A job whose values nobody can read has not finished."""
        blobs = [self._results.get(name) for name in self._job.members]
        try:
            self._values = await asyncio.to_thread(self._read, blobs)
        except UserCodeFailed as error:
            ended = core.Ended("FAILED", str(error), "UserCodeFailed", error.traceback_text)
            self._job = dataclasses.replace(self._job, ended=ended)
            self._last_fact = ev.JobFinished(at=self._now(), status=ended.status, error=ended.error)

    async def _farewell(self) -> None:
        """Pending commits, then everybody is told to go, and has a moment to."""
        ended = self._job.ended
        if ended is not None and ended.status == "FINISHED":
            await self._read_values()
        if ended is not None and ended.kind == "GuardStopped":
            await self._checkpoints.distrust()
        if self._commits:
            _, late = await asyncio.wait(self._commits, timeout=STORAGE_S)
            for task in late:
                task.cancel()
                reason = "storage had not answered when the job ended"
                self._journal.append(ev.CheckpointSkipped(at=self._now(), step=self._commits[task], reason=reason))
            self._take_down(self._ledger.complete(self._now(), self._gone()))  # what came meanwhile
        await self._checkpoints.finish(STORAGE_S)
        self._peers.dismiss_all("the job has ended")
        if self._last_fact is not None:
            self._journal.append(self._last_fact)
        deadline = time.monotonic() + FAREWELL_S
        while (self._peers.agents or self._peers.workers) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if not self._journal.left:
            with contextlib.suppress(OSError):
                discovery.publish(self._members_path, [], self._job.generation)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _other_python(hello: Message) -> str:
    return (
        f"executor {hello['executor']} on {hello['host']} runs Python {hello['python']} ({hello['executable']}), this "
        f"driver {platform.python_version()} ({sys.executable}): functions cannot travel between the two. Set "
        "PYSPARK_PYTHON (spark.pyspark.python) to the same version"
    )


_DO: Mapping[type[core.Effect], Callable[[Controller, Any], None]] = {
    core.Record: Controller._do_record,
    core.Spawn: Controller._do_spawn,
    core.Kill: Controller._do_kill,
    core.Release: Controller._do_release,
    core.Dismiss: Controller._do_dismiss,
    core.Notify: Controller._do_notify,
    core.SaveNow: Controller._do_save_now,
    core.BreakGeneration: Controller._do_break,
    core.Form: Controller._do_form,
    core.End: Controller._do_end,
}
