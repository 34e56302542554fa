"""A job without Spark: the real controller in this process, and real workers, forked by a `Template`.

What a slot's Spark task does is done by one thread for all agents: it registers them, forks a worker when told to spawn
one, and tells how it ended. A worker runs `elastic_spark.worker.main` as it is, so Horovod, the channel, the state and
the data lanes are those of production; only its imports were done before the fork, which makes a world cost a fraction
of a second. So worlds of many sizes, and much churn, can be had in a test.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
from collective_world import Template

from elastic_spark.checkpoint import CheckpointStore
from elastic_spark.core import events as ev
from elastic_spark.core import job as core
from elastic_spark.core.lanes import LanePlan, choose_lanes
from elastic_spark.core.manifest import Manifest
from elastic_spark.core.metrics import summarise
from elastic_spark.driver.controller import Controller
from elastic_spark.driver.datasets import Datasets
from elastic_spark.driver.journal import Journal
from elastic_spark.errors import ProtocolError
from elastic_spark.transport import Channel

KEY = b"k" * 32


class BareJob:
    """``with BareJob(template, folder, train, manifests, num_proc=3) as job: ...; values = job.done()``.

    Args:
        function: called with ``ctx`` on each worker; its module need not be importable there.
        manifests: the data sets, by name.
        agents: how many slots there are at the start; each hosts one worker.
        config: what a worker is told besides, as ``cache_dir``.
    """

    def __init__(
        self,
        template: Template,
        folder: Path,
        function: Callable[..., Any],
        manifests: Mapping[str, Manifest],
        *,
        num_proc: int,
        max_num_proc: int = 8,
        agents: int | None = None,
        global_batch: int = 32,
        lanes: int | None = None,
        seed: int = 0,
        balance: bool = False,
        **config: Any,
    ) -> None:
        self.folder, self._template = folder, template
        folder.mkdir(parents=True, exist_ok=True)
        self.plans = {
            name: LanePlan(m.group_rows, lanes or choose_lanes(max_num_proc, global_batch, m.rows), global_batch, seed)
            for name, m in manifests.items()
        }
        self.log: list[ev.Event] = []
        self._changed = threading.Condition()
        self._journal = Journal(folder / "events.jsonl", [self._take])
        self.controller = Controller(
            core.Options(num_proc, 1, max_num_proc, start_timeout=60.0, elastic_timeout=60.0, settle_s=60.0),
            host="127.0.0.1",
            key=KEY,
            job_id="bare",
            plans=self.plans,
            seed=seed,
            balance=balance,
            journal=self._journal,
            store=CheckpointStore(str(folder / "checkpoints")),
            keep=2,
            noted={},
            resumed=None,
            members_path=folder / "members.json",
            worker_output=lambda worker, lines: None,
            on_generation=lambda number, cause, size: None,
            on_agent=lambda slot, executor: None,
            on_notice=lambda executor: None,
        )
        self._address = self.controller.start()
        datasets = Datasets(manifests, self.plans)
        self._config = {
            "datasets": datasets.for_workers(),
            **{"seed": seed, "cache_dir": None, "checkpoint_uri": None, "rpo_target_s": 10.0, "ckpt_budget": 0.01},
            **{"address": list(self._address), "key": KEY.hex(), "job_id": "bare", "nics": ["lo"]},
            **config,
        }
        self._payload = cloudpickle.dumps((function, (), {}))
        self._record_start(num_proc, max_num_proc, datasets)
        self._agents: dict[int, Channel] = {}
        self._hosted: dict[str, tuple[int, Channel]] = {}  # worker -> its pid and its agent's channel
        self._slots = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.add_agents(num_proc if agents is None else agents)
        self._thread.start()

    def __enter__(self) -> BareJob:
        return self

    def __exit__(self, *_exc: object) -> None:
        if not self.controller.wait(0.0):
            self.controller.post(core.Fault("JobCancelled", "the test is over"))
            self.controller.wait(30.0)
        for pid, _ in self._hosted.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._over.set()
        self._thread.join()
        self._journal.close()

    # ---- what is done to it

    def add_agents(self, count: int = 1) -> None:
        """Slots on a machine of their own each."""
        for _ in range(count):
            number = self._slots
            self._slots += 1
            hello = {"role": "agent", "slot": number, "attempt": 0, "host": f"host{number}", "executor": f"{number}"}
            hello |= {"pid": os.getpid(), "python": platform.python_version(), "executable": sys.executable}
            channel = Channel.connect(self._address, KEY, hello)
            self._agents[channel.fileno()] = channel

    def kill(self, worker: str, *, with_agent: bool = True) -> None:
        """SIGKILL; ``with_agent``: its slot is gone too, so none takes its place."""
        pid, agent = self._hosted[worker]
        if with_agent:
            self._agents.pop(agent.fileno(), None)
        os.kill(pid, signal.SIGKILL)
        if with_agent:
            agent.close()

    # ---- what is seen of it

    def events(self, kind: type[ev.Event]) -> list[Any]:
        return [event for event in list(self.log) if isinstance(event, kind)]

    def steps(self) -> int:
        return max((e.first_step + len(e.times) - 1 for e in self.events(ev.StepsCommitted)), default=0)

    def until(self, condition: Callable[[], Any], limit_s: float = 60.0) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, limit_s):
                log = self._template.log.read_text(errors="replace")[-3000:]
                raise AssertionError(f"not within {limit_s} s; the log ends with {self.log[-6:]}\n{log}")

    def wait_world(self, size: int, steps: int = 3) -> tuple[str, ...]:
        """Until a world of ``size`` has committed so many steps; its members."""

        def ready() -> bool:
            formed = self.events(ev.GenerationFormed)
            if not formed or len(formed[-1].members) != size:
                return False
            made = [e for e in self.events(ev.StepsCommitted) if e.generation == formed[-1].generation]
            return sum(len(e.times) for e in made) >= steps

        self.until(ready)
        members: tuple[str, ...] = self.events(ev.GenerationFormed)[-1].members
        return members

    def done(self, limit_s: float = 90.0) -> list[Any]:
        """What the ranks returned. AssertionError where the job did not finish."""
        assert self.controller.wait(limit_s), f"not ended; the log ends with {self.log[-6:]}"
        ended, blobs = self.controller.outcome()
        assert ended.status == "FINISHED", f"{ended}\n{self._template.log.read_text(errors='replace')[-3000:]}"
        return [cloudpickle.loads(blob) if blob is not None else None for blob in blobs]

    def summary(self) -> dict[str, Any]:
        with (self.folder / "events.jsonl").open(encoding="utf-8") as lines:
            return summarise(ev.read_log(lines))

    # ---- inside

    def _take(self, event: ev.Event) -> None:
        with self._changed:
            self.log.append(event)
            self._changed.notify_all()

    def _record_start(self, num_proc: int, max_num_proc: int, datasets: Datasets) -> None:
        sizes = {"num_proc": num_proc, "min_num_proc": 1, "max_num_proc": max_num_proc}
        self.controller.record(lambda now: ev.JobStarted(at=now, job_name="bare", job_id="bare", run_id="", **sizes))
        for name in self.plans:
            self.controller.record(lambda now, name=name: datasets.frozen(name, now))

    def _serve(self) -> None:
        heartbeat_at = 0.0
        control = self._template.control
        while not self._over.is_set():
            agents = dict(self._agents)
            ready, _, _ = select.select([control, *agents], [], [], 0.05)
            for descriptor, agent in agents.items():
                with contextlib.suppress(ProtocolError, OSError, ValueError):
                    if descriptor in ready:
                        while (frame := agent.receive(0.0)) is not None:
                            self._obey(agent, frame[0])
                    if time.monotonic() >= heartbeat_at:
                        agent.send({"type": "heartbeat", "busy": []})
            heartbeat_at = time.monotonic() + 0.5 if time.monotonic() >= heartbeat_at else heartbeat_at
            if control in ready:
                self._hear(json.loads(control.recv(65536) or b"{}"))

    def _obey(self, agent: Channel, message: dict[str, Any]) -> None:
        if message["type"] == "spawn":
            self._fork(agent, message["worker"])
        elif message["type"] == "kill" and message["worker"] in self._hosted:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._hosted[message["worker"]][0], signal.SIGKILL)
        elif message["type"] == "stop":
            self._agents.pop(agent.fileno(), None)
            agent.close()

    def _fork(self, agent: Channel, worker: str) -> None:
        start = self.folder / f"{worker}.start"
        start.write_bytes(json.dumps({**self._config, "worker": worker}).encode() + b"\n" + self._payload)
        ours, theirs = socket.socketpair()
        request = {"name": worker, "job": "worker", "options": {"start": str(start)}}
        socket.send_fds(self._template.control, [json.dumps(request).encode()], [theirs.fileno()])
        ours.close()
        theirs.close()
        self._hosted[worker] = (0, agent)

    def _hear(self, message: dict[str, Any]) -> None:
        worker = message.get("name", "")
        pid, agent = self._hosted.get(worker, (0, None))
        if agent is None:
            return
        with contextlib.suppress(ProtocolError, OSError):
            if "pid" in message:
                self._hosted[worker] = (message["pid"], agent)
                agent.send({"type": "spawned", "worker": worker, "pid": message["pid"]})
            elif pid == message["exited"]:
                del self._hosted[worker]
                agent.send({"type": "exited", "worker": worker, "code": message["code"], "tail": ""})
