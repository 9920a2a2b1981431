"""Two hundred pickles: for a codec that accepts none, inside every container that it accepts, and before a greeting."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from intruder import Besieged, is_cut, run_watched
from pickle_payloads import payloads

from backhaul.errors import MisuseError, ProtocolError
from backhaul.security.handshake import MAGIC
from backhaul.wire import trees
from backhaul.wire.values import Codec

# Containers that a peer may put around a value. Any worker has these classes.
CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda tree: tree,
    "list": lambda tree: [trees.LIST, 1, tree],
    "long list": lambda tree: [trees.LIST, *range(20), tree],
    "tuple": lambda tree: [trees.TUPLE, tree],
    "call": lambda tree: [trees.TUPLE, [trees.NAMED, "builtins:len"], [trees.TUPLE, tree], {}],
    "function of a call": lambda tree: [trees.TUPLE, tree, [trees.TUPLE], {}],
    "key of a dict": lambda tree: [trees.DICT, tree, 1],
    "value of a dict": lambda tree: [trees.DICT, 1, tree],
    "map": lambda tree: [trees.DICT, "a", tree],
    "ordered dict": lambda tree: [trees.ORDERED_DICT, "a", tree],
    "set": lambda tree: [trees.SET, tree],
    "frozen set": lambda tree: [trees.FROZEN_SET, tree],
    "slice": lambda tree: [trees.SLICE, None, tree, None],
    "range": lambda tree: [trees.RANGE, 0, tree, 1],
    "flag": lambda tree: [trees.FLAG, "re:RegexFlag", tree],
    "named tuple": lambda tree: [trees.NAMED_TUPLE, "urllib.parse:DefragResult", tree, ""],
    "return type": lambda tree: [trees.RETURN_TYPE, "max", tree, None],
    "dataclass": lambda tree: [trees.DATACLASS, "pickle_payloads:Point", "x", tree, "y", 1],
    "method": lambda tree: [trees.METHOD, tree, "x"],
    "partial": lambda tree: [trees.PARTIAL, tree, [trees.TUPLE], {}],
    "arguments of a partial": lambda tree: [trees.PARTIAL, [trees.NAMED, "builtins:len"], [trees.TUPLE, tree], {}],
    "extension": lambda tree: [trees.EXTENSION, "box", tree],
    "part of a pickle": lambda tree: [trees.PICKLE, b"N.", tree],
    "deep": lambda tree: [trees.LIST, [trees.DICT, "a", [trees.TUPLE, [trees.SET, [trees.FROZEN_SET, tree]]]]],
}


class Box:
    pass


def try_all() -> tuple[int, list[str], bool]:
    """In the attacked process: how many were refused, which were not, and whether pickle's module was loaded."""
    sys.modules.pop("backhaul.wire.pickles", None)
    codecs = [Codec(allow_pickle=False), Codec(bounded=True)]
    for codec in codecs:
        codec.register(Box, "box", lambda box, packing: None, lambda value, unpacking: Box())
    refused, taken = 0, []
    for data in payloads():
        for name, container in CONTAINERS.items():
            tree = msgspec.msgpack.decode(msgspec.msgpack.encode(container([trees.PICKLE, data])))
            for codec in codecs:
                try:
                    codec.unpack(tree, [torch.zeros(1)])
                except (ProtocolError, MisuseError):
                    refused += 1
                else:
                    taken.append(f"{name}: {data!r}")
    return refused, taken, "backhaul.wire.pickles" in sys.modules


def test_there_are_200_pickles() -> None:
    assert len(set(payloads())) >= 200


DEEDS: dict[str, tuple[Callable[..., Any], Any]] = {
    "pickle.find_class": (pickle.loads, pickle.dumps(ValueError)),
    "os.system": (os.system, "true"),
    "subprocess.Popen": (subprocess.call, ["true"]),
    "compile": (eval, "1"),
    "exec": (eval, "1"),
    "ctypes.dlopen": (ctypes.CDLL, None),
}


@pytest.mark.parametrize("name", DEEDS)
def test_the_audit_hook_notices_forbidden_operations(besieged: Besieged, name: str) -> None:
    deed, argument = DEEDS[name]
    _, events = besieged.victim.run(run_watched, _do, deed, argument)
    assert any(event.startswith(name) for event in events)


def _do(deed: Callable[..., Any], argument: Any) -> None:
    deed(argument)


def test_a_pickle_that_gets_in_is_seen(besieged: Besieged) -> None:
    found, events = besieged.victim.run(run_watched, _load, payloads()[0])
    assert found is None
    assert any(event.startswith("os.system") for event in events)


def _load(data: bytes) -> None:
    Codec(allow_pickle=True).unpack([trees.PICKLE, data], [])


def test_every_pickle_in_every_container(besieged: Besieged) -> None:
    for container in CONTAINERS.values():  # a good value imports the classes named in them, so that the attacks do not
        besieged.victim.run(_unpack, container(1))
    with besieged.attack():
        found, events = besieged.victim.run(run_watched, try_all)
    assert found == (2 * len(payloads()) * len(CONTAINERS), [], False)
    assert not events, events


def _unpack(tree: Any) -> None:
    for codec in (Codec(allow_pickle=False), Codec(bounded=True)):
        codec.register(Box, "box", lambda box, packing: None, lambda value, unpacking: Box())
        with contextlib.suppress(ProtocolError, MisuseError):
            codec.unpack(tree, [])


def test_pickles_before_the_greeting(besieged: Besieged) -> None:
    with besieged.attack():
        for place, data in enumerate(payloads()):
            sock = besieged.tcp() if place % 2 else besieged.unix()
            sock.sendall(data.ljust(200, b"."))
            assert is_cut(sock), data
        for data in payloads()[::4]:
            # Instead of the greeting, after its magic.
            sock = besieged.unix()
            sock.sendall(MAGIC + bytes(64) + len(data).to_bytes(2, "little") + data)
            assert is_cut(sock), data
