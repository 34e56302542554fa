"""Shuffled orders that are computed, not stored.

A lane of 10^8 rows is shuffled as a whole, yet nobody may hold a list of its rows: a resize would have to build or send
it. So the order of a lane is a *keyed permutation*: a function from a position to a position, one-to-one on
``0 .. n-1``, chosen by a 64-bit key. Any part of the order is computed on its own, in any process, from the key alone.

The permutation is a Feistel network of four rounds (M. Luby, C. Rackoff, "How to construct pseudorandom permutations
from pseudorandom functions", SIAM J. Comput. 17(2), 1988) on the pairs ``(high, low)`` of ``x = high * 2^q + low``,
``high < a = ceil(n / 2^q)``. The low half is a power of two, so that splitting needs no division, and the domain
``a * 2^q`` is larger than n by less than ``2^q``, about the square root of n. What falls outside ``0 .. n-1`` is sent
through again until it is inside (*cycle walking*: J. Black, P. Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002), which so concerns few rows. Two rounds are visibly not uniform; four are good enough to shuffle with, and
eight where the halves have few bits. This is not cryptography.

Short lists that exist anyway (row groups) are shuffled by sorting hashes, which is uniform. Nothing here depends on
numpy's random streams, which may change between its versions: the same key gives the same order for ever.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt

UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

#: A keyed permutation works on 0 .. n-1 with n up to this.
MAX_SIZE = 1 << 31

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_SMALL = 4096  # below this many positions the halves are so short that it takes more rounds to mix them


def _mix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): every bit of x reaches every bit of the result."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def derive_key(*parts: int) -> int:
    """A 64-bit key from integers of any size and sign; other parts, or another order of them, give another key."""
    key = _GAMMA
    for part in parts:
        while True:
            key = _mix64((key + _GAMMA) ^ (part & _MASK64))
            part >>= 64
            if part in (0, -1):
                break
        key = _mix64((key + _GAMMA) ^ (part & _MASK64))
    return key


def hash64(values: Int64s, key: int) -> UInt64s:
    """A hash of each value under a key: the SplitMix64 stream that starts at ``key``, read at ``values``."""
    x = values.astype(np.uint64) * np.uint64(_GAMMA) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_hash(ids: Int64s) -> int:
    """A hash of a set of row ids: the sum of their hashes, modulo 2^64.

    Whatever the order, and in whatever parts: the hashes of the parts add up, modulo 2^64. So what the workers of any
    world report of a global batch can be compared with what the plan says.
    """
    return int(hash64(ids, _GAMMA).sum(dtype=np.uint64))


def shuffled(n: int, key: int) -> Int64s:
    """``0 .. n-1`` in an order that ``key`` chooses, as int64[n]. Builds the list: for things that are few."""
    return np.argsort(hash64(np.arange(n, dtype=np.int64), key), kind="stable").astype(np.int64)


class KeyedPermutations:
    """One keyed permutation for each column of an array of positions.

    ``sizes`` is int64[C]: column c is permuted within ``0 .. sizes[c]-1``. Each column's key is derived from ``key``
    and its number. Takes memory for C columns, whatever the sizes.
    """

    __slots__ = ("_high", "_low_bits", "_low_mask", "_low_shift", "_round_keys", "_sizes")

    def __init__(self, sizes: Int64s, key: int) -> None:
        if sizes.size and int(sizes.max()) > MAX_SIZE:
            raise ValueError(f"a keyed permutation of {int(sizes.max())} positions: at most {MAX_SIZE} are possible")
        bits = np.array([max(int(n) - 1, 0).bit_length() for n in sizes], dtype=np.uint32)
        self._sizes: UInt32s = sizes.astype(np.uint32)
        self._low_bits: UInt32s = bits // np.uint32(2)
        self._low_mask: UInt32s = (np.uint32(1) << self._low_bits) - np.uint32(1)
        self._high: UInt32s = np.maximum((sizes + self._low_mask) >> self._low_bits, 1).astype(np.uint32)
        self._low_shift: UInt32s = np.uint32(32) - self._low_bits
        rounds = 8 if sizes.size == 0 or int(sizes.max()) < _SMALL else 4
        numbers = np.arange(sizes.size * rounds, dtype=np.int64).reshape(sizes.size, rounds)
        self._round_keys: UInt32s = np.ascontiguousarray((hash64(numbers, key) >> np.uint64(32)).T.astype(np.uint32))

    def take(self, columns: Int64s) -> Self:
        """The permutations of the given columns, which may repeat: int64[D] -> permutations of D columns."""
        taken = object.__new__(type(self))
        for name in ("_sizes", "_low_bits", "_low_mask", "_low_shift", "_high"):
            setattr(taken, name, getattr(self, name)[columns])
        taken._round_keys = np.ascontiguousarray(self._round_keys[:, columns])
        return taken

    def __call__(self, positions: UInt32s) -> UInt32s:
        """Permuted positions: uint32[..., C] with ``positions[..., c] < sizes[c]`` -> uint32[..., C]."""
        x = self._rounds(positions)
        outside = np.flatnonzero(x >= self._sizes)
        if outside.size:
            again = self.take(outside % self._sizes.size)
            flat = x.reshape(-1)
            flat[outside] = again(flat[outside])
        return x

    def _rounds(self, positions: UInt32s) -> UInt32s:
        high = positions >> self._low_bits
        low = positions & self._low_mask
        keys = self._round_keys
        f, spare = np.empty_like(high), np.empty_like(high)  # reused: fresh arrays would cost more than the sums
        for r in range(0, len(keys), 2):
            # high' = (high + F(low)) mod a. Both are below a; in unsigned numbers min(s, s - a) is s mod a.
            _hash32(low, keys[r], f, spare)
            f >>= np.uint32(16)
            f *= self._high
            f >>= np.uint32(16)
            high += f
            np.subtract(high, self._high, out=f)
            np.minimum(high, f, out=high)
            # low' = low xor F(high), of which the upper bits are taken. A shift by 32 gives 0.
            _hash32(high, keys[r + 1], f, spare)
            f >>= self._low_shift
            low ^= f
        high <<= self._low_bits
        high |= low
        return high


def _hash32(values: UInt32s, key: UInt32s, out: UInt32s, spare: UInt32s) -> None:
    """Puts a hash of ``values`` (below 2^17) under a key for each column into ``out``; its upper bits are the best."""
    np.add(values, key, out=out)
    out *= np.uint32(0x9E3779B1)
    np.right_shift(out, np.uint32(15), out=spare)
    out ^= spare
    out *= np.uint32(0x85EBCA77)
