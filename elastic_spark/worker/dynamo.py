"""torch's compiler, imported when something is compiled.

torch's optimizers import `torch._dynamo` at their first step, only to tell it that it need not look at them: about 2 s
of processor time and 80 MB in each new worker, as much as the rest of torch, and nearly always for nothing. Here a
stand-in answers the two questions that they ask, and gives way to the real module at any other.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

NAME = "torch._dynamo"


class _StandIn(types.ModuleType):
    """In `sys.modules` until the real one is wanted; whoever has kept it by then is answered by the real one."""

    def __init__(self) -> None:
        super().__init__(NAME, __doc__)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        # Who looks through all modules asks for such names; who imports a part of this one asks for its path.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(self._real(), name)

    def graph_break(self, msg: str = "") -> None:
        """Something to see for the compiler only."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """Without a compiler ``fn`` is called as it is; with one, as that one would have it."""
        if fn is None:
            return self._real().disable(None, recursive, **options)
        hidden: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            if sys.modules.get(NAME) is self:
                return fn(*args, **kwargs)
            if not hidden:
                hidden.append(self._real().disable(fn, recursive, **options))
            return hidden[0](*args, **kwargs)

        return called

    def _real(self) -> Any:
        import torch

        with self._lock:
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
                vars(torch).pop("_dynamo", None)
        return importlib.import_module(NAME)


def import_when_used() -> None:
    """Put the stand-in where the compiler would be, unless that was imported already."""
    import torch

    if NAME not in sys.modules:
        torch._dynamo = sys.modules[NAME] = _StandIn()
