"""State dicts of remote modules, alone and inside local ones, equal those of the same model in one process."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import Net, ask, batch, dtypes, frozen, linear, seeded, twins
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul.nn import RemoteModule

pytestmark = pytest.mark.usefixtures("three")


class Outer(nn.Module):
    """A model with a part, two levels down, that may be on another worker."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before = seeded(11, linear)
        self.inner = nn.ModuleDict({"part": part, "after": seeded(12, linear)})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["after"](self.inner["part"](self.before(x)))  # type: ignore[no-any-return]


class Versioned(nn.Module):
    """A module whose parameter had another name in version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Extra(nn.Module):
    """Has state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.seen: list[str] = ["nothing"]

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def seen(module: Extra) -> list[str]:
    return module.seen


def see(module: Extra, what: str) -> None:
    module.seen.append(what)


def nested() -> nn.Module:
    return nn.Sequential(Net(), nn.Sequential(Versioned()))


def same(got: Any, expected: Any) -> bool:
    return list(got) == list(expected) and all(
        torch.equal(got[key], value) and got[key].dtype == value.dtype and type(got[key]) is type(value)
        if isinstance(value, Tensor)
        else got[key] == value
        for key, value in expected.items()
    )


Pair = tuple[nn.Module, nn.Module]


def alone(make: Callable[..., nn.Module] = Net, seed: int = 1) -> Pair:
    return twins(seed, "worker1", make)


def inside(make: Callable[..., nn.Module] = Net, seed: int = 1) -> Pair:
    m, local = twins(seed, "worker1", make)
    return Outer(m), Outer(local)


@pytest.fixture(params=[alone, inside])
def pair(request: pytest.FixtureRequest) -> Callable[..., Pair]:
    """A model that is, or contains, a remote module; and the same model in one process."""
    return request.param  # type: ignore[no-any-return]


def outcome(model: nn.Module, state: Any, **options: Any) -> Any:
    """What loading returns, or the text of its error without the line that names the model's class."""
    try:
        return model.load_state_dict(state, **options)
    except RuntimeError as error:
        first, _, rest = str(error).partition("\n")
        assert first == f"Error(s) in loading state_dict for {type(model).__name__}:"
        return rest


def test_the_state(pair: Callable[..., Pair]) -> None:
    m, local = pair(nested)
    assert same(m.state_dict(), local.state_dict())
    assert same(m.state_dict(prefix="x.y."), local.state_dict(prefix="x.y."))
    assert m.state_dict()._metadata == local.state_dict()._metadata  # type: ignore[attr-defined]


def test_the_state_after_training_steps(pair: Callable[..., Pair]) -> None:
    """The state includes buffers: running means, and num_batches_tracked."""
    m, local = pair(Net)
    for model in (m, local):
        model(batch(3, 4))
        model(batch(3, 4, seed=8))
    found = m.state_dict()
    assert next(value for key, value in found.items() if key.endswith("num_batches_tracked")) == 2
    assert same(found, local.state_dict())


def test_a_destination_of_the_user_s_own(pair: Callable[..., Pair]) -> None:
    m, local = pair()
    for model, other in ((m, local), (local, m)):
        mine: dict[str, Any] = {"already": 1}
        theirs: dict[str, Any] = {"already": 1}
        assert model.state_dict(destination=mine, prefix="p.") is mine
        other.state_dict(destination=theirs, prefix="p.")
        assert same(mine, theirs)


def test_keep_vars(pair: Callable[..., Pair]) -> None:
    m, local = pair()
    found, expected = m.state_dict(keep_vars=True), local.state_dict(keep_vars=True)
    assert same(found, expected)
    assert [value.requires_grad for value in found.values()] == [value.requires_grad for value in expected.values()]
    with dist_autograd.context():
        assert not any(value.requires_grad for value in m.state_dict().values())


def test_shared_parameters_stay_shared_in_the_state() -> None:
    m, _ = alone()
    found = m.state_dict()
    assert found["first.weight"].data_ptr() == found["second.weight"].data_ptr()


def test_saved_and_loaded_by_torch(pair: Callable[..., Pair]) -> None:
    m, local = pair()
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same(loaded, local.state_dict())
    assert loaded._metadata == local.state_dict()._metadata  # type: ignore[attr-defined]


def test_round_trips_both_ways(pair: Callable[..., Pair]) -> None:
    m, local = pair(nested, 1)
    other, other_local = pair(nested, 2)
    assert not same(other.state_dict(), m.state_dict())
    result = other.load_state_dict(local.state_dict())
    assert str(result) == "<All keys matched successfully>"
    assert same(other.state_dict(), local.state_dict())
    other_local.load_state_dict(m.state_dict())
    assert same(other_local.state_dict(), local.state_dict())


