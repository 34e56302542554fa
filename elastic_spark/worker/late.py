"""Copies that are made while the training goes on: of tensors that only an optimizer's step changes.

Between a commit and the next ``optimizer.step()`` the parameters and the optimizer's own tensors stand still, so a copy
of them may as well be made while the next step reads its batch and computes its gradients. It begins when that batch is
handed out, not at the commit: in between a loop may evaluate, with other weights swapped in.

Who writes to a tensor in between all the same is found out by torch's version counter, which each write in place
raises: such a copy is given up. (A write through ``tensor.data`` leaves no trace. It breaks what a commit promises in
any case: see the module `elastic_spark.worker.state`.)
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch


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
        self._pairs = [(name, tensor, tensor._version, targets[name]) for name, tensor in sources.items()]
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
        started = time.monotonic()
        with torch.no_grad():
            for _, tensor, _, target in self._pairs:
                target.copy_(tensor)
        changed = [name for name, tensor, version, _ in self._pairs if tensor._version != version]
        self._pairs = []  # they hold the live tensors
        self.seconds = time.monotonic() - started
        if changed:
            raise Torn(f"{', '.join(changed[:3])} changed between a commit and the next optimizer.step()")
        self._finish()


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
        if tensor.device.type == "cpu" and tensor.numel() and tensor.data_ptr() in own
    }


@functools.cache
def thread() -> ThreadPoolExecutor:
    """Of this process, for what is copied beside the training."""
    return ThreadPoolExecutor(1, thread_name_prefix="snapshot")
