"""RemoteModule: making one, calling it, gradients, sending it, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from networks import (
    Failing,
    Net,
    Two,
    ask,
    await_that,
    batch,
    equal_lists,
    given,
    gradients_in,
    grads,
    identity_of,
    linear,
    no_module,
    run_there,
    seeded,
    twins,
)
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import MisuseError, OptionError, UnknownWorkerError, UnsendableError
from backhaul.nn import RemoteModule
from backhaul.rpc import RRef
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.usefixtures("three")


@pytest.fixture(params=["worker1/cpu", "rank:2", "worker0"])
def where(request: pytest.FixtureRequest) -> str:
    """The module is on another worker, or on the caller itself."""
    return str(request.param)


def test_the_attributes() -> None:
    m = RemoteModule("rank:1/cpu", nn.Linear, (3, 4), {"bias": False})
    assert (m.on, m.device, m.is_scriptable, m.training) == ("worker1", "cpu", False, True)
    assert m.get_module_rref() is m.module_rref
    assert m.module_rref.owner_name() == "worker1"
    assert isinstance(m, nn.Module)
    assert repr(m) == "RemoteModule(Linear on worker1/cpu)"
    assert repr(nn.Sequential(nn.ReLU(), m)).splitlines()[2] == "  (1): RemoteModule(Linear on worker1/cpu)"
    assert m.module_rref.rpc_sync().extra_repr() == "in_features=3, out_features=4, bias=False"


def test_outputs(where: str) -> None:
    m, local = twins(1, where, Net)
    for seed in range(3):
        x = batch(5, 4, seed=seed)
        assert torch.equal(m(x), local(x))
        assert torch.equal(m.forward(x, shift=batch(4)), local(x, shift=batch(4)))
        assert torch.equal(m.forward_async(x, 2.0).wait(), local(x, 2.0))


def test_values_of_other_kinds() -> None:
    m = RemoteModule("worker1", Two)
    x, y = m(batch(2, 4), batch(2, 4, seed=8))
    assert x.shape == y.shape == (2, 4)
    echo = RemoteModule("worker1", Echo)
    assert echo({"a": [1, None]}, key="b") == (({"a": [1, None]},), {"key": "b"})


class Echo(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_gradients(where: str) -> None:
    """Gradients of the module, of the input, and of the layers before and after."""
    m, local = twins(2, where, Net)
    before, x = seeded(3, linear), batch(5, 4).requires_grad_()
    local(before(x)).square().sum().backward()
    expected = [x.grad, *grads(before), *grads(local)]
    with dist_autograd.context() as context_id:
        loss = m(before(x)).square().sum()
        context_id.backward(loss)
        mine = context_id.gradients()
        got = [mine[x], *gradients_in(before, context_id), *ask(m, gradients_in, context_id)]
    assert equal_lists(got, expected)


def test_gradients_of_several_calls_at_once() -> None:
    m, local = twins(2, "worker1", linear)
    x = batch(3, 4).requires_grad_()
    sum(local(x * i).sum() for i in range(3)).backward()
    with dist_autograd.context() as context_id:
        futures = [m.forward_async(x * i) for i in range(3)]
        context_id.backward(sum(future.wait().sum() for future in futures))
        got = [context_id.gradients()[x], *ask(m, gradients_in, context_id)]
    torch.testing.assert_close(got, [x.grad, *grads(local)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inside", [True, False])
def test_without_grad_nothing_is_recorded_there(mode: Any, inside: bool) -> None:
    m = RemoteModule("worker1", Remembers)
    x = batch(2, 4).requires_grad_()
    if inside:
        with dist_autograd.context(), mode():
            y = m(x)
    else:
        with mode():
            y = m(x)
    assert not y.requires_grad
    assert ask(m, remembered) is False
    with dist_autograd.context():
        m(x)
    assert ask(m, remembered) is True


class Remembers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self.recorded = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.recorded = y.grad_fn is not None
        return y


def remembered(module: Remembers) -> bool:
    return module.recorded


def test_a_function_may_make_the_module() -> None:
    m = RemoteModule("worker1", linear, kwargs={"size": 3})
    assert m(batch(2, 3)).shape == (2, 3)
    assert repr(m) == "RemoteModule(Linear on worker1/cpu)"


def test_a_lazy_module() -> None:
    m = RemoteModule("worker1", nn.LazyLinear, (3,))
    assert m(torch.ones(2, 4)).shape == (2, 3)
    assert m.state_dict()["weight"].shape == (3, 4)


def test_a_module_that_is_sent() -> None:
    local = linear()
    m = RemoteModule("worker1", given, (local,))
    assert torch.equal(m(batch(2, 4)), local(batch(2, 4)))
    assert ask(m, identity_of) != id(local)


def test_an_exception_of_the_constructor_is_raised_here() -> None:
    with pytest.raises(LookupError, match="not today") as caught:
        RemoteModule("worker1", Failing, ("not today",))
    assert "in __init__" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match="in_features"):
        RemoteModule("worker1", nn.Linear)


@pytest.mark.parametrize(
    ("module_cls", "args", "kwargs", "match"),
    [
        (no_module, None, None, r"no_module returned str: module_cls must be an nn\.Module class"),
        (dict, None, None, "dict returned dict"),
        (nn.ReLU(), None, None, "module_cls is a ReLU, not a class"),
        ("Linear", None, None, "module_cls must be an nn.Module class, or a function"),
        (nn.Linear, 3, None, r"args must be a tuple, as in args=\(20, 30\), not a int"),
        (nn.Linear, (3, 4), [1], "kwargs must be a dict, not a list"),
    ],
)
def test_misuse_of_the_constructor(module_cls: Any, args: Any, kwargs: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        RemoteModule("worker1", module_cls, args, kwargs)


def test_a_class_that_cannot_be_found_there() -> None:
    with pytest.raises(UnsendableError):
        RemoteModule("worker1", lambda: nn.Linear(1, 1))
    with pytest.raises(UnknownWorkerError, match="worker9"):
        RemoteModule("worker9", nn.ReLU)


def test_no_module_stays_of_a_constructor_that_failed(three: InProcessCluster) -> None:
    for module_cls in (Failing, no_module):
        with pytest.raises((LookupError, OptionError)):
            RemoteModule("worker1", module_cls)  # type: ignore[arg-type]
    await_that(lambda: three[1].references.counts()["values"] == 0, "no value is left")


def test_the_module_goes_with_its_last_remote_module(three: InProcessCluster) -> None:
    m = RemoteModule("worker1", nn.ReLU)
    second = RemoteModule.init_from_module_rref("worker1", m.module_rref)
    assert three[1].references.counts()["values"] == 1
    del m
    assert second(batch(1)).shape == (1,)
    del second
    await_that(lambda: three[1].references.counts()["values"] == 0, "the module is gone")


def test_an_exception_of_forward_is_raised_here() -> None:
    m = RemoteModule("worker1", linear)
    for call in (m, lambda x: m.forward_async(x).wait()):
        with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
            call(batch(2, 3))  # type: ignore[no-untyped-call]
        assert caught.value.__cause__.worker == "worker1"  # type: ignore[union-attr]
    assert m(batch(2, 4)).shape == (2, 4)


def test_an_unknown_attribute() -> None:
    m = RemoteModule("worker1", linear)
    with pytest.raises(
        AttributeError, match=r"'weight'. The module is on worker1.*get_parameter\(name\).*get_module_rref"
    ):
        m.weight  # noqa: B018
    assert not hasattr(m, "weight")


# Sending it.


def call_from_there(m: RemoteModule, x: Tensor) -> tuple[str, bool, Tensor]:
    return repr(m), m.training, m(x)


@pytest.mark.parametrize("to", ["worker1", "worker2", "worker0"])
def test_a_remote_module_is_sent_to_a_worker(to: str) -> None:
    """The receiver is a third worker, the owner, or the sender itself."""
    m, local = twins(1, "worker1", linear)
    m.eval()
    text, training, y = rpc.rpc_sync(to, call_from_there, args=(m, batch(2, 4)))
    assert (text, training) == (repr(m), False)
    assert torch.equal(y, local(batch(2, 4)))


def test_a_remote_module_is_trained_by_its_receiver() -> None:
    """worker2 calls a module on worker1 in worker0's context."""
    m, local = twins(1, "worker1", linear)
    local(batch(2, 4)).sum().backward()
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker2", run_there, args=(m, batch(2, 4)))
        context_id.backward(y.sum())
        got = ask(m, gradients_in, context_id)
    assert equal_lists(got, grads(local))