def test_the_loaded_model_computes_the_same(pair: Callable[..., Pair]) -> None:
    m, _ = pair(Net, 1)
    _, local = pair(Net, 2)
    m.load_state_dict(local.state_dict())
    assert torch.equal(m(batch(3, 4)), local(batch(3, 4)))


def drop(*names: str) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        for key in list(state):
            if key.rpartition(".")[2] in names:
                del state[key]

    return edit


def add(*names: str) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        for name in names:
            state[name] = torch.zeros(1)

    return edit


def replace(value: Any, *names: str) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        for key in state:
            if key.rpartition(".")[2] in names:
                state[key] = value

    return edit


EDITS = {
    "missing": [drop("weight", "calls")],
    "missing num_batches_tracked": [drop("num_batches_tracked")],
    "unexpected": [
        add("x", "inner.x", "inner.part.x", "inner.part.first.x", "inner.part.first.x.y", "norm.x.y", "nothing")
    ],
    "size mismatch": [replace(torch.zeros(3), "weight", "scale", "calls")],
    "no tensor": [replace("text", "bias")],
    "scalars for vectors": [replace(torch.zeros(1), "calls")],
    "another dtype": [replace(torch.zeros(4, dtype=torch.complex64), "scale")],
    "all of it": [drop("weight"), add("x", "inner.part.x"), replace(torch.zeros(3), "bias")],
    "nothing at all": [drop("weight", "bias", "scale", "calls", "running_mean", "running_var", "num_batches_tracked")],
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS.keys())
def test_mismatched_states_fail_as_in_one_process(
    pair: Callable[..., Pair], edits: list[Callable[[dict[str, Any]], None]], metadata: bool, strict: bool
) -> None:
    """The keys, texts and order are those of one process, and so is what gets loaded anyway."""
    m, local = pair(Net, 1)
    _, source = pair(Net, 2)
    state: dict[str, Any] = source.state_dict()
    if not metadata:
        state = OrderedDict(state)
    for edit in edits:
        edit(state)
    got, expected = outcome(m, state, strict=strict), outcome(local, state, strict=strict)
    assert got == expected
    assert same(m.state_dict(), local.state_dict())
    fits = edits in (EDITS["scalars for vectors"], EDITS["another dtype"])
    assert fits == (str(expected) == "<All keys matched successfully>") or not metadata


@pytest.mark.parametrize("metadata", [True, False])
def test_num_batches_tracked_may_be_missing_from_an_old_state_only(pair: Callable[..., Pair], metadata: bool) -> None:
    """To tell old states from new ones, the versions of all modules travel with the state."""
    m, _ = pair(Net, 1)
    _, source = pair(Net, 2)
    state: dict[str, Any] = source.state_dict()
    drop("num_batches_tracked")(state)
    if metadata:
        with pytest.raises(RuntimeError, match=r"Missing key.*num_batches_tracked"):
            m.load_state_dict(state)
    else:
        m.load_state_dict(OrderedDict(state))


def test_an_old_version_of_a_descendant(pair: Callable[..., Pair]) -> None:
    m, local = pair(nested, 1)
    _, source = pair(nested, 2)
    state = source.state_dict()
    key = next(key for key in state if key.endswith("1.0.weight"))
    state[key.removesuffix("eight")] = state.pop(key) + 5
    state._metadata[key.removesuffix(".weight")]["version"] = 1  # type: ignore[attr-defined]
    for model in (m, local):
        model.load_state_dict(state)
        assert model.state_dict()[key].tolist() == [5, 5]


def test_assign(pair: Callable[..., Pair]) -> None:
    """The dtypes of the state are adopted; requires_grad stays."""
    m, local = pair(Net, 1)
    _, source = pair(Net, 2)
    for model in (m, local):
        part = model.inner["part"] if isinstance(model, Outer) else model
        part.requires_grad_(False)
    state = source.float().state_dict()
    for model in (m, local):
        model.load_state_dict(state, assign=True)
    assert m.state_dict()[next(iter(state))].dtype is torch.float32
    assert same(m.state_dict(), local.state_dict())
    remote, twin = (model.inner["part"] if isinstance(model, Outer) else model for model in (m, local))
    assert isinstance(remote, RemoteModule)
    assert ask(remote, frozen) == frozen(twin)
    assert all(frozen(twin))
    assert ask(remote, dtypes) == dtypes(twin)


