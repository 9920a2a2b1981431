"""Modes, dtypes, requires_grad, zero_grad, apply: the real module changes as a module in this process would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import (
    Net,
    ask,
    batch,
    dtypes,
    equal_lists,
    fill,
    frozen,
    gradients_in,
    grads,
    linear,
    modes,
    set_grads,
    strides,
    twins,
)
from torch import nn

import backhaul.autograd as dist_autograd
from backhaul.errors import UnsendableError
from backhaul.nn import Pipeline, RemoteModule
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.usefixtures("three")


class Noisy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(linear(), nn.Dropout(0.5), nn.BatchNorm1d(4, dtype=torch.float64))


def both(m: RemoteModule, local: nn.Module, through_parent: bool) -> tuple[nn.Module, nn.Module]:
    """The module and its twin, or their parents."""
    if not through_parent:
        return m, local
    return nn.Sequential(linear(), nn.Sequential(m)), nn.Sequential(linear(), nn.Sequential(local))


through_parent = pytest.mark.parametrize("through_parent", [False, True])


@through_parent
def test_train_and_eval(through_parent: bool) -> None:
    m, local = twins(1, "worker1", Noisy)
    mine, theirs = both(m, local, through_parent)
    for act in ("train", "eval", "train", "eval"):
        for model in (mine, theirs):
            assert getattr(model, act)() is model
        assert m.training is local.training is (act == "train")
        assert ask(m, modes) == modes(local)
        got = []
        for model in (m, local):
            torch.manual_seed(3)
            got.append(model(batch(5, 4)))
        assert torch.equal(*got)
    assert ask(m, modes) == [False] * 4
    mine.train(False)
    mine.train(mode=True)
    assert ask(m, modes) == [True] * 4


def test_an_invalid_mode_is_refused() -> None:
    m = RemoteModule("worker1", Noisy)
    with pytest.raises(ValueError, match="expected to be boolean"):
        m.train("yes")  # type: ignore[arg-type]
    assert ask(m, modes) == [True] * 4


def test_gradients_with_dropout_and_batch_norm() -> None:
    m, local = twins(1, "worker1", Noisy)
    x = batch(5, 4).requires_grad_()
    torch.manual_seed(5)
    local(x).pow(3).sum().backward()
    with dist_autograd.context() as context_id:
        torch.manual_seed(5)
        context_id.backward(m(x).pow(3).sum())
        got = [context_id.gradients()[x], *ask(m, gradients_in, context_id)]
    assert equal_lists(got, [x.grad, *grads(local)])


CONVERSIONS: dict[str, Any] = {
    "half": lambda model: model.half(),
    "float": lambda model: model.float(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "to(dtype)": lambda model: model.to(torch.float16),
    "to(dtype=)": lambda model: model.to(dtype=torch.float32),
    "to(device)": lambda model: model.to("cpu"),
    "to(device, dtype)": lambda model: model.to("cpu", torch.bfloat16),
    "to(device=, dtype=)": lambda model: model.to(device="cpu", dtype=torch.bfloat16),
    "to(tensor)": lambda model: model.to(torch.zeros(1, dtype=torch.float16)),
    "to(tensor=)": lambda model: model.to(tensor=torch.zeros(1, dtype=torch.float16)),
    "type(dtype)": lambda model: model.type(torch.float32),
    "type(str)": lambda model: model.type("torch.HalfTensor"),
    "cpu": lambda model: model.cpu(),
    "twice": lambda model: model.half().float(),
}


@through_parent
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS.keys())
def test_conversions(convert: Any, through_parent: bool) -> None:
    """Conversions change parameters, buffers and gradients. ``type`` converts integers too."""
    m, local = twins(1, "worker1", Net)
    ask(m, set_grads)
    set_grads(local)
    mine, theirs = both(m, local, through_parent)
    rrefs = m.remote_parameters()
    for model in (mine, theirs):
        assert convert(model) is model
    assert ask(m, dtypes) == dtypes(local)
    assert equal_lists(ask(m, grads), grads(local))
    state, expected = m.state_dict(), local.state_dict()
    assert equal_lists(list(state.values()), list(expected.values()))
    assert [rref.to_here().dtype for rref in rrefs] == [parameter.dtype for parameter in local.parameters()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_converted_module_computes_as_in_one_process(dtype: torch.dtype) -> None:
    m, local = twins(1, "worker1", linear)
    m.to(dtype)
    x = batch(3, 4, dtype=dtype)
    assert torch.equal(m(x), local.to(dtype)(x))


@through_parent
def test_a_dtype_that_modules_do_not_take(through_parent: bool) -> None:
    m, local = twins(1, "worker1", Net)
    mine, theirs = both(m, local, through_parent)
    for model in (mine, theirs):
        with pytest.raises(TypeError, match="only accepts floating point or complex"):
            model.to(torch.int32)
    assert ask(m, dtypes) == dtypes(local)


@through_parent
def test_memory_formats(through_parent: bool) -> None:
    m, local = twins(1, "worker1", nn.Conv2d, 3, 4, 2)
    mine, theirs = both(m, local, through_parent)
    for format in (torch.channels_last, torch.contiguous_format):
        for model in (mine, theirs):
            model.to(memory_format=format)  # type: ignore[call-overload]
        assert ask(m, strides) == strides(local)


@through_parent
@pytest.mark.parametrize("format", [torch.channels_last, torch.channels_last_3d])
def test_memory_formats_of_tensors_that_have_none(format: torch.memory_format, through_parent: bool) -> None:
    """A module with tensors of five dimensions refuses a format for four, and the reverse."""
    m, local = twins(1, "worker1", nn.Conv2d if format is torch.channels_last_3d else nn.Conv3d, 3, 4, 2)
    for model in both(m, local, through_parent):
        with pytest.raises(RuntimeError, match="required rank"):
            model.to(memory_format=format)  # type: ignore[call-overload]
    assert ask(m, strides) == strides(local)


def test_a_parent_s_moves_leave_the_module_where_it_is() -> None:
    """Devices of this process are not devices of the worker. This machine may have no GPU, so "meta" stands for one."""
    m, local = twins(1, "worker1", Net)
    parent = nn.Sequential(m)
    parent.to("meta")
    parent.to("meta", torch.float32)
    assert m.device == "cpu"
    assert torch.equal(m(batch(3, 4, dtype=torch.float32)), local.float()(batch(3, 4, dtype=torch.float32)))


def test_a_parent_s_moves_that_fail_do_so_here_too() -> None:
    parent = nn.Sequential(RemoteModule("worker1", Net))
    with pytest.raises(Exception, match=r"(?i)cuda"):
        parent.cuda()


def test_moves_on_the_worker() -> None:
    m = RemoteModule("worker1", Net)
    assert m.to("meta") is m
    assert m.device == "meta"
    assert repr(m) == "RemoteModule(Net on worker1/meta)"
    m.to_empty(device="cpu")
    assert m.device == "cpu"
    for act in (m.cuda, m.xpu):
        with pytest.raises(Exception, match=r"(?i)cuda|xpu"):
            act()


def test_conversions_that_change_nothing_make_no_call(three: InProcessCluster) -> None:
    calls: list[Any] = []
    parent = nn.Sequential(RemoteModule("worker1", Net))
    three[0].before_call.append(lambda *call: calls.append(call))
    parent.to("cpu")
    parent.share_memory()
    assert calls == []
    parent.half()
    assert len(calls) == 1


def test_requires_grad() -> None:
    m, local = twins(1, "worker1", Net)
    for flag in (False, True):
        for model in (m, local):
            assert model.requires_grad_(flag) is model
        assert ask(m, frozen) == frozen(local) == [not flag] * 6
    m.requires_grad_(False)
    with dist_autograd.context():
        assert not m(batch(3, 4)).requires_grad
        assert m(batch(3, 4).requires_grad_()).requires_grad


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    m, local = twins(1, "worker1", Net)
    ask(m, set_grads)
    set_grads(local)
    assert any(grad is not None for grad in ask(m, grads))
    for model in (m, local):
        model.zero_grad(set_to_none)
    assert equal_lists(ask(m, grads), grads(local))


@through_parent
def test_apply(through_parent: bool) -> None:
    m, local = twins(1, "worker1", Net)
    mine, theirs = both(m, local, through_parent)
    for model in (mine, theirs):
        assert model.apply(fill) is model
    got = m.state_dict()
    assert got["first.weight"].eq(0.5).all()
    assert equal_lists(list(got.values()), list(local.state_dict().values()))


def test_a_function_that_cannot_be_sent_is_not_applied() -> None:
    m = RemoteModule("worker1", Net)
    with pytest.raises(UnsendableError):
        m.apply(lambda module: None)


def test_a_remote_module_inside_of_a_remote_module_changes_too() -> None:
    inner, local = twins(1, "worker2", Net)
    m = RemoteModule("worker1", nn.Sequential, (inner,))
    ask(inner, set_grads)
    m.eval()
    m.half()
    m.requires_grad_(False)
    m.zero_grad()
    m.apply(fill)
    local.eval().half().requires_grad_(False).apply(fill)
    assert ask(inner, modes) == modes(local)
    assert ask(inner, dtypes) == dtypes(local)
    assert ask(inner, frozen) == frozen(local)
    assert ask(inner, grads) == [None] * 6
    assert equal_lists(list(inner.state_dict().values()), list(local.state_dict().values()))


def test_each_change_is_one_call(three: InProcessCluster) -> None:
    m = RemoteModule("worker1", Net)
    other = Net()
    calls: list[Any] = []
    three[0].before_call.append(lambda *call: calls.append(call))
    acts: list[Any] = [
        lambda: m(batch(3, 4)),
        lambda: m.forward_async(batch(3, 4)).wait(),
        m.train,
        m.eval,
        m.half,
        m.double,
        lambda: m.to("cpu"),
        m.requires_grad_,
        m.zero_grad,
        lambda: m.apply(fill),
        m.state_dict,
        lambda: m.load_state_dict(other.state_dict()),
        m.remote_parameters,
        lambda: list(m.named_buffers()),
        lambda: m.get_parameter("scale"),
        lambda: RemoteModule("worker1", Net),
        lambda: RemoteModule.init_from_module_rref("worker1", m.module_rref),
    ]
    for act in acts:
        act()
    assert len(calls) == len(acts)
    assert {call[0].name for call in calls} == {"worker1"}


@pytest.mark.parametrize("piped", [False, True])
def test_autocast(piped: bool) -> None:
    """As in one process: products in bfloat16, gradients of the parameters in their own dtype."""
    m, local = twins(1, "worker1", nn.Linear, 4, 4)
    model = Pipeline([m], 1) if piped else m
    x = batch(3, 4, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = local(x)
        with torch.autocast("cpu", enabled=False):
            assert model(x).dtype is torch.float32
        with dist_autograd.context() as context_id:
            y = model(x)
            assert y.dtype is torch.bfloat16
            assert torch.equal(y, expected)
            context_id.backward(y.float().pow(2).sum())
            got = [context_id.gradients()[x], *ask(m, gradients_in, context_id)]
    expected.float().pow(2).sum().backward()
    assert equal_lists(got, [x.grad, *grads(local)])
    assert model(x).dtype is torch.float32
