"""Tensor subclasses as values: they arrive as they were sent, and a tree that no codec makes is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.masked import MaskedTensor
from value_kinds import CODEC

from backhaul.errors import MisuseError, ProtocolError, UnsendableError
from backhaul.wire import shards, trees
from backhaul.wire.subclasses import plain
from backhaul.wire.trees import Refusal
from backhaul.wire.values import Codec

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")


STRICT = Codec(bounded=True)


def trip(value: Any, codec: Codec = CODEC) -> Any:
    """What arrives of a value whose tensors are not recorded."""
    tree, packing = codec.pack(value)
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(tree))
    return codec.unpack(tree, [each.detach().requires_grad_(each.requires_grad) for each in packing.tensors])


class Tagged(Tensor):
    pass


class Weight(nn.Parameter):
    pass


class Slotted(Tensor):
    """Defines its own pickling, so it is pickled."""

    __slots__ = ("extra",)


class Wrapping(Tensor):
    """A wrapper around one tensor. It computes nothing."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> Wrapping:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=requires_grad)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Wrapping:
        return Wrapping(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapping(args[0].inner)
        return NotImplemented


def tagged(**attributes: Any) -> Tagged:
    made = torch.arange(3.0).as_subclass(Tagged)
    vars(made).update(attributes)
    return made


def masked() -> Any:
    return MaskedTensor(torch.tensor([1.0, 2.0]), torch.tensor([True, False]))


def slotted() -> Slotted:
    made = torch.ones(2).as_subclass(Slotted)
    made.extra = 5
    return made


def test_attributes_travel() -> None:
    got = trip(tagged(label="a", parts=[torch.ones(1)]))
    assert type(got) is Tagged
    assert got.tolist() == [0, 1, 2]
    assert got.label == "a"
    assert got.parts[0].tolist() == [1]
    assert not got._is_view()


def test_a_parameter_subclass() -> None:
    got = trip(Weight(torch.ones(2)))
    assert type(got) is Weight
    assert isinstance(got, nn.Parameter)
    assert got.requires_grad
    assert got.is_leaf


def test_a_subclass_with_its_own_pickling_is_pickled() -> None:
    got = trip(slotted())
    assert type(got) is Slotted
    assert got.extra == 5


def test_a_wrapper_of_a_parameter() -> None:
    got = trip(nn.Parameter(Wrapping(torch.ones(2))))
    assert type(got) is Wrapping
    assert isinstance(got, nn.Parameter)
    assert got.inner.tolist() == [1, 1]


def test_a_wrapper_without_a_part_that_has_gradients() -> None:
    """The wrapper is pickled, and would lose its history."""
    odd = Wrapping(torch.ones(2, dtype=torch.int64))
    assert trip(odd).inner.tolist() == [1, 1]
    _, packing = CODEC.pack(tagged().requires_grad_())
    assert packing.unrecorded is None
    _, packing = CODEC.pack(slotted().requires_grad_())
    assert packing.unrecorded == "Slotted"


@pytest.mark.parametrize("make", [tagged, masked, slotted, lambda: Wrapping(torch.ones(2))])
def test_no_subclass_is_sent_to_a_federation(make: Any) -> None:
    with pytest.raises(UnsendableError, match="does not go to a worker of a federation"):
        STRICT.pack(make())


@pytest.mark.parametrize("make", [tagged, masked, lambda: Wrapping(torch.ones(2))])
def test_no_subclass_is_accepted_from_a_federation(make: Any) -> None:
    tree, packing = CODEC.pack(make())
    with pytest.raises(ProtocolError, match="a tensor subclass, from a peer that may not send any"):
        STRICT.unpack(tree, packing.tensors)


def test_a_tensor_of_an_unfinished_collective_is_sent_as_a_plain_one() -> None:
    """A plain tensor may go to a federation, too. Two occurrences are one tensor."""
    value: Any = AsyncCollectiveTensor(torch.ones(2))
    got = trip([value, value], STRICT)
    assert type(got[0]) is Tensor
    assert got[0] is got[1]
    assert got[0].tolist() == [1, 1]


def test_gradients_as_plain_tensors() -> None:
    tensor = torch.ones(2)
    assert plain(tensor) is tensor
    assert type(plain(tagged())) is Tensor
    assert type(plain(AsyncCollectiveTensor(tensor))) is Tensor  # type: ignore[arg-type]
    with pytest.raises(UnsendableError, match="is a Wrapping, and what came was a plain tensor"):
        plain(Wrapping(tensor))


def recorded(value: Any) -> Any:
    """What arrives of a value whose tensors are recorded. Here their history is kept."""
    tree, packing = CODEC.pack(value)
    return CODEC.unpack(tree, packing.tensors)


def test_history_of_a_plain_subclass() -> None:
    x = torch.ones(3, requires_grad=True)
    got = recorded((x * 2).as_subclass(Tagged))
    assert type(got) is Tagged
    assert torch.autograd.grad(got.sum(), x)[0].tolist() == [2, 2, 2]


def test_history_of_a_parameter_subclass() -> None:
    weight = Weight(torch.ones(2))
    got = recorded(weight)
    assert type(got) is Tensor  # as a Parameter, it arrives as a tensor that was computed
    assert torch.autograd.grad(got.sum(), weight)[0].tolist() == [1, 1]


def test_history_of_wrappers() -> None:
    wrapper = Wrapping(torch.ones(2)).requires_grad_()
    got = recorded([wrapper, wrapper])
    assert got[0] is got[1]
    assert type(got[0]) is Wrapping
    gradient: Any = torch.autograd.grad(got[0], wrapper, Wrapping(torch.tensor([3.0, 4.0])))[0]
    assert type(gradient) is Wrapping
    assert gradient.inner.tolist() == [3, 4]


def test_history_of_a_masked_tensor() -> None:
    mask = torch.tensor([True, False])
    value = MaskedTensor(torch.ones(2), mask, requires_grad=True)
    got = recorded(value)
    assert isinstance(got, MaskedTensor)
    gradient: Any = torch.autograd.grad(got, value, MaskedTensor(torch.full((2,), 3.0), mask))[0]
    assert gradient.to_tensor(0.0).tolist() == [3, 0]
    with pytest.raises(MisuseError, match="has another mask than the tensor"):
        torch.autograd.grad(recorded(value), value, MaskedTensor(torch.ones(2), ~mask))


def test_a_gradient_of_another_class() -> None:
    from backhaul.wire.subclasses import _Form, _Wrap

    class Context:
        form = _Form(Wrapping, None, None, None, {}, ["inner"])

    assert _Wrap.backward(Context, None) == (None, None)
    with pytest.raises(MisuseError, match="the gradient of a Wrapping from another worker is a Tensor"):
        _Wrap.backward(Context, torch.ones(2))


def test_a_wrapper_of_integers_that_requires_grad() -> None:
    """None of its tensors can have a gradient."""

    odd = Tensor._make_wrapper_subclass(Wrapping, (2,), dtype=torch.float32, requires_grad=True)
    odd.inner = torch.ones(2, dtype=torch.int64)
    with pytest.raises(UnsendableError):
        STRICT.pack(odd)
    _, packing = CODEC.pack([odd, tagged()])
    assert packing.unrecorded == "Wrapping"


def test_a_class_that_has_no_name() -> None:
    class Local(Tensor):
        pass

    with pytest.raises(UnsendableError, match="Local"):
        CODEC.pack(torch.ones(2).as_subclass(Local))


TENSOR = [trees.TENSOR, 0]
NAME = f"{__name__}:Tagged"
WRAPPING = f"{__name__}:Wrapping"


@pytest.mark.parametrize(
    "tree",
    [
        [trees.SUBCLASS],
        [trees.SUBCLASS, "a"],
        [trees.SUBCLASS, 3],
        [trees.SUBCLASS, 0, 9, NAME],
        [trees.SUBCLASS, 0, 0, NAME],
        [trees.SUBCLASS, 0, 0, NAME, TENSOR, 1],
        [trees.SUBCLASS, 0, 0, NAME, 1, {}],
        [trees.SUBCLASS, 0, 0, "builtins:int", TENSOR, {}],
        [trees.SUBCLASS, 0, 0, WRAPPING, TENSOR, {}],
        [trees.SUBCLASS, 0, 1, WRAPPING],
        [trees.SUBCLASS, 0, 1, NAME, False, False, None, None, "inner", TENSOR],
        [trees.SUBCLASS, 0, 1, WRAPPING, False, False, None, None, "inner", 1],
        [trees.SUBCLASS, 0, 1, WRAPPING, False, False, None, None, "inner"],
        [trees.SUBCLASS, 0, 2, False, 1, 1],
        [trees.SUBCLASS, 0, 2, False, TENSOR, 1],
        [trees.SUBCLASS, 0, 2, False, TENSOR, [trees.TUPLE, "cpu", 0, None, 0, [trees.LIST, "a"], 0, 0]],
    ],
)
def test_trees_that_no_codec_makes(tree: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        CODEC.unpack(tree, [torch.ones(2)])


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial("sum")])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_dtensors(mesh: DeviceMesh, placement: Any, is_parameter: bool) -> None:
    sent = DTensor.from_local(torch.arange(4.0), mesh, [placement])
    one, other = trip([nn.Parameter(sent)] * 2 if is_parameter else [sent, sent])
    assert one is other
    assert isinstance(one, nn.Parameter) is is_parameter
    assert one.requires_grad is is_parameter
    assert one.placements == (placement,)
    assert one.device_mesh is mesh
    assert one.to_local().tolist() == [0, 1, 2, 3]


