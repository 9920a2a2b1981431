"""All kinds of objects in a checkpoint, and their combinations."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_runs import assert_equal, block

from backhaul import checkpoint, rpc
from backhaul.errors import MisuseError, OptionError, PartialError
from backhaul.nn import Pipeline, RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer, GradScaler
from backhaul.testing import InProcessCluster


class Outer(nn.Module):
    """A module with parameters of its own, between modules that may live elsewhere."""

    def __init__(self, *inner: nn.Module | None) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(3))
        self.inner = nn.ModuleList(inner)  # type: ignore[arg-type]  # None is a module that is not there
        self.last = nn.Linear(2, 2)


def outer_with_remote(worker: str) -> nn.Module:
    return Outer(nn.Linear(1, 2), RemoteModule(worker, nn.Linear, (3, 2)))


def outer_alone() -> nn.Module:
    return Outer(nn.Linear(1, 2), nn.Linear(3, 2))


class Counting(nn.Module):
    """State that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.steps: dict[str, Any] = {}

    def get_extra_state(self) -> Any:
        return self.steps

    def set_extra_state(self, state: Any) -> None:
        self.steps = state

    def set_steps(self, steps: dict[str, Any]) -> None:
        self.steps = steps

    def get_steps(self) -> dict[str, Any]:
        return self.steps


class Versioned(nn.Module):
    """A module whose parameter had the opposite sign in version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)


class Renaming(nn.Module):
    """Saves its children's tensors under other names, so it must see all of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_state_dict_post_hook(_rename)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_rename_back)  # type: ignore[no-untyped-call]


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}inner.")]:
        state[f"{prefix}shown.{key.removeprefix(prefix + 'inner.')}"] = state.pop(key)


def _rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}shown.")]:
        state[f"{prefix}inner.{key.removeprefix(prefix + 'shown.')}"] = state.pop(key)


class Thermometer:
    """Not a torch object, but has a state."""

    def __init__(self, degrees: Any) -> None:
        self.degrees = degrees

    def state_dict(self) -> dict[str, Any]:
        return {"degrees": self.degrees}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.degrees = state["degrees"]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in module.state_dict().items()}


def round_trip(saved: nn.Module, into: nn.Module, alone: nn.Module, path: Path) -> None:
    """Load a saved model into another one, and in one process, with the keys of one process."""
    assert list(saved.state_dict()) == list(alone.state_dict())
    checkpoint.save({"model": saved}, path)
    checkpoint.load(path, {"model": into})
    assert_equal(state_of(into), state_of(saved))
    found = checkpoint.read(path)["model"]
    assert list(found) == list(alone.state_dict())
    alone.load_state_dict(found)
    assert_equal(state_of(alone), state_of(saved))


