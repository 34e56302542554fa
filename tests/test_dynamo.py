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
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, differentiable=True).step()
    assert torch.is_grad_enabled()
    inspect.getmodule(inspect.currentframe())  # looks through all modules


@use(comes=True)
def a_part_of_it_is_imported_first():
    import torch
    import torch._dynamo.config as imported
    from torch._dynamo.eval_frame import OptimizedModule, config

    assert imported is config
    assert isinstance(torch.compile(torch.nn.Linear(1, 1)), OptimizedModule)


@use(comes=True)
def a_module_is_hidden_from_it():
    import torch

    model = torch.nn.Sequential(torch.compiler.disable(torch.nn.Linear(2, 2)))
    assert len(list(model.parameters())) == 2


@use(comes=True)
def a_step_is_compiled():
    """Optimizers are as torch made them, also one that has made a step before."""
    import torch
    from torch.optim import Optimizer

    step, weight, optimizer = training(torch.optim.SGD)
    notes = []
    optimizer.register_step_pre_hook(lambda *_: notes.append("before"))
    step()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    def compiled(x):
        optimizer.step()
        optimizer.zero_grad()
        return x + 1

    compiled = torch.compile(compiled, backend=backend)
    optimizer.zero_grad()
    (weight.sum() * 2).backward()
    before = weight.detach().clone()
    assert [float(compiled(torch.zeros(1))) for _ in range(2)] == [1.0, 1.0]
    assert graphs
    torch.testing.assert_close(weight, before - 0.1 * 2)
    assert notes == ["before"] * 3
    assert all(vars(Optimizer)[name].__wrapped__ for name in ("zero_grad", "state_dict"))
    step()


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
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        failed |= os.waitpid(pid, 0)[1] != 0
        print(name, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
