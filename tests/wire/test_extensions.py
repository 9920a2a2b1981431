"""What upper layers add to the codec: their own types, and names that the parties have agreed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from value_kinds import CODEC, Color, Frozen, Opaque, Unpicklable, function, trip

from backhaul.errors import MisuseError, ProtocolError, UnsendableError
from backhaul.wire import trees
from backhaul.wire.values import Codec, Packing, Unpacking


class Handle:
    def __init__(self, key: int, tensor: torch.Tensor | None = None) -> None:
        self.key = key
        self.tensor = tensor


class Special(Handle):
    pass


def lower_handle(handle: Handle, packing: Packing) -> Any:
    packing.attached.append(handle)
    return (handle.key, handle.tensor)


def lift_handle(payload: Any, unpacking: Unpacking) -> Handle:
    key, tensor = payload
    return Handle(key + 100, tensor)


def extended(*, allow_pickle: bool = True) -> Codec:
    codec = Codec(allow_pickle=allow_pickle)
    codec.register(Handle, "handle", lower_handle, lift_handle)
    return codec


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_registered_types_travel_as_what_they_are_lowered_to(allow_pickle: bool) -> None:
    codec = extended(allow_pickle=allow_pickle)
    x = torch.ones(1)
    sent = [Handle(1, x), Special(2), x]
    tree, packing = codec.pack(sent)
    assert packing.attached == sent[:2]
    first, second, got = codec.unpack(tree, packing.tensors)
    assert (first.key, second.key) == (101, 102)
    assert first.tensor is got


def test_registered_types_inside_pickles() -> None:
    codec = extended()
    handle = Handle(1, torch.ones(1))
    tree, packing = codec.pack(Opaque([handle, handle]))
    assert packing.attached == [handle]
    got = codec.unpack(tree, packing.tensors).content
    assert got[0] is got[1]
    assert got[0].key == 101


def test_registering_a_type_replaces_how_it_was_packed() -> None:
    codec = Codec()
    assert codec.pack(Handle(1))[0][0] == trees.PICKLE
    codec.register(Handle, "handle", lower_handle, lift_handle)
    assert codec.pack(Handle(1))[0][0] == trees.EXTENSION
    with pytest.raises(MisuseError, match="taken"):
        codec.register(Special, "handle", lower_handle, lift_handle)


def test_a_payload_that_does_not_lift() -> None:
    codec = extended()
    for tree in ([trees.EXTENSION, "handle", 1], [trees.EXTENSION, "nobody", 1], [trees.EXTENSION, 1, 1]):
        with pytest.raises(ProtocolError):
            codec.unpack(tree, [])


def test_many_types_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul.wire.values._MAX_RESOLVED", 40)
    codec = Codec()
    for _ in range(50):
        with pytest.raises(UnsendableError):
            codec.pack(type("Fresh", (), {"__reduce__": Unpicklable.__reduce__})())
    assert len(codec._lowerers) <= 41


# Names.


class Only:
    """Names that one party agreed to."""

    def __init__(self) -> None:
        self.table = {"f": function, "color": Color, "number": 3}

    def name_of(self, obj: Any) -> str:
        for name, known in self.table.items():
            if known is obj:
                return name
        raise UnsendableError("not agreed")

    def find(self, name: str) -> Any:
        if name not in self.table:
            raise MisuseError("not agreed")
        return self.table[name]


def test_a_codec_can_use_other_names_for_callables() -> None:
    codec = Codec(Only(), allow_pickle=False)
    assert codec.pack([function, Color.RED])[0] == [
        trees.LIST,
        [trees.NAMED, "f"],
        [trees.ENUM, "color", "RED"],
    ]
    assert trip([function, Color.RED], codec) == [function, Color.RED]
    with pytest.raises(UnsendableError, match="not agreed"):
        codec.pack(Frozen(1))
    with pytest.raises(MisuseError, match="not agreed"):
        codec.unpack([trees.NAMED, "math:sqrt"], [])
    with pytest.raises(ProtocolError):
        codec.unpack([trees.NAMED, "number"], [])


def test_names_that_do_not_exist_here() -> None:
    for tree in ([trees.NAMED, "math:nothing"], [trees.ENUM, "no_such_module:X", "a"]):
        with pytest.raises(MisuseError):
            CODEC.unpack(tree, [])
