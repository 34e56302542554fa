"""A machine that drops out of the network without a word, and comes back. Network namespaces need root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_spark.core import events as ev

from .schedule import Schedule
from .world import World

NET = f"10.231.{os.getpid() % 200 + 1}"


class Network:
    """``size`` machines, each a network namespace on one bridge, whose address ``.1`` is this machine's."""

    def __init__(self, size: int) -> None:
        self._tag = f"es{os.getpid() % 100000}"
        self.names = [f"{self._tag}n{number}" for number in range(size)]

    def __enter__(self) -> Network:
        _ip("link", "add", self._tag, "type", "bridge")
        _ip("addr", "add", f"{NET}.1/24", "dev", self._tag)
        _ip("link", "set", self._tag, "up")
        for number, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{name}v", "master", self._tag, "up")
            _ip("-n", name, "addr", "add", f"{NET}.{number + 2}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            _ip("netns", "del", name)
        _ip("link", "del", self._tag)

    def cut(self, name: str) -> None:
        """From now on every packet from and to this machine is dropped; nobody is told."""
        subprocess.run(["bridge", "link", "set", "dev", f"{name}v", "state", "0"], check=True)

    def mend(self, name: str) -> None:
        subprocess.run(["bridge", "link", "set", "dev", f"{name}v", "state", "3"], check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as made:
        yield made


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_machine_without_network_is_lost_and_fenced_when_it_comes_back(network: Network, tmp_path: Path) -> None:
    world = World(Schedule(0, 3, 3, 1, 1.0, ()), tmp_path / "world", epochs=30, host=f"{NET}.1")
    try:
        for name in network.names:
            world.add_executor("ip", "netns", "exec", name)
        world.wait(lambda: world.seen(ev.StepsCommitted), 120.0, "the first step")
        victim = world.members()[0]  # the one that writes checkpoints
        executor = world.spawned(victim).executor
        network.cut(network.names[int(executor)])
        world.wait(lambda: victim in {event.worker for event in world.seen(ev.WorkerLost)}, 40.0, "the loss")
        world.wait(lambda: world.seen(ev.AgentLost), 40.0, "the loss of the machine")
        before = world.newest()
        world.wait(lambda: world.newest() > before, 20.0, "the others to make steps")
        written = {event.uri for event in world.seen(ev.CheckpointWritten)}
        network.mend(network.names[int(executor)])
        process = psutil.Process(world.executors[executor].pid)
        world.wait(lambda: not process.is_running() or process.status() == "zombie", 90.0, "the fenced machine to end")
        assert world.members()[0] != victim
        later = [event.uri for event in world.seen(ev.CheckpointWritten) if event.uri not in written]
        formed = next(e for e in world.seen(ev.GenerationFormed) if victim in e.lost)
        assert all(f"-g{formed.generation}" in uri for uri in later), later
        figures = world.finish()
        assert figures["steps_lost"] == 0
        print("pauses", [round(change["pause_s"], 2) for change in figures["changes"]])
    finally:
        world.close()
