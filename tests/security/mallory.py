"""A member of a federation that breaks all rules: it connects with TLS, and sends bytes that the test writes."""

from __future__ import annotations

import importlib
import itertools
import os
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

import exposed
import torch
from intruder import INTRUDER, Besieged, Line, set_up

from backhaul import rpc
from backhaul.ids import RefId, ShareId
from backhaul.wire import trees
from backhaul.wire.frames import encode
from backhaul.wire.messages import Call, Create, Refs, Result

NAMED, TUPLE, TENSOR = trees.NAMED, trees.TUPLE, trees.TENSOR


# In the workers.


def set_up_federation() -> None:
    importlib.import_module("exposed")
    set_up()


def ask_federation() -> float:
    began = time.monotonic()
    assert rpc.rpc_sync("worker0", exposed.double, (21,), timeout=30) == 42
    return time.monotonic() - began


_state: dict[str, Any] = {}


def hold() -> None:
    _state["account"] = account = rpc.remote("worker0", exposed.Account, (7,))
    assert account.rpc_sync().deposit(0) == 7


def give() -> None:
    """Send a reference to a value of the good peer to the attacked worker, which must confirm it."""
    assert rpc.rpc_sync("worker0", exposed.value_of, (rpc.RRef(5),)) == 5


def held_ref() -> tuple[int, int, int]:
    ref = _state["account"]._ref
    return ref.owner, ref.creator, ref.number


def deposit() -> int:
    return int(_state["account"].rpc_sync().deposit(1))


def keep() -> None:
    _state["account"] = rpc.RRef(exposed.Account(7))


# In the test.


class Mallory:
    """The intruder's connection."""

    def __init__(self, besieged: Besieged, context: ssl.SSLContext) -> None:
        self.tls = context.wrap_socket(besieged.tcp())
        try:
            self.line = Line(self.tls, besieged.hello())
        except BaseException:
            self.tls.close()
            raise
        self._ids = itertools.count(1)

    def send(self, message: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        self.line.send(bytes(encode(message, tensors)))

    def ask(self, message: type[Any], *fields: Any, tensors: Sequence[torch.Tensor] = ()) -> Any:
        number = next(self._ids)
        self.send(message(number, *fields), tensors)
        answer = self.line.answer()
        assert answer is not None, "it was cut off"
        assert answer.id == number
        return answer

    def call(self, function: Any, *args: Any, refs: Refs = (), tensors: Sequence[torch.Tensor] = ()) -> Any:
        """Make a call, and return the answer. The function is a name or a tree; the arguments are trees."""
        function = [NAMED, function] if isinstance(function, str) else function
        return self.ask(Call, [TUPLE, function, [TUPLE, *args], {}], refs, tensors=tensors)

    def create(self, number: int, function: str, *args: Any) -> RefId:
        ref = RefId(0, INTRUDER, number)
        assert isinstance(self.ask(Create, ref, [TUPLE, [NAMED, function], [TUPLE, *args], {}]), Result)
        return ref

    def invoke(self, ref: RefId, name: Any, *args: Any) -> Any:
        """Call a method as a proxy does, and return the answer."""
        rref = [trees.EXTENSION, "rref", [TUPLE, ref.owner, ref.creator, ref.number]]
        share = ShareId(INTRUDER, next(self._ids))
        return self.call("backhaul.refs.proxy:invoke", rref, name, [TUPLE, *args], {}, refs=((ref, share),))

    def raw(self) -> socket.socket:
        """The socket below TLS."""
        return socket.socket(fileno=os.dup(self.tls.fileno()))

    def close(self) -> None:
        self.tls.close()