def test_a_remote_module_by_itself(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        saved, into = RemoteModule("worker1", block, (2, 3, 0)), RemoteModule("worker2", block, (2, 3, 1))
        round_trip(saved, into, block(2, 3, 2), tmp_path)


def test_a_remote_module_of_this_worker(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        saved, into = RemoteModule("worker0", block, (2, 3, 0)), RemoteModule("worker0", block, (2, 3, 1))
        round_trip(saved, into, block(2, 3, 2), tmp_path)


def test_a_pipeline(trio: InProcessCluster, tmp_path: Path) -> None:
    def pipeline(*workers: str) -> Pipeline:
        return Pipeline([RemoteModule(worker, block, (2, 2, seed)) for seed, worker in enumerate(workers)], chunks=2)

    with trio[0].as_current():
        saved, into = pipeline("worker1", "worker2", "worker1"), pipeline("worker0", "worker1", "worker2")
        alone = nn.Sequential(*(block(2, 2, 9) for _ in range(3)))
        round_trip(saved, into, alone, tmp_path)
        x = torch.randn(6, 2)
        saved.eval(), into.eval(), alone.eval()
        assert torch.equal(saved(x), into(x))
        assert torch.equal(saved(x), torch.cat([alone(half) for half in x.chunk(2)]))


def test_remote_modules_within_remote_modules(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        saved = Outer(RemoteModule("worker1", outer_with_remote, ("worker2",)), outer_with_remote("worker1"))
        into = Outer(outer_with_remote("worker2"), RemoteModule("worker2", outer_with_remote, ("worker0",)))
        round_trip(saved, into, Outer(outer_alone(), outer_alone()), tmp_path)
        (data,) = tmp_path.glob("data-*")
        assert "inner.0.inner.1.weight" in torch.load(data / "worker2.pt")["model"]  # in its worker's file
        assert "inner.0.inner.1.weight" not in torch.load(data / "worker1.pt")["model"]


def test_a_remote_module_that_comes_twice(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        shared = RemoteModule("worker1", nn.Linear, (2, 2))
        alone = nn.Linear(2, 2)
        into = Outer(RemoteModule("worker2", nn.Linear, (2, 2)), None, RemoteModule("worker1", nn.Linear, (2, 2)))
        round_trip(Outer(shared, None, shared), into, Outer(alone, None, alone), tmp_path)


def test_extra_state(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        saved, into = RemoteModule("worker1", Counting), RemoteModule("worker2", Counting)
        steps = {"count": 7, "seen": torch.arange(3), "names": ["a", "b"]}
        saved.module_rref.rpc_sync().set_steps(steps)
        round_trip(saved, into, Counting(), tmp_path)
        assert_equal(into.module_rref.rpc_sync().get_steps(), steps)
        local = Outer(Counting(), into)
        checkpoint.save({"model": local}, tmp_path)
        again = Outer(saved, Counting())
        checkpoint.load(tmp_path, {"model": again})
        assert_equal(state_of(again), state_of(local))


def test_versions_of_modules_are_kept(trio: InProcessCluster, tmp_path: Path) -> None:
    """On any worker: without its version, the module would change the sign."""
    with trio[0].as_current():
        saved, into = RemoteModule("worker1", Versioned), RemoteModule("worker2", Versioned)
        round_trip(Outer(saved, Versioned()), Outer(Versioned(), into), Outer(Versioned(), Versioned()), tmp_path)


def test_a_module_that_renames_the_keys_of_remote_modules(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        saved = Outer(Renaming(RemoteModule("worker1", nn.Linear, (2, 3))), RemoteModule("worker2", nn.ReLU))
        into = Outer(Renaming(nn.Linear(2, 3)), nn.ReLU())
        back = Outer(Renaming(RemoteModule("worker2", nn.Linear, (2, 3))), RemoteModule("worker1", nn.ReLU))
        round_trip(saved, into, Outer(Renaming(nn.Linear(2, 3)), nn.ReLU()), tmp_path)
        assert "inner.0.shown.weight" in checkpoint.read(tmp_path)["model"]
        checkpoint.load(tmp_path, {"model": back})
        assert_equal(state_of(back), state_of(saved))


def test_a_lazy_module_takes_the_shapes_that_come(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        saved = RemoteModule("worker1", nn.Linear, (5, 3))
        checkpoint.save({"model": saved}, tmp_path)
        into = RemoteModule("worker2", nn.LazyLinear, (3,))
        checkpoint.load(tmp_path, {"model": into})
        assert_equal(state_of(into), state_of(saved))


def test_types_are_converted_as_torch_does(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        saved, into = RemoteModule("worker1", nn.Linear, (2, 2)), RemoteModule("worker2", nn.Linear, (2, 2))
        into.double()
        checkpoint.save({"model": saved}, tmp_path)
        checkpoint.load(tmp_path, {"model": into})
        assert_equal(state_of(into), {key: value.double() for key, value in state_of(saved).items()})


def test_several_models_and_optimizers_share_a_file(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        saved = {f"model{number}": RemoteModule("worker1", block, (2, 3, number)) for number in range(3)}
        optimizers = {
            f"sgd{number}": DistributedOptimizer(torch.optim.SGD, parameter_rrefs(model), lr=number, momentum=0.9)
            for number, model in enumerate(saved.values())
        }
        checkpoint.save({**saved, **optimizers}, tmp_path)
        into = {f"model{number}": RemoteModule("worker2", block, (2, 3, 9)) for number in range(3)}
        checkpoint.load(tmp_path, into)
        assert_equal({name: state_of(each) for name, each in into.items()}, {n: state_of(m) for n, m in saved.items()})
        found = checkpoint.read(tmp_path)
        assert [found[f"sgd{number}"]["param_groups"][0]["lr"] for number in range(3)] == [0, 1, 2]


def test_an_optimizer_with_hooks_sees_its_whole_state(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        model = Outer(RemoteModule("worker1", nn.Linear, (2, 2)), RemoteModule("worker2", nn.Linear, (2, 2)))
        optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(model), lr=0.5)
        for parameter in parameter_rrefs(model):
            rpc.rpc_sync(parameter.owner(), fill_grad, args=(parameter,))
        optimizer.step()
        seen = []
        optimizer.register_state_dict_post_hook(lambda _, state: seen.append(sorted(state["state"])))
        checkpoint.save({"optimizer": optimizer}, tmp_path)
        assert seen == [list(range(7))]
        alone = torch.optim.Adam(Outer(nn.Linear(2, 2), nn.Linear(2, 2)).parameters(), lr=0.1)
        checkpoint.load(tmp_path, {"optimizer": alone})
        assert_equal(alone.state_dict(), optimizer.state_dict())
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(sorted(state["state"])))
        checkpoint.load(tmp_path, {"optimizer": optimizer})
        assert seen[-2:] == [list(range(7))] * 2


def fill_grad(parameter: rpc.RRef[Tensor]) -> None:
    value = parameter.local_value()
    value.grad = torch.ones_like(value)


def set_rate(local: rpc.RRef[Any], rate: float) -> None:
    local.local_value().optimizer.param_groups[0]["lr"] = rate


def test_options_that_a_worker_has_changed_itself(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        model = RemoteModule("worker1", nn.Linear, (2, 2))
        optimizer = DistributedOptimizer(torch.optim.SGD, parameter_rrefs(model), lr=0.5)
        (local,) = optimizer.remote_optimizers
        rpc.rpc_sync("worker1", set_rate, args=(local, 0.25))
        checkpoint.save({"optimizer": optimizer}, tmp_path)
        assert checkpoint.read(tmp_path)["optimizer"]["param_groups"][0]["lr"] == 0.25


def test_additions_of_an_optimizer_to_its_state_dict_are_kept(tmp_path: Path) -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)

    saved, into, loaded = optimizer(), optimizer(), []
    saved.register_state_dict_post_hook(lambda _, state: {**state, "remark": "mine"})
    into.register_load_state_dict_pre_hook(lambda _, state: loaded.append(state["remark"]))
    checkpoint.save({"sgd": saved}, tmp_path)
    checkpoint.load(tmp_path, {"sgd": into})
    assert loaded == ["mine"]
    assert checkpoint.read(tmp_path)["sgd"]["remark"] == "mine"


def test_an_optimizer_over_parameters_without_state(trio: InProcessCluster, tmp_path: Path) -> None:
    """A parameter that never had a gradient has none."""
    with trio[0].as_current():
        model = Outer(RemoteModule("worker1", nn.Linear, (2, 2)), None)
        optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(model))
        first = parameter_rrefs(model)[1]
        rpc.rpc_sync(first.owner(), fill_grad, args=(first,))
        optimizer.step()
        checkpoint.save({"optimizer": optimizer}, tmp_path)
        assert list(checkpoint.read(tmp_path)["optimizer"]["state"]) == [1]
        other = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(Outer(nn.Linear(2, 2), None)))
        checkpoint.load(tmp_path, {"optimizer": other})
        assert_equal(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
    ],
    ids=["MultiStepLR", "OneCycleLR", "ReduceLROnPlateau", "LambdaLR", "SequentialLR"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR of torch 2.8 and older itself gives it
def test_schedulers(make: Any, trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        model = RemoteModule("worker1", nn.Linear, (2, 2))

        def scheduler() -> Any:
            return make(DistributedOptimizer(torch.optim.SGD, parameter_rrefs(model), lr=0.5, momentum=0.5))

        saved, into = scheduler(), scheduler()
        args = (1.0,) if isinstance(saved, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()
        for _ in range(3):
            saved.optimizer.step()
            saved.step(*args)
        checkpoint.save({"scheduler": saved}, tmp_path)
        checkpoint.load(tmp_path, {"scheduler": into})
        assert into.get_last_lr() == saved.get_last_lr()
        assert into.last_epoch == saved.last_epoch == 3


def test_other_objects_with_a_state_dict(tmp_path: Path) -> None:
    scaler = GradScaler(init_scale=8.0)
    checkpoint.save({"scaler": scaler, "thermometer": Thermometer(21.5)}, tmp_path)
    into: dict[str, Any] = {"scaler": GradScaler(init_scale=2.0), "thermometer": Thermometer(0.0)}
    assert checkpoint.load(tmp_path, into) == {}
    assert into["scaler"].state_dict() == scaler.state_dict()
    assert into["thermometer"].state_dict() == {"degrees": 21.5}


def test_plain_values(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "epoch": 3,
        "best": 0.25,
        "name": "größer",
        "none": None,
        "flags": [True, False],
        "nested": {"sizes": (1, 2), "by number": {1: "one"}, "ordered": OrderedDict(a=1)},
        "tensor": torch.randn(3),
        "generator": torch.get_rng_state(),
        "dtype": torch.bfloat16,
        "bytes": b"\0\1",
    }
    checkpoint.save(values, tmp_path)
    assert_equal(checkpoint.load(tmp_path, {}), values)
    assert_equal(checkpoint.read(tmp_path), values)
    # Plain values in the objects do no harm, so the same dict can be saved and loaded.
    assert_equal(checkpoint.load(tmp_path, values), values)


def test_an_empty_checkpoint(tmp_path: Path) -> None:
    checkpoint.save({}, tmp_path)
    assert checkpoint.load(tmp_path, {}) == checkpoint.read(tmp_path) == {}


class Unknown:
    """A type that torch.load refuses with weights_only."""


def with_extra(state: Any) -> nn.Module:
    module = Counting()
    module.steps = state
    return module


@pytest.mark.parametrize(
    ("objects", "where"),
    [
        ({"callback": print}, "'values' -> 'callback', a builtin_function_or_method"),
        ({"made": {"deep": {"inside": Unknown()}}}, "'values' -> 'made' -> 'deep' -> 'inside', a Unknown"),
        ({"local": lambda: 0}, "'values' -> 'local', a function: .*Can't .*pickle"),
        ({"meter": Thermometer(Unknown())}, "'states' -> 'meter' -> 'degrees', a Unknown"),
        ({"model": with_extra(Unknown())}, "'model' -> '_extra_state', a Unknown"),
    ],
)
def test_values_that_could_not_be_read_again_are_not_saved(objects: dict[str, Any], where: str, tmp_path: Path) -> None:
    checkpoint.save({"epoch": 1}, tmp_path)
    with pytest.raises(MisuseError, match=rf"readable by torch.load\(weights_only=True\)(.|\n)*not:\n  {where}"):
        checkpoint.save({"epoch": 2, **objects}, tmp_path)
    assert checkpoint.read(tmp_path) == {"epoch": 1}
    assert len(list(tmp_path.glob("data-*"))) == 1


def test_a_reference_is_not_saved(trio: InProcessCluster, tmp_path: Path) -> None:
    says = "'values' -> 'ref', a RRef: UnsendableError: .*an RRef can only be sent to other workers"
    with trio[0].as_current(), pytest.raises(MisuseError, match=says):
        checkpoint.save({"ref": rpc.RRef(1)}, tmp_path)


@pytest.mark.parametrize("name", ["", 3, "two\nlines", None])
def test_invalid_names_are_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not a valid name for an object in a checkpoint"):
        checkpoint.save({name: 1}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_objects_must_be_a_dict(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="objects must be a dict"):
        checkpoint.save([nn.Linear(1, 1)], tmp_path)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="objects must be a dict"):
        checkpoint.load(tmp_path, nn.Linear(1, 1))  # type: ignore[arg-type]


def test_inside_an_autograd_context(trio: InProcessCluster, tmp_path: Path) -> None:
    import backhaul.autograd as dist_autograd

    with trio[0].as_current():
        model = RemoteModule("worker1", nn.Linear, (2, 2))
        with dist_autograd.context() as context_id:
            loss = model(torch.ones(1, 2)).sum()
            checkpoint.save({"model": model}, tmp_path, gather=True)
            checkpoint.load(tmp_path, {"model": RemoteModule("worker2", nn.Linear, (2, 2))})
            dist_autograd.backward(context_id, [loss])


class Holder(nn.Module):
    """A module that can get a part after construction."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def hold(self, part: nn.Module) -> None:
        self.part = part

    def let_go(self) -> None:
        del self.part


def test_a_remote_module_that_holds_itself(trio: InProcessCluster, tmp_path: Path) -> None:
    with trio[0].as_current():
        one, other = RemoteModule("worker1", Holder), RemoteModule("worker2", Holder)
        one.module_rref.rpc_sync().hold(other)
        other.module_rref.rpc_sync().hold(one)
        with pytest.raises(MisuseError, match="nested more than 64 deep: does one of them hold itself"):
            checkpoint.save({"model": one}, tmp_path / "new")
        assert not (tmp_path / "new").exists()
        one.module_rref.rpc_sync().let_go()


def test_a_tensor_that_cannot_be_changed(trio: InProcessCluster, tmp_path: Path) -> None:
    """Torch's error about a tensor of a module that contains remote ones is passed on."""
    with trio[0].as_current():
        model = Holder()
        model.hold(RemoteModule("worker1", nn.Linear, (2, 2)))
        checkpoint.save({"model": model}, tmp_path)
        with torch.inference_mode():
            model.weight = nn.Parameter(torch.ones(2), requires_grad=False)
        with pytest.raises(PartialError, match="worker 'worker0' failed: MisuseError: Holder does not accept"):
            checkpoint.load(tmp_path, {"model": model})
