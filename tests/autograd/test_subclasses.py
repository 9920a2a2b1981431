"""Tensor subclasses keep their history when they are sent: the gradients are those of one process."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from models import W, call, check, leaf
from torch import Tensor, nn
from torch.masked import MaskedTensor, as_masked_tensor
from torch.utils import _pytree as pytree

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import MisuseError, UnsendableError
from backhaul.testing import InProcessCluster

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:It is not recommended to create a MaskedTensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


class Labelled(Tensor):
    """A plain subclass, with an attribute."""

    label: str


class Weight(nn.Parameter):
    """A Parameter subclass."""


class Pair(Tensor):
    """A wrapper around two tensors of one shape, and a scale. Each operation applies to both tensors."""

    first: Tensor
    second: Tensor

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor, scale: float) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device
        )
        made.first, made.second, made.scale = first, second, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["first", "second"], self.scale  # type: ignore[attr-defined]

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], scale: float, size: Any, stride: Any) -> Pair:
        assert tuple(inner["first"].shape) == tuple(size)
        return Pair(inner["first"], inner["second"], scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scales = [each.scale for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Pair)]
        one = func(*pytree.tree_map_only(Pair, lambda pair: pair.first, args), **(kwargs or {}))
        other = func(*pytree.tree_map_only(Pair, lambda pair: pair.second, args), **(kwargs or {}))
        return pytree.tree_map(lambda a, b: Pair(a, b, scales[0]) if isinstance(a, Tensor) else a, one, other)


class Both(torch.autograd.Function):
    """A tensor and its double as a Pair."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Pair(x.detach(), 2 * x.detach(), 3.0)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.first + 2 * gradient.second


class Sum(torch.autograd.Function):
    """The sum of the two tensors of a Pair, and its scale."""

    @staticmethod
    def forward(ctx: Any, pair: Any) -> Tensor:
        ctx.scale = pair.scale
        return (pair.first + pair.second * 5) * pair.scale  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Pair(gradient * ctx.scale, 5 * gradient * ctx.scale, ctx.scale)


def work(name: str, x: Any) -> Any:
    assert type(x) is not Tensor
    return torch.tanh(x * 2) * x


def work_on_label(name: str, x: Labelled) -> Any:
    assert type(x) is Labelled
    assert x.label == "here"
    made = x * W[name]
    assert type(made) is Labelled
    return made


def test_a_plain_subclass(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Tensor:
        labelled = (x * 3).as_subclass(Labelled)
        labelled.label = "here"
        result: Tensor = call("worker1", keep_label, "a", labelled)
        assert type(result) is Labelled
        return result.square().sum().as_subclass(Tensor)

    check(pair, program, {0: [x], 1: [W["a"]]})


def keep_label(name: str, x: Labelled) -> Any:
    if not hasattr(x, "label"):  # a clone, in the reference
        x.label = "here"
    return work_on_label(name, x)


def test_a_leaf_of_a_plain_subclass(pair: InProcessCluster) -> None:
    x = leaf(4, 4).detach().as_subclass(Labelled).requires_grad_()
    assert x.is_leaf
    with pair[0].as_current(), dist_autograd.context() as context_id:
        x.label = "here"
        y = rpc.rpc_sync("worker1", work_on_label, args=("a", x))
        context_id.backward((y * x).sum())
        found = context_id.gradients()
        assert list(map(id, found)) == [id(x)]
        assert torch.equal(found[x].as_subclass(Tensor), (2 * x * W["a"]).detach().as_subclass(Tensor))


def times(weight: Tensor, x: Tensor) -> Tensor:
    assert type(weight) is Tensor  # like a Parameter, it arrives as a computed tensor
    return torch.tanh(weight @ x)


def test_a_parameter_subclass(pair: InProcessCluster) -> None:
    weight = Weight(leaf(4, 4).detach())
    assert type(weight) is Weight
    x = leaf(4, 4, seed=2)
    check(pair, lambda: call("worker1", times, weight, x).sum(), {0: [weight, x]})


def double_of_parts(pair: Any) -> Any:
    assert type(pair) is Pair
    assert pair.scale == 3.0  # type: ignore[attr-defined]
    return torch.tanh(pair) * pair


def test_a_wrapper(pair: InProcessCluster) -> None:
    x = leaf(3, 2)
    check(pair, lambda: Sum.apply(call("worker1", double_of_parts, Both.apply(x))).sum(), {0: [x]})  # type: ignore[no-untyped-call]


def test_a_wrapper_that_is_used_by_its_sender_and_its_receivers(trio: InProcessCluster) -> None:
    """Two workers get the wrapper, one of them twice in a list."""
    x = leaf(3, 2)

    def program() -> Tensor:
        made: Any = Both.apply(x)  # type: ignore[no-untyped-call]
        one = call("worker1", double_of_parts, made)
        two = call("worker2", of_both_mentions, [made, made])
        return Sum.apply(one + two * made).sum()  # type: ignore[no-untyped-call,no-any-return]

    check(trio, program, {0: [x]})


def of_both_mentions(pairs: list[Any]) -> Any:
    assert pairs[0] is pairs[1]
    return pairs[0] * pairs[1]


def test_a_leaf_that_is_a_wrapper(pair: InProcessCluster) -> None:
    made: Any = Pair(leaf(3, 2).detach(), leaf(3, 2, seed=2).detach(), 3.0).requires_grad_()
    expected: Any = torch.autograd.grad(Sum.apply(double_of_parts(made)).sum(), made)[0]  # type: ignore[no-untyped-call]
    with pair[0].as_current(), dist_autograd.context() as context_id:
        context_id.backward(Sum.apply(rpc.rpc_sync("worker1", double_of_parts, args=(made,))).sum())  # type: ignore[no-untyped-call]
        found: Any = context_id.gradients()[made]
    assert type(found) is Pair
    assert torch.equal(found.first, expected.first)
    assert torch.equal(found.second, expected.second)


def jagged(values: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 3, 6]))


