"""Remote modules between real processes: training, and workers that die."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from networks import Net, ask, batch, equal_lists, fill, given, gradients_in, grads, linear, run_there, seeded, twins
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import WorkerLostError
from backhaul.nn import Pipeline, RemoteModule, parameter_rrefs
from crew import Crew

_kept: dict[str, Any] = {}


def train_and_compare() -> dict[str, bool]:
    """Three SGD steps of a model over three processes, and of the same model here. Returns what is equal."""
    first, first_local = twins(1, "worker1", Net)
    second, second_local = twins(2, "worker2", linear)
    middle = seeded(3, linear)
    model = nn.Sequential(first, middle, nn.Tanh(), second)
    local = nn.Sequential(first_local, seeded(3, linear), nn.Tanh(), second_local)
    same: dict[str, bool] = {"parameters": len(parameter_rrefs(model)) == len(list(local.parameters()))}
    for step in range(3):
        x = batch(6, 4, seed=step)
        local.zero_grad()
        expected = local(x)
        expected.pow(2).sum().backward()
        with dist_autograd.context() as context_id:
            y = model(x)
            context_id.backward(y.pow(2).sum())
            found = [
                *ask(first, gradients_in, context_id),
                *gradients_in(middle, context_id),
                *ask(second, gradients_in, context_id),
            ]
            same[f"output {step}"] = torch.equal(y, expected)
            same[f"gradients {step}"] = equal_lists(found, grads(local))
            for part in (first, second):
                ask(part, descend, context_id)
            descend(middle, context_id)
        with torch.no_grad():
            for parameter in local.parameters():
                parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]
        state, twin = model.state_dict(), local.state_dict()
        same[f"state {step}"] = list(state) == list(twin) and equal_lists(list(state.values()), list(twin.values()))
    model.eval().double().apply(fill)
    local.eval().double().apply(fill)
    same["in the end"] = torch.equal(model(batch(6, 4)), local(batch(6, 4)))
    return same


def descend(module: nn.Module, context_id: int) -> None:
    found = dist_autograd.get_gradients(context_id)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.sub_(0.1 * found[parameter])


def where_it_runs() -> list[Any]:
    """A module that returns its process id, called from here and through a third worker."""
    m = RemoteModule("worker1", Tells)
    pid = rpc.rpc_sync("worker1", os.getpid)
    return [m(0) == pid, rpc.rpc_sync("worker2", run_there, args=(m, 0)) == pid, pid != os.getpid()]


class Tells(nn.Module):
    def forward(self, _: Any) -> int:
        return os.getpid()


def keep() -> None:
    _kept["m"] = RemoteModule("worker1", Net)
    _kept["parent"] = nn.Sequential(linear(), _kept["m"])
    _kept["pipeline"] = Pipeline([RemoteModule("worker2", linear), _kept["m"]], 2)
    _kept["handle"] = _kept["m"].register_forward_hook(hook)


def hook(module: nn.Module, args: Any, output: Tensor) -> None:
    """Notes the call, and changes nothing."""


def lost(act: Callable[[], Any]) -> str:
    try:
        act()
    except WorkerLostError as error:
        return error.worker
    return "nobody"


def uses() -> dict[str, str]:
    """The name of the worker that the error calls lost when the module on worker1 is used."""
    m, parent = _kept["m"], _kept["parent"]
    acts: dict[str, Callable[[], Any]] = {
        "call": lambda: m(batch(3, 4)),
        "async": lambda: m.forward_async(batch(3, 4)).wait(),
        "parent": lambda: parent(batch(3, 4)),
        "pipeline": lambda: _kept["pipeline"](batch(4, 4)),
        "state_dict": parent.state_dict,
        "load_state_dict": lambda: parent.load_state_dict(nn.Sequential(linear(), Net()).state_dict()),
        "train": parent.eval,
        "double": parent.double,
        "to": lambda: m.to("cpu"),
        "parameters": m.remote_parameters,
        "all parameters": lambda: parameter_rrefs(parent),
        "hook": lambda: m.register_forward_hook(hook),
        "remove": _kept["handle"].remove,
        "send": lambda: rpc.rpc_sync("worker2", given, args=(m,)),
        "make": lambda: RemoteModule("worker1", Net),
        "again": lambda: RemoteModule.init_from_module_rref("worker1", m.module_rref),
    }
    return {name: lost(act) for name, act in acts.items()}


def call_while_it_dies() -> str:
    return lost(lambda: RemoteModule("worker2", Dies)(0))


class Dies(nn.Module):
    def forward(self, _: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_processes() -> None:
    """One group of processes serves all checks, because starting processes is slow."""
    with Crew(3) as crew:
        same = crew[0].run(train_and_compare)
        assert [what for what, is_so in same.items() if not is_so] == []
        assert len(same) == 11
        assert all(crew[0].run(where_it_runs))
        crew[0].run(keep)
        assert set(crew[0].run(uses).values()) == {"nobody"}
        crew[1].kill()
        found = crew[0].run(uses)
        assert {name: who for name, who in found.items() if who != "worker1"} == {}
        assert crew[0].run(call_while_it_dies) == "worker2"