def test_a_remote_module_is_sent_inside_values_and_modules() -> None:
    m, local = twins(1, "worker1", linear)
    x = batch(2, 4)
    for value in ([{"m": m}], (m, m)):
        came = rpc.rpc_sync("worker2", given, args=(value,))
        back = came[0]["m"] if isinstance(came, list) else came[1]
        assert back is not m
        assert torch.equal(back(x), local(x))
        assert ask(back, identity_of) == ask(m, identity_of)
    parent = nn.Sequential(seeded(5, linear), m, nn.ReLU())
    got = rpc.rpc_sync("worker2", run_there, args=(parent, x))
    assert torch.equal(got, torch.relu(local(seeded(5, linear)(x))))
    inner = RemoteModule("worker2", nn.Sequential, (m, nn.ReLU()))
    assert torch.equal(inner(x), torch.relu(local(x)))


def test_no_copy_of_the_module_travels() -> None:
    m = RemoteModule("worker1", Unpicklable)
    assert rpc.rpc_sync("worker2", run_there, args=(m, batch(2))).tolist() == batch(2).tolist()


class Unpicklable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_remote_module_cannot_be_pickled_by_other_means() -> None:
    m = RemoteModule("worker1", linear)
    for value in (m, nn.Sequential(m)):
        with pytest.raises(UnsendableError, match=r"can only be (pickled when using RPC|sent to other workers)"):
            pickle.dumps(value)