def on_jagged(name: str, nested: Any) -> Any:
    assert nested.is_nested
    assert nested.layout is torch.jagged
    assert nested.offsets().tolist() == [0, 2, 3, 6]
    return torch.nn.functional.linear(nested, W[name]).sin() * nested


def test_a_jagged_nested_tensor(pair: InProcessCluster) -> None:
    values = leaf(6, 4)
    check(
        pair,
        lambda: call("worker1", on_jagged, "a", jagged(values * 1)).values().square().sum(),
        {0: [values], 1: [W["a"]]},
    )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The three tensors share offsets, so torch knows that their shapes match."""
    return (q * k + v).cos()


def test_jagged_nested_tensors_that_share_offsets(pair: InProcessCluster) -> None:
    values = leaf(6, 4)

    def program() -> Tensor:
        nested: Any = jagged(values * 1)
        return call("worker1", attend, nested * 2, nested.sin(), nested).values().sum()  # type: ignore[no-any-return]

    check(pair, program, {0: [values]})


def test_a_leaf_that_is_a_jagged_nested_tensor(pair: InProcessCluster) -> None:
    nested: Any = jagged(leaf(6, 4).detach()).detach().requires_grad_()
    expected: Any = torch.autograd.grad(on_jagged("a", nested).values().sum(), nested)[0]
    with pair[0].as_current(), dist_autograd.context() as context_id:
        for passes in (1, 2):
            y = rpc.rpc_sync("worker1", on_jagged, args=("a", nested))
            context_id.backward(y.values().sum())
            assert torch.equal(context_id.gradients()[nested].values(), passes * expected.values())


@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_a_jagged_leaf_that_is_used_here_and_there(pair: InProcessCluster, accumulate: Any) -> None:
    """Torch cannot add to its .grad, so a pass must accumulate its whole gradient at once."""
    nested: Any = jagged(leaf(6, 4).detach()).detach().requires_grad_()
    expected: Any = torch.autograd.grad((on_jagged("a", nested).values() + nested.values()).sum(), nested)[0]
    with pair[0].as_current(), dist_autograd.context() as context_id:
        y: Any = rpc.rpc_sync("worker1", on_jagged, args=("a", nested))
        context_id.backward((y.values() + nested.values()).sum(), accumulate=accumulate)
        found = nested.grad if accumulate == "grad" else context_id.gradients()[nested]
    torch.testing.assert_close(found.values(), expected.values())


MASK = torch.tensor([[True, False], [True, True]])


def on_masked(masked: Any) -> Any:
    assert isinstance(masked, MaskedTensor)
    assert torch.equal(masked.get_mask(), MASK)
    return torch.exp(masked) * masked


def test_a_masked_tensor(pair: InProcessCluster) -> None:
    x = leaf(2, 2)
    expected: Any = torch.autograd.grad(on_masked(as_masked_tensor(x, MASK)).sum().to_tensor(0.0), x)[0]
    with pair[0].as_current(), dist_autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", on_masked, args=(as_masked_tensor(x, MASK),))
        context_id.backward(result.sum().to_tensor(0.0))
        found: Any = context_id.gradients()[x]
    assert torch.equal(found.to_tensor(0.0), expected.to_tensor(0.0))


class Odd(Tensor):
    """A subclass that is neither plain nor has ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Odd:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, requires_grad=requires_grad)
        made.inner = data
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*pytree.tree_map_only(Odd, lambda odd: odd.inner, args), **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Odd, (self.inner, self.requires_grad)  # type: ignore[attr-defined]


