"""Optimizers with differentiable, capturable or tensor-valued options: as in one process, or refused as there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import OptionError, PartialError
from backhaul.optim import DistributedOptimizer
from backhaul.testing import InProcessCluster

HELD: dict[str, Tensor] = {}
DIFFERENTIABLE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.RMSprop, {}),
]


def make() -> rpc.RRef[Tensor]:
    """A parameter that is computed from a leaf, as in meta-learning."""
    HELD["leaf"] = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    HELD["param"] = HELD["leaf"] * 2
    HELD["param"].retain_grad()
    return rpc.RRef(HELD["param"])


def loss(x: Tensor) -> Tensor:
    return (HELD["param"].square() * x).sum()


def after_step() -> Tensor:
    """The gradient of a leaf through the step."""
    result: Tensor = torch.autograd.grad(HELD["param"].square().sum(), HELD["leaf"])[0]
    return result


X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(("kind", "options"), DIFFERENTIABLE, ids=lambda each: getattr(each, "__name__", ""))
def test_a_differentiable_step(pair: InProcessCluster, kind: Any, options: dict[str, Any]) -> None:
    make_alone = pair[1]
    with make_alone.as_current():
        make()
    optimizer = kind([HELD["param"]], lr=0.1, differentiable=True, **options)
    loss(X).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    HELD["param"].grad = HELD["param"].grad.detach()  # type: ignore[union-attr]
    optimizer.step()
    expected, through = HELD["param"].detach().clone(), after_step()

    with pair[0].as_current():
        rref = rpc.rpc_sync("worker1", make)
        distributed = DistributedOptimizer(kind, [rref], lr=0.1, differentiable=True, **options)
        with dist_autograd.context() as context_id:
            root = rpc.rpc_sync("worker1", loss, args=(X,))
            dist_autograd.backward(context_id, [root], retain_graph=True, accumulate="grad")
            distributed.step()
        assert torch.equal(HELD["param"], expected)
        assert torch.equal(rpc.rpc_sync("worker1", after_step), through)


def test_a_differentiable_step_of_a_leaf(pair: InProcessCluster) -> None:
    """Torch refuses to change a leaf in place, and so does the remote step."""
    with pair[0].as_current():
        param = nn.Parameter(torch.ones(2))
        optimizer = DistributedOptimizer(torch.optim.SGD, [param], lr=0.1, differentiable=True)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [param.sum()])
            with pytest.raises(PartialError, match="a leaf Variable that requires grad is being used in an in-place"):
                optimizer.step(context_id)


def test_a_capturable_optimizer(pair: InProcessCluster) -> None:
    """Torch refuses its step on the CPU; the option itself is kept, saved and loaded."""
    with pair[0].as_current():
        param = nn.Parameter(torch.ones(2))
        optimizer = DistributedOptimizer(torch.optim.Adam, [param], lr=0.1, capturable=True)
        alone = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.1, capturable=True)
        assert optimizer.param_groups[0]["capturable"] is True
        assert optimizer.state_dict()["param_groups"] == alone.state_dict()["param_groups"]
        optimizer.load_state_dict(alone.state_dict())
        alone.param_groups[0]["params"][0].grad = torch.ones(2)
        with pytest.raises(AssertionError, match="If capturable=True, params and state_steps must be on"):
            alone.step()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [param.sum()])
            with pytest.raises(PartialError, match="If capturable=True, params and state_steps must be on"):
                optimizer.step(context_id)


def test_a_tensor_as_the_learning_rate(pair: InProcessCluster) -> None:
    with pair[0].as_current():
        rref = rpc.remote("worker1", nn.Parameter, args=(torch.ones(2),))
        optimizer = DistributedOptimizer(torch.optim.Adam, [rref], lr=torch.tensor(0.5))
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rref.to_here().sum()])
            optimizer.step(context_id)
        alone = nn.Parameter(torch.ones(2))
        other = torch.optim.Adam([alone], lr=torch.tensor(0.5))
        alone.sum().backward()
        other.step()
        assert torch.equal(rref.to_here(), alone)
        for options in (
            {"lr": torch.tensor(0.5, requires_grad=True)},
            {"lr": 0.1, "eps": torch.ones((), requires_grad=True)},
        ):
            with pytest.raises(OptionError, match="requires grad, and no gradient comes back through a remote step"):
                DistributedOptimizer(torch.optim.SGD, [rref], **options)
            with pytest.raises(OptionError, match="requires grad, and no gradient comes back through a remote step"):
                DistributedOptimizer(torch.optim.SGD, [{"params": [rref], **options}], lr=0.1)


def make_csr() -> rpc.RRef[Tensor]:
    HELD["csr"] = new_csr()
    return rpc.RRef(HELD["csr"])


def new_csr() -> Tensor:
    return torch.tensor([[1.0, 0.0], [2.0, 3.0]], dtype=torch.float64).to_sparse_csr().requires_grad_()


def product(x: Tensor) -> Tensor:
    return HELD["csr"] @ x


def step_alone(kind: Any, leaf: Tensor, x: Tensor) -> None:
    optimizer = kind([leaf], lr=0.1)
    (leaf @ x).square().sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def step_there(kind: Any, rref: rpc.RRef[Tensor], x: Tensor) -> None:
    optimizer = DistributedOptimizer(kind, [rref], lr=0.1)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", product, args=(x,)).square().sum()])
        optimizer.step(context_id)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_a_leaf_in_csr(pair: InProcessCluster, kind: Any) -> None:
    """No torch optimizer can step with one. The error is the same as in one process."""
    x = torch.eye(2, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        step_alone(kind, new_csr(), x)
    with pair[0].as_current():
        rref = rpc.rpc_sync("worker1", make_csr)
        before = HELD["csr"].detach().to_dense()
        with pytest.raises(PartialError, match="worker 'worker1' failed"):
            step_there(kind, rref, x)
        assert torch.equal(HELD["csr"].detach().to_dense(), before)
