"""Snapshots that are copied while training goes on hold the state of their commit, or nothing at all."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from elastic_spark.worker.late import LateCopy, Torn, stepped
from elastic_spark.worker.memory import SnapshotMemory, read_newest


def copy_of(source, finish=lambda: None):
    target = torch.zeros_like(source)
    return LateCopy({"w": source}, {"w": target}, finish), target


def test_a_copy_is_made_once_and_only_when_it_is_told_to():
    source, finished = torch.ones(1000), []
    copy, target = copy_of(source, lambda: finished.append(target.sum().item()))
    assert not target.any()
    copy.start()
    copy.settle()
    copy.settle()
    assert finished == [1000.0]


def test_who_never_began_it_begins_it_by_settling():
    copy, target = copy_of(torch.ones(10))
    copy.settle()
    assert target.all()


def test_another_thread_waits_until_it_is_made():
    copy, target = copy_of(torch.ones(10))
    seen = []
    waiting = threading.Thread(target=lambda: (copy.wait(), seen.append(bool(target.all()))))
    waiting.start()
    assert not seen
    copy.start()
    waiting.join(10)
    assert seen == [True]


def test_a_write_in_place_between_commit_and_copy_gives_the_copy_up():
    source, finished = torch.nn.Parameter(torch.ones(10)), []
    copy, _ = copy_of(source.detach(), lambda: finished.append(1))
    with torch.no_grad():
        source.mul_(2)
    with pytest.raises(Torn, match="w changed between a commit and the next"):
        copy.settle()
    with pytest.raises(Torn):
        copy.wait()
    assert not finished


def test_weights_that_are_swapped_while_they_are_copied_give_the_copy_up():
    """As an evaluation with averaged weights does it: through ``.data``, which torch's version counters do not see."""
    source = torch.nn.Parameter(torch.ones(1000))
    copy, _ = copy_of(source.detach())
    source.data.fill_(7.0)
    with pytest.raises(Torn, match="w changed"):
        copy.settle()


def test_weights_that_were_swapped_and_came_back_before_are_copied():
    source = torch.nn.Parameter(torch.ones(1000))
    copy, target = copy_of(source.detach())
    with torch.no_grad():
        source.fill_(7.0)
        source.fill_(1.0)
    copy.settle()
    assert target.eq(1).all()


def test_only_what_an_optimizer_steps_is_copied_late():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model[0].parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    tensors = {
        **{f"model/{name}": tensor for name, tensor in model.state_dict().items()},
        **{f"adam/{i}/{name}": tensor for i, kept in state.items() for name, tensor in kept.items()},
        "mine": torch.ones(3),
    }
    late = stepped([optimizer], tensors)
    assert late == {"model/0.weight", "model/0.bias", *(name for name in tensors if name.startswith("adam/"))}


def test_until_it_is_made_the_snapshot_before_is_the_newest():
    descriptor = os.memfd_create("test")
    try:
        memory = SnapshotMemory(descriptor)
        live = {"w": torch.ones(100), "mine": torch.ones(3)}
        memory.write(1, None, live)
        live["w"].fill_(2.0)
        live["mine"].fill_(2.0)
        second = memory.write(2, None, live, {"w"})
        live["mine"].fill_(-1.0)  # was copied at once
        assert read_newest(descriptor).step == 1
        second.late.settle()
        found = read_newest(descriptor)
        assert found.step == 2
        assert found.tensors["w"].eq(2).all()
        assert found.tensors["mine"].eq(2).all()
    finally:
        os.close(descriptor)
