"""Copies that are made while the training goes on: of tensors that only an optimizer's step changes.

Between a commit and the next ``optimizer.step()`` the parameters and the optimizer's own tensors stand still, so a copy
of them may as well be made while the next step reads its batch and computes its gradients. It begins when that batch is
asked for, not at the commit: in between a loop may evaluate, with other weights swapped in.

A loop that swaps them later than that, while the copy is made, must not get a state of neither. Two signs give such a
copy up: torch's version counter, which each write in place raises, and, because a write through ``tensor.data`` does
not, items from all over each tensor that were noted at the commit and must be in the copy, bit by bit.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

#: Items of a tensor that are compared.
SAMPLES = 32
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Torn(Exception):
    """Tensors changed while they were copied; the message names some."""


class LateCopy:
    """A copy of some tensors that is begun later, and made in a thread.

    Args:
        sources: live tensors by name; targets: as large, by the same names.
        finish: called in that thread when all is copied and nothing has changed in between.
    """

    def __init__(
        self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor], finish: Callable[[], None]
    ) -> None:
        self._pairs = [(name, tensor, _samples(tensor), targets[name]) for name, tensor in sources.items()]
        self._finish = finish
        self._running: Future[None] | None = None
        self._begun = threading.Event()
        self.seconds = 0.0

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._running is None:
            self._running = thread().submit(self._run)
            self._begun.set()

    def settle(self) -> None:
        """Begin it where nobody has, and return when it is made. In the thread that trains, as `start`.

        Raises:
            Torn: somebody wrote to a tensor. What was there before is left as it is.
        """
        self.start()
        self.wait()

    def wait(self) -> None:
        """Return when it is made, in whatever thread, or raise as `settle` does. It is begun at the next batch at the
        latest, or where the loop ends or fails."""
        self._begun.wait()
        assert self._running is not None
        self._running.result()

    def _run(self) -> None:
        started, changed = time.monotonic(), []
        with torch.no_grad():
            for name, tensor, committed, target in self._pairs:
                version = tensor._version
                target.copy_(tensor)
                if tensor._version != version or not torch.equal(_samples(target), committed):
                    changed.append(name)
        self._pairs = []  # they hold the live tensors
        self.seconds = time.monotonic() - started
        if changed:
            raise Torn(f"{', '.join(changed[:3])} changed between a commit and the next optimizer.step()")
        self._finish()


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its items as integers, the first and the last among them: swapped weights differ in nearly all."""
    flat = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    return torch.cat([flat[:: max(1, len(flat) // SAMPLES)], flat[-1:]])


def stepped(optimizers: Collection[torch.optim.Optimizer], tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of those ``tensors`` in host memory that are an optimizer's parameters, or what it keeps of each."""
    own: set[int] = set()
    for optimizer in optimizers:
        for parameter in (item for group in optimizer.param_groups for item in group["params"]):
            kept = [parameter, *optimizer.state.get(parameter, {}).values()]
            own |= {item.data_ptr() for item in kept if isinstance(item, torch.Tensor)}
    return {
        name
        for name, tensor in tensors.items()
        if tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.element_size() in _BITS
        and tensor.numel()
        and tensor.data_ptr() in own
    }


@functools.cache
def thread() -> ThreadPoolExecutor:
    """Of this process, for what is copied beside the training."""
    return ThreadPoolExecutor(1, thread_name_prefix="snapshot")
