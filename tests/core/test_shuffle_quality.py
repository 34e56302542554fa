"""Does it train as well as a full shuffle? On data sorted by label, the worst case, by the loss after one epoch.

How mixed the labels of a batch are does not tell: order matters over the whole epoch. A softmax regression with a high
learning rate is a sharp witness, because it forgets: rows of one label that come late win.
"""

from __future__ import annotations

import numpy as np
import pytest

from elastic_spark.core.lanes import LanePlan

ROWS, CLASSES, WIDTH, BATCH = 32_768, 10, 20, 128
SEEDS = range(4)


def make(seed):
    rng = np.random.default_rng(seed)
    labels = np.sort(rng.integers(0, CLASSES, ROWS))
    centres = rng.normal(size=(CLASSES, WIDTH))
    return rng.normal(size=(ROWS, WIDTH)) * 1.6 + centres[labels], labels


def loss_after_one_epoch(x, y, order):
    w = np.zeros((WIDTH, CLASSES))
    for start in range(0, ROWS, BATCH):
        rows = order[start : start + BATCH]
        p = softmax(x[rows] @ w)
        p[np.arange(len(rows)), y[rows]] -= 1
        w -= 0.3 * x[rows].T @ p / len(rows)
    return -np.log(softmax(x @ w)[np.arange(ROWS), y]).mean()


def softmax(z):
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def lanes_order(seed, groups, lanes, shuffle=True):
    plan = LanePlan(groups, lanes, BATCH, seed, shuffle)
    return plan.share(0, range(plan.lanes)).row_ids(0, plan.steps_per_epoch)


@pytest.fixture(scope="module")
def full_shuffle():
    """Mean loss over the seeds with a full shuffle."""
    return np.mean([loss_after_one_epoch(*make(s), np.random.default_rng(100 + s).permutation(ROWS)) for s in SEEDS])


@pytest.mark.parametrize(
    ("groups", "lanes"),
    [((512,) * 64, 8), ((512,) * 64, 32), ((512,) * 64, 128), ((8192,) * 4, 48), ((ROWS,), 128), ((16,) * 2048, 16)],
)
def test_sorted_data_trains_as_with_a_full_shuffle(full_shuffle, groups, lanes):
    loss = np.mean([loss_after_one_epoch(*make(s), lanes_order(s, groups, lanes)) for s in SEEDS])
    assert loss == pytest.approx(full_shuffle, rel=0.02)


def test_the_witness_sees_a_bad_order(full_shuffle):
    """Without a shuffle it is far off; so it is with the row groups shuffled only (one lane that is read in order)."""
    x, y = make(0)
    assert loss_after_one_epoch(x, y, lanes_order(0, (512,) * 64, 1, shuffle=False)) > 1.5 * full_shuffle
    groups = np.random.default_rng(0).permutation(64)
    rows = (groups[:, None] * 512 + np.arange(512)).reshape(-1)
    assert loss_after_one_epoch(x, y, rows) > 1.2 * full_shuffle