class Doubling(RemoteModule):
    """A user's subclass."""

    factor = 2

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * self.factor


def test_a_subclass_stays_one() -> None:
    m = Doubling("worker1", seeded, (1, linear))
    m.factor = 3
    expected = seeded(1, linear)(batch(2, 4)) * 3
    assert torch.equal(m(batch(2, 4)), expected)
    assert torch.equal(rpc.rpc_sync("worker2", run_there, args=(m, batch(2, 4))), expected)
    for other in (copy.copy(m), copy.deepcopy(m)):
        assert type(other) is Doubling
        assert torch.equal(other(batch(2, 4)), expected)


def test_copies() -> None:
    """A copy is another RemoteModule for the same module; a deep copy is one for a copy of it, on the same worker."""
    m = RemoteModule("worker1", linear)
    assert ask(copy.copy(m), identity_of) == ask(m, identity_of)
    deep = copy.deepcopy(m)
    assert deep.on == "worker1"
    assert ask(deep, identity_of) != ask(m, identity_of)
    assert torch.equal(deep(batch(2, 4)), m(batch(2, 4)))
    m.apply(zero)
    assert not torch.equal(deep(batch(2, 4)), m(batch(2, 4)))


def zero(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()


def test_a_deep_copy_of_a_parent_keeps_what_is_shared() -> None:
    m = RemoteModule("worker1", linear)
    again = RemoteModule.init_from_module_rref("worker1", m.module_rref)
    parent = copy.deepcopy(nn.ModuleList([m, linear(), m, again]))
    assert parent[0] is parent[2]
    assert parent[3] is not parent[0]
    assert ask(parent[3], identity_of) == ask(parent[0], identity_of) != ask(m, identity_of)  # type: ignore[arg-type]


# From a reference.


def test_init_from_module_rref() -> None:
    m, local = twins(1, "worker1", linear)
    m.eval()
    for other in (
        RemoteModule.init_from_module_rref("worker1/cpu", m.get_module_rref()),
        rpc.rpc_sync("worker2", RemoteModule.init_from_module_rref, args=("rank:1", m.module_rref)),
    ):
        assert (repr(other), other.training) == (repr(m), False)
        assert torch.equal(other(batch(2, 4)), local(batch(2, 4)))
        assert ask(other, identity_of) == ask(m, identity_of)
    mine = linear()
    own = RemoteModule.init_from_module_rref("worker0", RRef(mine))
    assert ask(own, identity_of) == id(mine)


def test_a_reference_that_cannot_be_used() -> None:
    m = RemoteModule("worker1", linear)
    with pytest.raises(OptionError, match="remote_device is 'worker2/cpu', but the module is on 'worker1'"):
        RemoteModule.init_from_module_rref("worker2/cpu", m.module_rref)
    with pytest.raises(OptionError, match=r"must be an RRef to an nn\.Module"):
        RemoteModule.init_from_module_rref("worker1", m)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"refers to a str, which is not an nn\.Module"):
        RemoteModule.init_from_module_rref("worker1", rpc.remote("worker1", no_module))  # type: ignore[arg-type]
    with pytest.raises(LookupError):
        RemoteModule.init_from_module_rref("worker1", rpc.remote("worker1", Failing))


