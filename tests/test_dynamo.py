"""torch's compiler is not imported by a worker that compiles nothing, and is all there for one that does."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable

#: What a training function may do, each in a process that was forked from a warm one; and whether the compiler came.
USES: dict[str, tuple[Callable[[], object], bool]] = {}


def use(comes: bool) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def noted(function: Callable[[], object]) -> Callable[[], object]:
        USES[function.__name__] = (function, comes)
        return function

    return noted


@use(comes=False)
def each_optimizer_works_without_it():
    import inspect

    import torch

    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        step, weight, optimizer = training(kind)
        before = weight.detach().clone()
        step()
        assert not torch.equal(before, weight), kind
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    hidden = torch.compiler.disable(lambda: 42)
    assert hidden() == 42
    repr(sys.modules["torch._dynamo"])
    inspect.getmodule(inspect.currentframe())  # looks through all modules


@use(comes=True)
def a_part_of_it_is_imported():
    import torch._dynamo.config
    from torch._dynamo import eval_frame

    assert torch._dynamo.config.cache_size_limit
    assert eval_frame


@use(comes=True)
def a_name_of_it_is_imported():
    from torch._dynamo import config

    assert config.cache_size_limit


@use(comes=True)
def it_was_kept_from_before():
    import torch

    kept = torch._dynamo
    kept.reset()
    kept.reset()
    assert torch._dynamo is not kept


@use(comes=True)
def a_decorator_with_options_is_used():
    import torch

    assert torch.compiler.disable(recursive=False)(lambda: 42)() == 42


@use(comes=True)
def what_was_hidden_from_it_before_it_came_is_hidden_from_it():
    import torch

    step, weight, _ = training(torch.optim.SGD)
    step()  # torch keeps the answer of the stand-in
    seen = []

    def hidden(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    hidden = torch.compiler.disable(hidden)

    @torch.compile(backend="eager")
    def compiled(x):
        step()
        return hidden(x)

    before = weight.detach().clone()
    assert [compiled(torch.zeros(1)) for _ in range(2)] == [1, 1]
    assert seen == [False, False]
    assert not torch.equal(before, weight)


def training(kind):
    import torch

    model = torch.nn.Linear(3, 1)
    optimizer = kind(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3)).pow(2).sum().backward()
        optimizer.step()

    return step, model.weight, optimizer


def test_the_compiler_comes_when_it_is_used_and_only_then() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == list(USES)


def main() -> int:
    from elastic_spark.worker.main import warm_up

    warm_up()
    failed = False
    for name, (function, comes) in USES.items():
        pid = os.fork()
        if pid == 0:
            try:
                function()
                assert ("torch._dynamo.eval_frame" in sys.modules) == comes
                import torch._dynamo

                assert sys.modules["torch._dynamo"] is torch._dynamo
                assert not comes or torch._dynamo.__file__
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        failed |= os.waitpid(pid, 0)[1] != 0
        print(name, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
