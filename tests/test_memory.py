"""Snapshots that outlive a process, whenever it is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from elastic_spark.worker.memory import SnapshotMemory, read_newest


def state(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((size,), float(step)),
        "half": torch.full((3, 5), step, dtype=torch.bfloat16),
        "flag": torch.tensor(step % 2 == 0),
        "none": torch.empty(0, 4),
    }


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


@pytest.fixture
def memfd():
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def test_nothing_was_written(memfd):
    assert read_newest(memfd) is None
    SnapshotMemory(memfd)
    assert read_newest(memfd) is None


def test_the_newest_is_read_and_live_tensors_are_copied(memfd):
    memory = SnapshotMemory(memfd)
    live = state(1)
    for step in range(1, 8):
        live["weight"].fill_(step)
        memory.write(step, {"cursor": [0, step]}, live)
        live["weight"].fill_(-1)
        found = read_newest(memfd)
        assert (found.step, found.body) == (step, {"cursor": [0, step]})
        assert found.tensors["weight"].eq(step).all()


def test_all_kinds_of_tensors_come_back(memfd):
    SnapshotMemory(memfd).write(4, None, state(4))
    assert equal(read_newest(memfd).tensors, state(4))


def test_memory_is_used_again_and_grows_with_the_state(memfd):
    memory = SnapshotMemory(memfd)
    for step in range(20):
        memory.write(step, None, state(step))
    small = os.fstat(memfd).st_size
    for step in range(20):
        memory.write(step, None, state(step))
    assert os.fstat(memfd).st_size == small
    for step in range(20):
        memory.write(step, "x" * 200_000, state(step, 100_000))
    assert equal(read_newest(memfd).tensors, state(19, 100_000))
    used = os.fstat(memfd).st_blocks * 512
    assert used < 3.2 * (4 * 100_000 + 300_000)  # three, and the small ones were given back


def test_a_leased_snapshot_stays_until_it_is_released():
    memory = SnapshotMemory()
    leased = memory.write(1, None, state(1))
    memory.lease(leased)
    for step in range(2, 12):
        memory.write(step, None, state(step))
    assert equal(leased.tensors, state(1))
    memory.release()
    for step in range(12, 16):
        memory.write(step, None, state(step))
    assert not equal(leased.tensors, state(1))


def test_a_process_killed_at_any_moment_leaves_a_whole_snapshot(memfd):
    """The hash in the body is that of the tensors, whenever the writer is killed."""
    script = textwrap.dedent("""
        import hashlib, sys, torch
        from elastic_spark.worker.memory import SnapshotMemory
        memory, step = SnapshotMemory(int(sys.argv[1])), 0
        while True:
            step += 1
            weight = torch.full((200_000,), float(step))
            memory.write(step, hashlib.sha256(weight.numpy()).hexdigest(), {"weight": weight})
            if step == 1:
                print("on", flush=True)
        """)
    import hashlib

    rng = random.Random(1)
    for _ in range(3):
        command = [sys.executable, "-c", script, str(memfd)]
        with subprocess.Popen(command, pass_fds=[memfd], stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"on\n"
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(rng.uniform(0.01, 0.1))  # the moment of the kill
            writer.send_signal(signal.SIGKILL)
        found = read_newest(memfd)
        assert found.body == hashlib.sha256(found.tensors["weight"].numpy()).hexdigest()
        assert found.tensors["weight"].eq(found.step).all()


def test_memory_for_what_an_optimizer_adds_is_made_beside_the_training(memfd):
    """The first snapshot is that of a fresh start, before the optimizer holds anything."""
    memory = SnapshotMemory(memfd)
    memory.write(0, None, state(0))
    memory.write(1, None, state(1, 100_000))
    assert equal(read_newest(memfd).tensors, state(1, 100_000))
    memory._making.result()
    size = os.fstat(memfd).st_size
    leased = memory.write(2, None, state(2, 100_000))
    memory.lease(leased)
    for step in range(3, 9):
        memory.write(step, None, state(step, 100_000))
    assert os.fstat(memfd).st_size == size, "nothing was made for these"
    assert equal(leased.tensors, state(2, 100_000))
