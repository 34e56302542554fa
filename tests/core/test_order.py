"""Keyed permutations: one-to-one, uniform, the same for ever, alike in any part."""

from __future__ import annotations

import collections
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_spark.core.order import MAX_SIZE, KeyedPermutations, derive_key, hash64, shuffled


def permutation(n, key):
    return KeyedPermutations(np.full(1, n), key)(np.arange(n, dtype=np.uint32)[:, None])[:, 0]


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 2**64 - 1))
def test_every_column_is_one_to_one(sizes, key):
    permutations = KeyedPermutations(np.array(sizes), key)
    for column, n in enumerate(sizes):
        image = permutations.take(np.full(n, column))(np.arange(n, dtype=np.uint32))
        assert sorted(image.tolist()) == list(range(n))


@given(st.integers(1, 2**31), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=50, deadline=None)
def test_parts_of_large_permutations_stay_inside_and_do_not_collide(n, key, data):
    start = data.draw(st.integers(0, max(0, n - 1000)))
    part = np.arange(start, min(n, start + 1000), dtype=np.uint32)[:, None]
    image = KeyedPermutations(np.array([n]), key)(part)[:, 0]
    assert int(image.max()) < n
    assert np.unique(image).size == image.size


def test_a_part_is_the_part_of_the_whole():
    sizes = np.array([5000, 1, 4097])
    permutations = KeyedPermutations(sizes, 7)
    whole = permutations.take(np.zeros(5000, dtype=np.int64))(np.arange(5000, dtype=np.uint32))
    block = permutations(np.array([[17, 0, 3], [18, 0, 4]], dtype=np.uint32))
    assert block[0, 0] == whole[17]
    assert block[1, 0] == whole[18]
    assert block[0, 1] == 0


def test_the_order_is_the_same_for_ever():
    """Checkpoints hold a cursor into this order: a change here would break every stored job."""
    assert derive_key(1, 2, 3) == 9719878828789256451
    assert shuffled(8, 42).tolist() == [5, 2, 7, 3, 4, 0, 1, 6]
    assert permutation(12, 42).tolist() == [4, 11, 6, 9, 5, 8, 7, 10, 1, 0, 2, 3]
    few_of_many = KeyedPermutations(np.array([100_000]), 7)(np.array([[0], [1], [99_999]], dtype=np.uint32))
    assert few_of_many[:, 0].tolist() == [20103, 75402, 42938]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_of_few_positions_every_permutation_occurs_as_often(n):
    trials = 2000
    counts = collections.Counter(tuple(permutation(n, derive_key(key)).tolist()) for key in range(trials))
    assert len(counts) == math.factorial(n)
    expected = trials / math.factorial(n)
    chi2 = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi2 < math.factorial(n) - 1 + 6 * math.sqrt(2 * math.factorial(n))


@pytest.mark.parametrize("n", [31, 64, 1000, 4096, 33_000])
def test_places_and_distances_of_neighbours_are_uniform(n):
    """Chi-square of (position, image) in 16 x 16 cells, and of the distance between the images of neighbours."""
    keys = min(3000, 300_000 // n)
    positions = np.arange(n)
    cells, gaps = np.zeros((16, 16)), np.zeros(n)
    for key in range(keys):
        image = permutation(n, derive_key(key, 1)).astype(np.int64)
        np.add.at(cells, (positions * 16 // n, image * 16 // n), 1)
        np.add.at(gaps, np.diff(image) % n, 1)
    rows = np.bincount(positions * 16 // n, minlength=16)
    expected = np.outer(rows, rows) / n * keys
    chi2 = float(((cells - expected) ** 2 / expected).sum())
    assert chi2 < 225 + 6 * math.sqrt(2 * 225)
    # A distance of 0 cannot occur; the others are equally likely. 16 cells of distances.
    cell = np.arange(1, n) * 16 // n
    share = np.bincount(cell, weights=gaps[1:], minlength=16)
    expected_share = np.bincount(cell, minlength=16) / (n - 1) * gaps.sum()
    assert float(((share - expected_share) ** 2 / expected_share).sum()) < 15 + 6 * math.sqrt(2 * 15)


def test_keys_tell_parts_and_their_order_apart():
    keys = [derive_key(*parts) for parts in itertools.product((-(2**70), -1, 0, 1, 2**64, 2**200), repeat=2)]
    keys += [derive_key(), derive_key(0), derive_key(0, 0, 0)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(0, 2**64 - 1))
def test_shuffled_is_a_permutation(n, key):
    assert sorted(shuffled(n, key).tolist()) == list(range(n))


def test_hash_bits_are_balanced():
    bits = np.unpackbits(hash64(np.arange(100_000, dtype=np.int64), 3).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.001


def test_too_large_a_permutation_is_refused():
    with pytest.raises(ValueError, match="at most"):
        KeyedPermutations(np.array([MAX_SIZE + 1]), 1)
