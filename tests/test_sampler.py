"""`es.LaneSampler` against the counting audit, and the samplers that fail it."""

from __future__ import annotations

import collections
import random
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import elastic_spark as es
from elastic_spark.errors import ConfigError, DataError


class Numbers(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return index


def steps_of(rows, world, batch, epoch=0, offset=0, **options):
    """The indices that each worker takes in each step, those of weight 0 left out: [step][rank]."""
    samplers = [es.LaneSampler(rows, batch, rank=rank, size=world, **options) for rank in range(world)]
    iterators = []
    for sampler in samplers:
        sampler.set_epoch(epoch, offset)
        iterators.append(list(sampler))
        assert len(iterators[-1]) == len(sampler)
    assert len({len(part) for part in iterators}) == 1
    return [
        [part if sampler.weight(offset + i) else [] for sampler, part in zip(samplers, step, strict=True)]
        for i, step in enumerate(zip(*iterators, strict=True))
    ]


def churned(seed, rows, batch, epochs):
    """Counts of every index over random worlds, roll-backs and restarts."""
    rng = random.Random(seed)
    counts, done = collections.Counter(), []
    total = epochs * es.LaneSampler(rows, batch).steps_per_epoch
    while len(done) < total:
        epoch, offset = divmod(len(done), total // epochs)
        steps = steps_of(rows, rng.randint(1, 9), batch, epoch, offset, seed=seed)
        done += steps[: rng.randint(1, len(steps))]
        if rng.random() < 0.3:
            del done[rng.randint(0, len(done)) :]
    for step in done:
        for part in step:
            counts.update(part)
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_every_index_once_an_epoch_under_churn(seed):
    rows = random.Random(seed).choice((1, 7, 60, 103, 400))
    assert churned(seed, rows, batch=16, epochs=3) == dict.fromkeys(range(rows), 3)


def test_global_batches_do_not_depend_on_the_world():
    alone = [sorted(step[0]) for step in steps_of(500, 1, 32, epoch=2)]
    for world in (2, 3, 5, 8, 40):
        assert [sorted(i for part in step for i in part) for step in steps_of(500, world, 32, epoch=2)] == alone
    assert [sorted(step[0]) for step in steps_of(500, 1, 32, epoch=3)] != alone
    assert [step[0] for step in steps_of(500, 1, 32, shuffle=False, max_world=1)] != alone


def test_weights_are_those_of_the_mean_over_the_global_batch():
    samplers = [es.LaneSampler(10, 7, rank=rank, size=4) for rank in range(4)]
    for offset in range(2):
        assert sum(sampler.weight(offset) for sampler in samplers) == pytest.approx(4)
    assert samplers[0].weight(2) == 0


def test_a_loader_with_workers_prefetches_and_nothing_is_lost():
    """BR-34: N=64, two loader workers, stopped at batch 5, resumed with 1, 2 and 3 workers."""
    for world in (1, 2, 3):
        sampler = es.LaneSampler(64, 4)
        loader = DataLoader(Numbers(64), batch_sampler=sampler, num_workers=2, prefetch_factor=4)
        seen = []
        for batch, _ in zip(loader, range(5), strict=False):
            seen += batch.tolist()
        for step in steps_of(64, world, 4, offset=5):
            seen += [i for part in step for i in part]
        assert sorted(seen) == list(range(64))


def test_the_place_is_asked_for_at_each_iteration():
    place = [0, 1]
    sampler = es.LaneSampler(100, 10, rank=lambda: place[0], size=lambda: place[1])
    assert len(next(iter(sampler))) == 10
    place[:] = [1, 2]
    assert len(next(iter(sampler))) == 5
    assert sampler.weight(0) == 1.0


def test_a_resize_of_many_rows_takes_no_memory():
    sampler = es.LaneSampler(10**8, 1024, rank=1, size=3)
    tracemalloc.start()
    sampler.set_epoch(5, 40_000)
    first = next(iter(sampler))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(first) in (341, 342)
    assert peak < 10e6


def test_senseless_options_are_refused():
    with pytest.raises(ConfigError, match="rank=2 of size=2"):
        es.LaneSampler(10, 4, rank=2, size=2)
    with pytest.raises(ConfigError, match="at least 1"):
        es.LaneSampler(10, 0)
    with pytest.raises(ConfigError, match="whole number"):
        es.LaneSampler(10, 4.5)
    with pytest.raises(DataError, match="no rows"):
        es.LaneSampler(Numbers(0), 4)
    assert len(es.LaneSampler(np.int64(10), np.int64(4))) == 3


# ---- negative controls: the same audit fails with the samplers that users have


def audit_resize(first, second, per_worker):
    """Counts over one epoch of a world of 3 that becomes one of 2 after some steps of ``per_worker`` rows."""
    counts = collections.Counter()
    for indices in first:
        counts.update(indices[: 5 * per_worker])
    for indices in second(counts):
        counts.update(indices)
    return counts


def test_the_sampler_of_torch_fails_the_audit():
    def sampler(rank, world):
        return list(DistributedSampler(Numbers(103), num_replicas=world, rank=rank, seed=1))

    def rest(_):  # a restart begins at the same batch of the new shards
        return [sampler(rank, 2)[5 * 4 :] for rank in range(2)]

    counts = audit_resize([sampler(rank, 3) for rank in range(3)], rest, 4)
    assert counts != dict.fromkeys(range(103), 1)


def test_the_elastic_sampler_of_horovod_fails_the_audit(monkeypatch):
    import horovod.torch.elastic.sampler as module

    def sampler(rank, world, processed):
        monkeypatch.setattr(module, "rank", lambda: rank)
        monkeypatch.setattr(module, "size", lambda: world)
        out = module.ElasticSampler(Numbers(103), seed=1)
        out.load_state_dict({"epoch": 0, "processed_num": processed})
        return list(out)

    def rest(_):
        return [sampler(rank, 2, 60) for rank in range(2)]

    counts = audit_resize([sampler(rank, 3, 0) for rank in range(3)], rest, 4)
    assert set(counts.values()) == {1, 2}  # it repeats rows to make shares even
    with pytest.raises(AssertionError):
        sampler(0, 5, 102)  # and asserts where few remain


def test_the_loss_is_that_of_the_whole_batch():
    torch.manual_seed(0)
    x, y = torch.randn(50, 3), torch.randn(50)

    def gradient(world):
        w = torch.zeros(3, requires_grad=True)
        total = torch.zeros(3)
        for rank in range(world):
            sampler = es.LaneSampler(50, 16, rank=rank, size=world)
            for offset, indices in enumerate(sampler):
                loss = ((x[indices] @ w - y[indices]) ** 2).mean() * sampler.weight(offset)
                total += torch.autograd.grad(loss, w)[0] / world
        return total

    for world in (2, 3, 20):
        torch.testing.assert_close(gradient(world), gradient(1), rtol=1e-4, atol=1e-4)
