"""What a commit keeps of what changes during a step, made cheap: it is done at each step, in code that is cold by then.

Random generators and buffers seldom change between two commits, and to look whether they have costs less than to copy
them. Everything here errs towards the copy.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import random
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.random import get_bit_generator  # type: ignore[attr-defined]
from torch.nn.modules import module as registry

from elastic_spark.worker import tree

_PLAIN = (bool, int, float, str, type(None))
_PYTHON: Any = random.getstate.__self__  # type: ignore[attr-defined]
_MT19937_BYTES = 625 * 4  # the key's 624 words and the position

_registrations = 0


def _count(*_what: Any) -> None:
    global _registrations
    _registrations += 1


registry.register_module_buffer_registration_hook(_count)
registry.register_module_module_registration_hook(_count)


class RandomMarks:
    """The state of this process's generators: torch, numpy's global one, and Python's."""

    def __init__(self) -> None:
        self._numpy: Any = None
        self._bits: Any = None
        self._at = 0  # the address of its words
        self._words = b""
        self._python: Any = None
        self._python_at, self._python_words = _address_of_python_words(), b""

    def take(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "numpy": self._take_numpy(), "python": self._take_python()}

    def _take_python(self) -> Any:
        """To make its tuple of 625 numbers takes longer than to see that none has changed."""
        if self._python_at is None:
            return random.getstate()
        words = ctypes.string_at(self._python_at, _MT19937_BYTES)
        if words != self._python_words or self._python[2] != _PYTHON.gauss_next:
            self._python, self._python_words = random.getstate(), words
        return self._python

    def _take_numpy(self) -> Any:
        """A draw moves the generator's words, save one that is taken from a pair of normal numbers drawn before; so
        where no such number was left, equal words are an equal state."""
        bits = get_bit_generator()
        if self._numpy is not None and self._bits is bits and self._read() == self._words:
            return self._numpy
        state = np.random.get_state(legacy=True)
        kind, _, _, left, _ = state
        self._numpy, self._bits, self._at = None, bits, bits.ctypes.state_address
        if kind == "MT19937" and not left:
            self._numpy, self._words = state, self._read()
        return state

    def _read(self) -> bytes:
        return ctypes.string_at(self._at, _MT19937_BYTES)


def _address_of_python_words() -> int | None:
    """Where Python's generator keeps its position and words: looked for in its memory, and None where they are not
    found there as `random.getstate` tells them."""
    *key, position = random.getstate()[1]
    words = struct.pack("=i624I", position, *key)
    offset = ctypes.string_at(id(_PYTHON), _PYTHON.__sizeof__()).find(words)
    return id(_PYTHON) + offset if offset >= 0 else None


class BufferMarks:
    """The buffers of those ``objects`` that are modules. Which modules have any is looked up again only when one was
    registered."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._modules = [item for item in objects if isinstance(item, torch.nn.Module)]
        self._seen = -1
        self._holders: list[dict[str, torch.Tensor | None]] = []  # the buffers of each module, by name
        self._kept: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None, torch.Tensor | None]] = []

    def take(self) -> None:
        if self._seen != _registrations:
            self._seen = _registrations
            self._holders = [part._buffers for whole in self._modules for part in whole.modules()]
        self._kept = [
            (holder, name, buffer, buffer.detach().clone() if buffer is not None else None)
            for holder in self._holders
            for name, buffer in holder.items()
        ]

    def put_back(self) -> None:
        """Values as they were, in the tensors that they were in. What the modules have registered since is there no
        more; modules that are new are left as they are."""
        for holder in self._holders:
            holder.clear()
        with torch.no_grad():
            for holder, name, buffer, copied in self._kept:
                if buffer is not None and copied is not None:
                    buffer.copy_(copied)
                holder[name] = buffer


def copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes, so that neither changes with the other."""
    return {name: item if type(item) in _PLAIN else copy.deepcopy(item) for name, item in attributes.items()}


def random_as_tree() -> Any:
    """The random generators of this process as JSON."""
    state = RandomMarks().take()
    kind, keys, *rest = state["numpy"]
    plain = {
        "torch": state["torch"].numpy().tobytes(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "python": state["python"],
    }
    return tree.flatten(plain, "random")[0]


def set_random_state(state: Mapping[str, Any]) -> None:
    words = state["torch"]
    torch.set_rng_state(torch.frombuffer(bytearray(words), dtype=torch.uint8) if isinstance(words, bytes) else words)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    random.setstate(state["python"])


def derive_random_state(seed: int, generation: int, rank: int) -> None:
    """A stream of its own for a newcomer: no two ranks draw the same numbers, and the same job draws them again."""
    derived = int.from_bytes(hashlib.sha256(f"{seed}/{generation}/{rank}".encode()).digest()[:4], "big")
    torch.manual_seed(derived)
    np.random.seed(derived)
    random.seed(derived)
