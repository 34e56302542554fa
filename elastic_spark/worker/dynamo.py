"""torch's compiler, imported when something is compiled.

torch's optimizers import `torch._dynamo` at their first step, only to tell it that it need not look at them: 2 s of
processor time and 80 MB in each new worker, as much as the rest of torch, and nearly always for nothing. As long as
nobody else has imported it, their methods are called here without what they do for its sake. Its import, by whomever,
puts them back as they were.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
#: Hidden from the compiler by torch's `_disable_dynamo`, which wraps the method itself.
HIDDEN = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


class _Watch(importlib.abc.MetaPathFinder):
    """Sees the import of the compiler begin, finds nothing, and so stays out of its way."""

    def __init__(self) -> None:
        self.comes = False
        self.put_back: list[Callable[[], None]] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == NAME and not self.comes:
            self.comes = True
            for undo in self.put_back:
                undo()
        return None


def import_when_used() -> None:
    """Spare torch's optimizers the import of the compiler, unless it was imported already. An optimizer, or a torch,
    whose methods are not made in the known way is left as it is."""
    if NAME in sys.modules or any(isinstance(finder, _Watch) for finder in sys.meta_path):
        return
    import torch

    watch = _Watch()
    sys.meta_path.insert(0, watch)
    base = torch.optim.Optimizer
    for name in HIDDEN:
        method = vars(base)[name]
        if method.__code__.co_filename.endswith("_compile.py"):
            setattr(base, name, method.__wrapped__)
            watch.put_back.append(functools.partial(_put_back, base, name, method))
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, base) else None
        if step is not None and getattr(step, "__code__", None) and step.__code__.co_name == "_use_grad":
            # It is not put back: torch keeps what it finds here inside of a wrapper, when the first optimizer is made.
            kind.step = _step(step, watch)


def _put_back(base: type, name: str, method: Any) -> None:
    """Unless it was replaced meanwhile."""
    if vars(base)[name] is method.__wrapped__:
        setattr(base, name, method)


def _step(step: Callable[..., Any], watch: _Watch) -> Callable[..., Any]:
    """What torch's `_use_grad_for_differentiable` makes of a method, less the graph breaks; with them once there may be
    a graph."""
    plain = step.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(step)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if watch.comes:
            return step(self, *args, **kwargs)
        import torch

        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            return plain(self, *args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return called
