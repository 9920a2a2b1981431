"""Execution in a federation: a peer's request runs only exposed functions, and its replies are read as strictly.

The function of a request is looked up before any other part of the request is read. Every error before the function
runs is refused with the same text. An exception of the function goes to the peer only as its type name and its text,
because a traceback shows paths and code.
"""

from __future__ import annotations

import contextvars
import time
import traceback
from collections.abc import Callable
from typing import Any

from backhaul.agent import autocast
from backhaul.agent.execution import Execution
from backhaul.agent.recording import Tensors
from backhaul.agent.translation import Cargo, Peer, safe_str
from backhaul.errors import (
    BackhaulError,
    MisuseError,
    ProtocolError,
    RefusedError,
    RemoteError,
    RemoteTraceback,
    UnsendableError,
    user_frames,
)
from backhaul.ids import WorkerInfo
from backhaul.trust.exposure import type_name
from backhaul.trust.permissions import Permissions, printable
from backhaul.wire import callables, trees
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Coded, Failed, Failure, Mark
from backhaul.wire.tensors import claimed
from backhaul.wire.trees import Packing
from backhaul.wire.values import Codec

_MAX_NAME = 200
_MAX_TEXT = 4000
_STAYS = "(in a federation a traceback stays on its worker, in the log)\n"

Entry = Callable[[WorkerInfo], Callable[..., Any]]


class FederatedExecution(Execution):
    """Executes calls of peers that may not run their own code, and opens their replies."""

    def __init__(
        self,
        me: WorkerInfo,
        codec: Codec,
        enter: Callable[[], None],
        max_message_bytes: int,
        max_head_bytes: int,
        permissions: Permissions,
    ) -> None:
        super().__init__(me, codec, enter, max_message_bytes)
        self._max_head_bytes = max_head_bytes
        self._permissions = permissions
        self.entries: dict[str, Entry] = {}
        """Functions of upper layers that peers may call by name. An entry makes the function for a peer, or raises."""

    def execute(self, envelope: Envelope, sender: WorkerInfo) -> tuple[Any, bool]:
        message = envelope.message
        what = "a call"
        context = contextvars.copy_context()
        opened = False
        began = time.thread_time()
        try:
            name, tree = _split(message.tree)
            what = f"the call of {name!r}"
            entry = self.entries.get(name)
            function = self._permissions.names(sender.name).get(name) if entry is None else entry(sender)
            if function is None:
                raise MisuseError("it is not exposed to this peer")
            if message.mark is not None:
                context.run(self.recording.enter, message.mark, sender)
            opened = True
            args, kwargs = self._open(tree, envelope, sender)
            if type(args) is not tuple or type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
                raise ProtocolError("malformed arguments")
            if message.autocast:
                function = autocast.under(message.autocast, function)
        except RefusedError:
            raise
        except Exception as error:
            spent = time.thread_time() - began
            raise self._permissions.refuse(sender.name, what, error, spent, envelope.size) from None
        finally:
            if not opened:
                self.discard(envelope)
        if self.observers:
            return self.execute_observed(context, function, args, kwargs, envelope, sender)
        return self.invoke(context, function, args, kwargs)

    def unpack(self, envelope: Envelope, sender: WorkerInfo) -> Any:
        began = time.thread_time()
        try:
            return self._open(envelope.message.tree, envelope, sender)
        except BackhaulError as error:
            self._permissions.note(sender.name, "a reply", error, time.thread_time() - began, envelope.size)
            raise

    def _open(self, tree: Any, envelope: Envelope, sender: WorkerInfo) -> Any:
        """The value of a tree. Raises if this peer may not send it."""
        message = envelope.message
        try:
            tensors = self._receive(envelope, sender)
            announced = {ref for ref, _ in message.refs}
            return self._codec.unpack(tree, tensors, self._permissions.names(sender.name), announced)
        finally:
            if message.refs:
                self.traffic.arrived(message.refs)

    def _load(
        self,
        mark: Mark | None,
        tensors: Tensors,
        packing: Packing,
        to: Peer,
        coded: tuple[Coded, ...] = (),
        *,
        reply: bool = True,
    ) -> Cargo:
        if claimed(tensors) > self._max_message_bytes:
            raise UnsendableError(
                f"tensors whose shapes stand for more than {self._max_message_bytes} bytes beyond their memory, "
                "because they are expanded, empty, sparse or on the meta device, are refused in a federation: send "
                "tensors that have all of their memory"
            )
        return super()._load(mark, tensors, packing, to, coded, reply=reply)

    def _checked(self, frame: Frame) -> Frame:
        if len(frame.pieces[0]) > self._max_head_bytes:
            raise UnsendableError(
                f"the values of this message take {len(frame.pieces[0])} bytes without its tensors, and a worker of a "
                f"federation takes {self._max_head_bytes}: send large data as tensors, or in several calls"
            )
        return super()._checked(frame)

    def tell_failure(self, make: Callable[..., Any], error: BaseException, to: Peer) -> Frame:
        if self.on_failure is not None:
            error = self.on_failure(error, "")
        if not isinstance(error, RefusedError):
            frames = user_frames(error.__traceback__)
            self._permissions.note_failure(
                to.peer.name, lambda: "".join(traceback.format_exception(type(error), error, frames))
            )
        args = error.args
        text = args[0] if len(args) == 1 and type(args[0]) is str else safe_str(error)
        if self.edges is not None and (crossing := self.edges.to(to.peer.name)) is not None:
            text = crossing.text_of(error, text)
        return encode(make(self._me.name, type_name(type(error)), text[:_MAX_TEXT], ""))

    def rebuild(self, envelope: Envelope, sender: WorkerInfo) -> BaseException:
        message: Failure | Failed = envelope.message
        if message.refs:
            self.discard(envelope)
        text = printable(message.text, _MAX_TEXT, lines=True)
        name = printable(message.type_name, _MAX_NAME)
        # A message about a pass may quote another worker, and the quotation may be false. So name both.
        who = sender.name if message.worker == sender.name else f"{printable(message.worker)}, says {sender.name}"
        kind = self._permissions.names(sender.name).exception(message.type_name)
        error: Any = None
        if kind is not None:
            try:
                error = kind(text)
            except Exception:  # the constructor does not accept a single text
                error = None
        if not isinstance(error, Exception):
            error = RemoteError(f"{name} on worker {who!r}: {text}", who, name)
        error.__cause__ = RemoteTraceback(who, _STAYS)
        return error  # type: ignore[no-any-return]


def _split(tree: Any) -> tuple[str, Any]:
    """The function name of a call, and the tree of ``(args, kwargs)``. Raises `ProtocolError`."""
    if type(tree) is not list or len(tree) != 4 or tree[0] != trees.TUPLE:
        raise ProtocolError("not a call")
    _, function, args, kwargs = tree
    if type(function) is not list or len(function) != 2 or function[0] != trees.NAMED or type(function[1]) is not str:
        raise ProtocolError("a call of something that is not a named function")
    if len(function[1]) > callables.MAX_NAME:
        raise ProtocolError("a call of a name that is too long")
    return function[1], [trees.TUPLE, args, kwargs]