def test_two_remote_modules_of_one_module_share_its_state() -> None:
    m = RemoteModule("worker1", linear)
    other = rpc.rpc_sync("worker2", given, args=(m,))
    other.apply(zero)
    assert m(batch(2, 4)).abs().sum() == 0


# What it refuses.


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda m: m.register_parameter("p", nn.Parameter(torch.ones(1))), "register_parameter"),
        (lambda m: m.register_buffer("b", torch.ones(1)), "register_buffer"),
        (lambda m: m.add_module("c", nn.ReLU()), "add_module"),
        (lambda m: m.register_module("c", nn.ReLU()), "register_module"),
        (lambda m: setattr(m, "p", nn.Parameter(torch.ones(1))), "setting 'p'"),
        (lambda m: setattr(m, "b", nn.Buffer(torch.ones(1))), "setting 'b'"),
        (lambda m: setattr(m, "c", nn.ReLU()), "setting 'c'"),
    ],
)
def test_a_remote_module_takes_no_parameters_of_its_own(act: Any, what: str) -> None:
    m = RemoteModule("worker1", linear)
    with pytest.raises(MisuseError, match=rf"{what} is not possible on a RemoteModule.*in module_cls"):
        act(m)
    assert not m._parameters
    assert not m._buffers
    assert not m._modules


def test_other_operations_that_are_refused() -> None:
    m = RemoteModule("worker1", linear)
    with pytest.raises(MisuseError, match="share_memory is not for a RemoteModule"):
        m.share_memory()
    with pytest.raises(MisuseError, match="use register_full_backward_hook"):
        m.register_backward_hook(print)


# As a part of a module of this process.


def test_modules_of_a_parent() -> None:
    m = RemoteModule("worker1", linear)
    parent = nn.Sequential(nn.ReLU(), nn.Sequential(m, m))
    assert [name for name, _ in parent.named_modules()] == ["", "0", "1", "1.0"]
    assert parent.get_submodule("1.1") is m
    assert [name for name, _ in m.named_modules(prefix="x")] == ["x"]
    assert list(m.children()) == []


# A device other than the CPU. This machine may have none, so "meta" stands for one.


def test_another_device() -> None:
    m = RemoteModule("worker1/meta", linear)
    assert m.device == "meta"
    assert repr(m) == "RemoteModule(Linear on worker1/meta)"
    assert [rref.rpc_sync().size() for rref in m.remote_parameters()] == [(4, 4), (4,)]
    with pytest.raises(NotImplementedError, match="meta tensor"):  # a meta tensor has no data to copy back to the CPU
        m(batch(2, 4))
    shape = RemoteModule.init_from_module_rref("worker1", rpc.remote("worker1", ShapeOf))
    assert shape(batch(2, 4)) == ("meta", (2, 4))


class ShapeOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("where", torch.zeros(1, device="meta"))

    def forward(self, x: Tensor) -> Any:
        return x.device.type, tuple(x.shape)