def test_a_dtensor_where_there_is_no_such_mesh(mesh: DeviceMesh) -> None:
    tree, packing = CODEC.pack(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
    with pytest.raises(UnsendableError, match="federation"):
        STRICT.pack(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
    description = tree[5]
    description[2] = [trees.LIST, 7]
    with pytest.raises(UnsendableError, match=r"a mesh of the ranks \[7\] cannot be received"):
        CODEC.unpack(tree, packing.tensors)


def test_history_of_a_dtensor(mesh: DeviceMesh) -> None:
    x = torch.ones(2, requires_grad=True)
    got = recorded(DTensor.from_local(x, mesh, [Shard(0)]))
    assert isinstance(got, DTensor)
    assert torch.autograd.grad(got.to_local().sum(), x)[0].tolist() == [1, 1]


def test_only_some_parts_of_a_wrapper_have_gradients() -> None:
    from backhaul.wire.subclasses import _Form, _Unwrap

    class Context:
        form = _Form(Wrapping, None, None, None, {}, ["one", "other"])

    assert _Unwrap.backward(Context, None, None) == (None, None)
    with pytest.raises(MisuseError, match="only some inner tensors of a Wrapping"):
        _Unwrap.backward(Context, torch.ones(1), None)


class Norm(Partial):
    """As the placement of the norm of a sharded tensor: its parts are not simply added up."""


@pytest.mark.parametrize("placement", [Norm("sum"), object()])
def test_placements_of_another_kind_are_refused(placement: Any) -> None:
    assert shards._describe_placement(Partial("sum")) == ("partial", "sum")
    with pytest.raises(Refusal, match=r"has no meaning on another worker: send tensor\.full_tensor\(\)"):
        shards._describe_placement(placement)