def test_extra_state(pair: Callable[..., Pair]) -> None:
    m, local = pair(Extra)
    assert same(m.state_dict(), local.state_dict())
    state = local.state_dict()
    key = next(key for key in state if key.endswith("_extra_state"))
    state[key] = {"seen": ["something"]}
    m.load_state_dict(state)
    part = m.inner["part"] if isinstance(m, Outer) else m
    assert isinstance(part, RemoteModule)
    assert ask(part, seen) == ["something"]
    del state[key]
    assert outcome(m, state) == outcome(local, state)
    plain, plain_local = pair(Net)
    state = plain_local.state_dict()
    state[key] = 1
    assert outcome(plain, state) == outcome(plain_local, state)


def no_prefix(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}hooked.{key.removeprefix(prefix)}"] = state.pop(key)


def unhook(
    module: nn.Module, state: Any, prefix: str, metadata: Any, strict: Any, missing: Any, unexpected: Any, errors: Any
) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}hooked.")]:
        state[prefix + key.removeprefix(f"{prefix}hooked.")] = state.pop(key)


def forgive(module: nn.Module, keys: Any) -> None:
    keys.missing_keys.clear()
    keys.unexpected_keys.clear()


def hooked() -> nn.Module:
    """A module with hooks that rename keys, and one hook that clears the errors so far."""
    module = nn.Sequential(linear())
    module[0].register_state_dict_post_hook(no_prefix)  # type: ignore[no-untyped-call]
    module[0].register_load_state_dict_pre_hook(unhook)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(forgive)  # type: ignore[no-untyped-call]
    return module


def test_hooks_of_the_module(pair: Callable[..., Pair]) -> None:
    m, local = pair(hooked)
    found = m.state_dict()
    assert any(".hooked.weight" in key for key in found)
    assert same(found, local.state_dict())
    state = pair(hooked, 2)[1].state_dict()
    drop("bias")(state)
    if "before.weight" in state:
        del state["before.weight"]
    assert outcome(m, state) == outcome(local, state)
    assert same(m.state_dict(), local.state_dict())


def test_hooks_of_the_remote_module_itself() -> None:
    """The hooks run in this process, like those of any local module."""
    m, _ = twins(1, "worker1", linear)
    calls: list[str] = []

    def before(module: Any, prefix: str, keep_vars: bool) -> None:
        calls.append(f"before {prefix}")

    def after(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        calls.append(f"after {list(state)}")

    def loading(module: Any, state: Any, *_: Any) -> None:
        state["bias"] = torch.ones(4)

    def loaded(module: Any, keys: Any) -> None:
        calls.append(f"loaded {keys.missing_keys}")

    m.register_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
    m.register_state_dict_post_hook(after)  # type: ignore[no-untyped-call]
    m.register_load_state_dict_pre_hook(loading)  # type: ignore[no-untyped-call]
    m.register_load_state_dict_post_hook(loaded)  # type: ignore[no-untyped-call]
    m.state_dict(prefix="p.")
    m.load_state_dict({"weight": torch.ones(4, 4)})
    assert calls == ["before p.", "after ['p.weight', 'p.bias']", "loaded []"]
    assert m.state_dict()["bias"].tolist() == [1] * 4


def test_a_remote_module_inside_of_a_remote_module() -> None:
    m, local = twins(1, "worker2", nested)
    middle = RemoteModule("worker1", Outer, (m,))
    twin = Outer(local)
    for model in (middle, twin):
        model.load_state_dict(Outer(seeded(3, nested)).state_dict())
    assert same(middle.state_dict(), twin.state_dict())
    assert middle.state_dict()._metadata == twin.state_dict()._metadata  # type: ignore[attr-defined]
    state = twin.state_dict()
    drop("scale", "num_batches_tracked")(state)
    assert outcome(middle, state) == outcome(twin, state)
    assert m.state_dict()["0.scale"].equal(twin.state_dict()["inner.part.0.scale"])


def test_a_state_that_is_not_a_dict_is_refused() -> None:
    m, _ = alone()
    with pytest.raises(TypeError, match="dict-like"):
        m.load_state_dict([1])  # type: ignore[arg-type]


def test_a_state_that_the_user_goes_on_using_is_not_changed() -> None:
    """Later training does not change the state, and changes of the state do not change the module."""
    m, local = alone()
    state = local.state_dict()
    m.load_state_dict(state)
    found = m.state_dict()
    before = {key: value.clone() for key, value in found.items()}
    m(batch(3, 4))
    assert same(found, before)
    found["scale"].zero_()
    assert not m.state_dict()["scale"].equal(found["scale"])