def total(odd: Any) -> float:
    return float(odd.inner.sum())


def make_odd(requires_grad: bool) -> Any:
    return Odd(torch.ones(2), requires_grad)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def total_in(holder: Holder) -> float:
    return total(holder.value)


def test_anything_else_that_requires_grad_is_refused_in_a_recorded_message(pair: InProcessCluster) -> None:
    says = "a Odd requires grad, and would arrive without its history"
    with pair[0].as_current():
        odd = make_odd(True)
        assert type(pickle.loads(pickle.dumps(odd))) is Odd
        assert rpc.rpc_sync("worker1", total, args=(odd,)) == 2.0  # nothing is recorded here
        with dist_autograd.context():
            for function, arg in ((total, odd), (total_in, Holder(odd))):
                with pytest.raises(UnsendableError, match=says):
                    rpc.rpc_sync("worker1", function, args=(arg,))
            with pytest.raises(UnsendableError, match=says):
                rpc.rpc_sync("worker1", make_odd, args=(True,))
            assert rpc.rpc_sync("worker1", total, args=(make_odd(False),)) == 2.0
            assert type(rpc.rpc_sync("worker1", make_odd, args=(False,))) is Odd
            with torch.no_grad():
                assert rpc.rpc_sync("worker1", total_in, args=(Holder(odd),)) == 2.0


class PlainGradient(torch.autograd.Function):
    """The first of a Pair; its gradient is a plain tensor."""

    @staticmethod
    def forward(ctx: Any, pair: Any) -> Tensor:
        return pair.first.clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_gradient_of_another_kind_than_its_wrapper(pair: InProcessCluster) -> None:
    x = leaf(3, 2)
    with pair[0].as_current(), dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", double_of_parts, args=(Both.apply(x),))  # type: ignore[no-untyped-call]
        loss = PlainGradient.apply(y).sum()  # type: ignore[no-untyped-call]
        with pytest.raises(MisuseError, match="the gradient of a Pair from another worker is a Tensor"):
            context_id.backward(loss)


def echo(value: Any) -> Any:
    return value


@pytest.mark.parametrize("requires_grad", [False, True])
def test_subclasses_arrive_as_leaves_outside_a_context(pair: InProcessCluster, requires_grad: bool) -> None:
    labelled = torch.arange(3.0).as_subclass(Labelled)
    labelled.label = "it"
    wrapper = Pair(torch.ones(2), torch.zeros(2), 3.0)
    values: list[Any] = [
        labelled.requires_grad_(requires_grad),
        Weight(torch.ones(2), requires_grad),
        wrapper.requires_grad_(requires_grad),
        jagged(torch.ones(6, 2)).detach().requires_grad_(requires_grad),
        MaskedTensor(torch.ones(2, 2), MASK, requires_grad),
        [labelled, wrapper],
    ]
    with pair[0].as_current():
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                got = rpc.rpc_sync("worker1", echo, args=(values,))
            assert [type(each) for each in got] == [type(each) for each in values]
            assert [each.requires_grad for each in got[:-1]] == [requires_grad] * 5
            assert all(each.is_leaf for each in got[:-1])
            assert got[-1] == [got[0], got[2]]
            assert got[-1][0] is got[0]
            assert got[-1][1] is got[2]
            assert got[0].label == "it"
            assert torch.equal(got[2].first, torch.ones(2))
            assert got[3].offsets().tolist() == [0, 2, 3, 6]
            assert torch.equal(got[4].get_mask(), MASK)


def test_no_grad_in_a_context(pair: InProcessCluster) -> None:
    x = leaf(3, 2)
    with pair[0].as_current(), dist_autograd.context():
        made: Any = Both.apply(x)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            got = rpc.rpc_sync("worker1", echo, args=([made, x.as_subclass(Labelled), Weight(x.detach())],))
        assert [type(each) for each in got] == [Pair, Labelled, Weight]
        assert not any(each.requires_grad for each in got)


def test_inside_a_pickle(pair: InProcessCluster) -> None:
    x = leaf(3, 2)
    with pair[0].as_current(), dist_autograd.context() as context_id:
        got = rpc.rpc_sync("worker1", echo, args=(Holder([Both.apply(x), (x * 2).as_subclass(Labelled)]),)).value  # type: ignore[no-untyped-call]
        assert [type(each) for each in got] == [Pair, Labelled]
        loss = Sum.apply(got[0]).sum() + got[1].as_subclass(Tensor).sum()  # type: ignore[no-untyped-call]
        context_id.backward(loss)
        assert context_id.gradients()[x].eq(3 * 11 + 2).all()
