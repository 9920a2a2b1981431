"""Parameters and buffers of remote modules: references, in the order of the same model in one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from networks import Net, ask, linear, seeded, twins
from torch import nn

from backhaul import rpc
from backhaul.errors import OptionError
from backhaul.nn import Pipeline, RemoteModule, parameter_rrefs
from backhaul.rpc import RRef
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.usefixtures("three")


def values(rrefs: list[RRef[Any]]) -> list[Any]:
    return [rref.to_here() for rref in rrefs]


def same(named: list[tuple[str, RRef[Any]]], expected: list[tuple[str, torch.Tensor]]) -> bool:
    return [name for name, _ in named] == [name for name, _ in expected] and all(
        torch.equal(rref.to_here(), value) and type(rref.to_here()) is type(value)
        for (_, rref), (_, value) in zip(named, expected, strict=True)
    )


@pytest.mark.parametrize("remove_duplicate", [True, False])
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("prefix", ["", "a.b"])
def test_named_members(prefix: str, recurse: bool, remove_duplicate: bool) -> None:
    m, local = twins(1, "worker1", Net)
    for remote, twin in ((m.named_parameters, local.named_parameters), (m.named_buffers, local.named_buffers)):
        found: Any = list(remote(prefix, recurse, remove_duplicate))
        assert same(found, list(twin(prefix, recurse, remove_duplicate)))
        assert found
        assert all(rref.owner_name() == "worker1" for _, rref in found)


def test_lists_without_names() -> None:
    m, local = twins(1, "worker1", Net)
    for recurse in (True, False):
        expected = list(local.parameters(recurse))
        for found in (m.remote_parameters(recurse), list(m.parameters(recurse))):
            assert all(torch.equal(*each) for each in zip(values(found), expected, strict=True))
        buffers = values(list(m.buffers(recurse)))
        assert all(torch.equal(*each) for each in zip(buffers, local.buffers(recurse), strict=True))
    assert len(m.remote_parameters()) == 6
    assert list(RemoteModule("worker1", nn.ReLU).parameters()) == []


def test_a_reference_is_to_the_parameter_itself() -> None:
    m = RemoteModule("worker1", Net)
    for rref in (m.remote_parameters()[0], m.get_parameter("scale")):
        rref.rpc_sync().requires_grad_(False)
        rref.rpc_sync().fill_(7)
        assert m.state_dict()["scale"].eq(7).all()
        m.requires_grad_()
        m.apply(reset)
    m.get_buffer("norm.running_mean").rpc_sync().fill_(3)
    assert m.state_dict()["norm.running_mean"].eq(3).all()


def reset(module: nn.Module) -> None:
    if isinstance(module, Net):
        with torch.no_grad():
            module.scale.zero_()


def test_get_by_name() -> None:
    m, local = twins(1, "worker1", Net)
    assert torch.equal(m.get_parameter("first.bias").to_here(), local.get_parameter("first.bias"))
    assert torch.equal(m.get_buffer("norm.running_var").to_here(), local.get_buffer("norm.running_var"))
    for get, target in (
        (lambda model, name: model.get_parameter(name), "first.nothing"),
        (lambda model, name: model.get_parameter(name), "norm.running_var"),
        (lambda model, name: model.get_buffer(name), "first.bias"),
        (lambda model, name: model.get_buffer(name), "third.x"),
    ):
        texts = []
        for model in (m, local):
            with pytest.raises(AttributeError) as caught:
                get(model, target)  # type: ignore[no-untyped-call]
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


# parameter_rrefs.


def owners(rrefs: list[RRef[Any]]) -> str:
    return " ".join(rref.owner_name().removeprefix("worker") for rref in rrefs)


def check(rrefs: list[RRef[Any]], expected: list[nn.Parameter]) -> None:
    assert [value.shape for value in values(rrefs)] == [parameter.shape for parameter in expected]
    assert all(torch.equal(*each) for each in zip(values(rrefs), expected, strict=True))


def test_the_parameters_of_a_mixed_model() -> None:
    first, first_local = twins(1, "worker1", Net)
    second, second_local = twins(2, "worker2", linear)
    own, own_local = twins(3, "worker0", linear)
    parts = [seeded(4, linear), first, nn.ReLU(), nn.Sequential(second, seeded(5, linear)), own, nn.BatchNorm1d(3)]
    model = nn.Sequential(*parts)
    twin = nn.Sequential(
        parts[0], first_local, nn.ReLU(), nn.Sequential(second_local, seeded(5, linear)), own_local, nn.BatchNorm1d(3)
    )
    rrefs = parameter_rrefs(model)
    check(rrefs, list(twin.parameters()))
    assert owners(rrefs) == "0 0 1 1 1 1 1 1 2 2 0 0 0 0 0 0"
    assert rrefs[0].local_value() is parts[0].weight
    check(parameter_rrefs(first), list(first_local.parameters()))
    check(
        parameter_rrefs(second, parts[0], first),
        [*second_local.parameters(), *parts[0].parameters(), *first_local.parameters()],
    )
    check(parameter_rrefs(), [])
    pipeline = Pipeline([first, second])
    check(parameter_rrefs(pipeline), [*first_local.parameters(), *second_local.parameters()])
    check(pipeline.remote_parameters(), [*first_local.parameters(), *second_local.parameters()])


def test_shared_parameters_come_once() -> None:
    """Parameters are shared by modules, by two RemoteModules of one module, or by different modules of one worker."""
    local = linear()
    tied = linear()
    tied.weight = local.weight
    m = RemoteModule("worker1", linear)
    again = RemoteModule.init_from_module_rref("worker1", m.module_rref)
    relative = RemoteModule("worker1", tied_to, (m.module_rref,))
    own = RemoteModule.init_from_module_rref("worker0", RRef(local))
    model = nn.ModuleList([m, local, tied, again, m, relative, own])
    twins_of = [value.shape for value in values(parameter_rrefs(model))]
    assert twins_of == [(4, 4), (4,), (4, 4), (4,), (4,), (4,)]
    assert owners(parameter_rrefs(model)) == "1 1 0 0 0 1"
    assert owners(parameter_rrefs(m, again, relative)) == "1 1 1"
    names = [name for name, _ in Pipeline([m, again]).named_parameters()]
    assert names == ["0.weight", "0.bias"]
    names = [name for name, _ in Pipeline([m, again]).named_parameters("p", remove_duplicate=False)]
    assert names == ["p.0.weight", "p.0.bias", "p.1.weight", "p.1.bias"]


def tied_to(rref: RRef[nn.Linear]) -> nn.Linear:
    module = linear()
    module.weight = rref.local_value().weight
    return module


def test_remote_modules_inside_of_remote_modules() -> None:
    inner, inner_local = twins(1, "worker2", Net)
    m = RemoteModule("worker1", Wrapper, (inner,))
    twin = ask(m, without_inner, inner_local)
    check(parameter_rrefs(m), list(twin.parameters()))
    assert owners(parameter_rrefs(m)) == "1 1 2 2 2 2 2 2 1 1"
    assert same(list(m.named_parameters("x")), list(twin.named_parameters("x")))
    assert same(list(m.named_buffers()), list(twin.named_buffers()))
    assert [name for name, _ in m.named_parameters(recurse=False)] == []
    assert owners(parameter_rrefs(inner, m)) == "2 2 2 2 2 2 1 1 1 1"


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = linear()
        self.inner = inner
        self.after = linear()


def without_inner(module: Wrapper, inner: nn.Module) -> Wrapper:
    """The same module in one process."""
    twin = Wrapper(inner)
    twin.before, twin.after = module.before, module.after
    return twin


def test_the_workers_are_asked_at_once(three: InProcessCluster) -> None:
    """Each remote module takes one call, and all calls are sent before the first wait."""
    parts = [RemoteModule(f"worker{1 + i}", Meets) for i in range(2)]
    for part in parts:
        ask(part, meet)
    calls: list[Any] = []
    three[0].before_call.append(lambda *call: calls.append(call))
    assert owners(parameter_rrefs(nn.ModuleList(parts))) == "1 2"
    assert len(calls) == 2


class Meets(nn.Linear):
    """Lists its parameters only when another module does so at the same time."""

    meeting: threading.Barrier | None = None

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        if self.meeting is not None:
            self.meeting.wait(10)
        return super().named_parameters(*args, **kwargs)


MEETING = threading.Barrier(2)


def meet(module: Meets) -> None:
    module.meeting = MEETING


@pytest.mark.parametrize("wrong", [3, "worker1", [nn.ReLU()], nn.ReLU().parameters(), None])
def test_parameter_rrefs_takes_only_modules(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"parameter_rrefs takes modules, as in parameter_rrefs\(encoder, decoder\)"):
        parameter_rrefs(wrong)


def test_listed_on_another_worker() -> None:
    """The references go to the worker that asks for them."""
    m = RemoteModule("worker1", linear)
    rrefs = rpc.rpc_sync("worker2", parameter_rrefs, args=(nn.Sequential(m),))
    assert owners(rrefs) == "1 1"
    assert [rref.to_here().shape for rref in rrefs] == [(4, 4), (4,)]
