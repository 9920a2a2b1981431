"""torch.compile around calls to other workers: graphs break there, and later steps recompile nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from backhaul import autograd, rpc
from backhaul.eager import without_compiled_autograd
from backhaul.nn import RemoteModule
from backhaul.optim import DistributedOptimizer
from backhaul.testing import InProcessCluster

# Torch's compiler reads .grad of every tensor with which a graph begins after a break, even in one process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
]

STEPS = 4


class Scale:
    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.full((4,), 3.0))

    def by(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.fixture
def workers() -> Iterator[InProcessCluster]:
    with InProcessCluster(2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def call(x: torch.Tensor) -> torch.Tensor:
    return torch.cos(rpc.rpc_sync("worker1", torch.mul, args=(torch.sin(x), 2.0))).sum()


def wait_for_a_future(x: torch.Tensor) -> torch.Tensor:
    future = rpc.rpc_async("worker1", torch.mul, args=(torch.sin(x), 2.0))
    return torch.cos(future.wait()).sum()


def fetch(x: torch.Tensor) -> torch.Tensor:
    return torch.cos(rpc.remote("worker1", torch.mul, args=(torch.sin(x), 2.0)).to_here()).sum()


def here(x: torch.Tensor) -> torch.Tensor:
    return torch.cos(torch.sin(x) * 2.0).sum()


def gradients_of_steps(program: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The input and its gradient, step by step. After the first two steps nothing may be compiled."""
    for step in range(STEPS):
        x = torch.randn(4, requires_grad=True)
        with (
            torch.compiler.set_stance("fail_on_recompile" if step > 1 else "default"),
            autograd.context() as context_id,
        ):
            autograd.backward(context_id, [program(x)])
            yield x, autograd.get_gradients(context_id)[x]


def gradient_here(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    local = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(local), local)
    return gradient


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [call, wait_for_a_future, fetch], ids=lambda program: program.__name__)
def test_a_function_that_calls(workers: InProcessCluster, program: Any, backend: str) -> None:
    compiled = torch.compile(program, backend=backend)
    torch._dynamo.utils.counters.clear()
    with workers[0].as_current():
        for x, gradient in gradients_of_steps(compiled):
            assert torch.equal(gradient, gradient_here(here, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # before the call, and after it


def test_a_proxy(workers: InProcessCluster) -> None:
    with workers[0].as_current():
        scale = rpc.remote("worker1", Scale)

        def program(x: torch.Tensor) -> torch.Tensor:
            return torch.relu(scale.rpc_sync().by(torch.sin(x))).sum()

        torch._dynamo.utils.counters.clear()
        for x, gradient in gradients_of_steps(torch.compile(program, backend="aot_eager")):
            assert torch.equal(gradient, gradient_here(lambda x: torch.relu(torch.sin(x) * 3.0).sum(), x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # before the call, and after it


def test_a_model_with_a_remote_module_trains_as_in_one_process(workers: InProcessCluster) -> None:
    torch.manual_seed(0)
    local = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    with workers[0].as_current():
        remote = RemoteModule("worker1", nn.Linear, args=(4, 4))
        remote.load_state_dict(local[1].state_dict())
        split = nn.Sequential(nn.Linear(4, 4), remote, nn.Linear(4, 2))
        split[0].load_state_dict(local[0].state_dict())
        split[2].load_state_dict(local[2].state_dict())
        compiled = torch.compile(split, backend="aot_eager")
        parameters = [rpc.RRef(p) for part in (split[0], split[2]) for p in part.parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, [*parameters, *remote.remote_parameters()], lr=0.1)
        reference = torch.optim.SGD(local.parameters(), lr=0.1)
        for step in range(STEPS):
            x = torch.randn(3, 4)
            with (
                torch.compiler.set_stance("fail_on_recompile" if step > 1 else "default"),
                autograd.context() as context_id,
            ):
                autograd.backward(context_id, [compiled(x).pow(2).sum()])
                optimizer.step(context_id)
            reference.zero_grad()
            local(x).pow(2).sum().backward()
            reference.step()
        for mine, theirs in zip((split[0], split[2]), (local[0], local[2]), strict=True):
            torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
        torch.testing.assert_close(remote.state_dict(), local[1].state_dict())


def test_a_whole_step(workers: InProcessCluster) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with autograd.context() as context_id:
            autograd.backward(context_id, [call(x)])
            return autograd.get_gradients(context_id)[x]

    compiled = torch.compile(step, backend="aot_eager")
    with workers[0].as_current():
        for _ in range(STEPS):
            x = torch.randn(4, requires_grad=True)
            assert torch.equal(compiled(x), gradient_here(here, x))


@pytest.mark.parametrize("name", ["compiled_sine", "decorated_sine"], ids=["beside the original", "in its place"])
def test_a_compiled_function_is_sent_by_name_and_runs_compiled_there(workers: InProcessCluster, name: str) -> None:
    function = getattr(importlib.import_module("compiled_functions"), name)
    torch._dynamo.utils.counters.clear()
    with workers[0].as_current(), autograd.context() as context_id:
        x = torch.randn(4, requires_grad=True)
        y = rpc.rpc_sync("worker1", function, args=(x,))
        autograd.backward(context_id, [y.sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.cos(x.detach()) * 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_autograd_leaves_a_distributed_pass_to_the_engine(workers: InProcessCluster) -> None:
    with (
        workers[0].as_current(),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        for x, gradient in gradients_of_steps(call):
            # Compiling the reference here shows that compiled autograd is still on.
            torch.testing.assert_close(gradient, gradient_here(here, x))
        assert torch._dynamo.compiled_autograd.compiled_autograd_enabled


def compiler_is_on() -> bool:
    """Whether torch's engine would compile a pass now."""
    before = torch._C._dynamo.compiled_autograd.set_autograd_compiler(None, False)
    torch._C._dynamo.compiled_autograd.set_autograd_compiler(*before)
    return before[0] is not None


def test_compiled_autograd_is_off_until_the_last_run_ends() -> None:
    """Torch has one compiler for all threads, and runs may overlap in any order."""
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        first, second = without_compiled_autograd(), without_compiled_autograd()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not compiler_is_on()
        second.__exit__(None, None, None)
        assert compiler_is_on()
    assert not compiler_is_on()


def test_importing_backhaul_does_not_import_the_compiler() -> None:
    import subprocess
    import sys

    program = "import sys, backhaul, backhaul.nn, backhaul.optim; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
