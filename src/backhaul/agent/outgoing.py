"""Outgoing: the calls, internal requests and one-way messages that this worker sends.

- A **call** runs a function of the user on another worker. It is counted, and observers and tracers see it.
- An **internal request** is a message that is answered: `ask_now`, `ask_later`, `insist`.
- A **one-way message** is posted.

Each method finds the route, makes the message and its frame, and hands the frame to the line (`calling`).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from backhaul.agent import autocast
from backhaul.agent.calling import Calling
from backhaul.agent.execution import Execution, name_for_people
from backhaul.agent.future import Future
from backhaul.agent.line import Line
from backhaul.agent.link import may_be_awaited
from backhaul.agent.observing import Asked, Encoded, Issued, Observers, Packed
from backhaul.agent.routes import Routes, To
from backhaul.agent.tracing import Span, spanning, spanning_future
from backhaul.devices.staging import Gradients, WorkerDevices
from backhaul.errors import ProtocolError, WorkerLostError
from backhaul.ids import RefId, WorkerInfo
from backhaul.transport.base import ChannelClosed
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Call, Create, Mark, Ping
from backhaul.wire.trees import Packing
from backhaul.wire.values import Codec

if TYPE_CHECKING:
    from backhaul.agent.connecting import Connecting
    from backhaul.agent.membership import Membership
    from backhaul.agent.serving import Serving

PackedCall = tuple[Any, Packing]
"""The tree of a call, and the state that holds its tensors and references."""

T = TypeVar("T")


class Outgoing(Routes):
    """What one worker sends to others. All methods are thread-safe."""

    def __init__(
        self,
        me: WorkerInfo,
        membership: Membership,
        connecting: Connecting,
        serving: Serving,
        lock: threading.Lock,
        *,
        codec: Codec,
        execution: Execution,
        observers: Observers,
        devices: WorkerDevices | None,
    ) -> None:
        super().__init__(me, membership, connecting, serving, lock)
        self._codec = codec
        self.execution = execution
        self.observers = observers
        """The observers that receive this agent's events."""
        self.devices = devices
        """The GPUs that tensors in messages may be on. None if no worker has a device map."""
        self._ids = itertools.count(1)  # request ids, over all lines: an id and this worker's name identify a call

    # Calls.

    def call(
        self,
        to: To,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float,
        what: str | None = None,
    ) -> Any:
        """The value of ``function(*args, **kwargs)`` on worker ``to``.

        ``timeout`` is in seconds, or infinity. ``what`` names the call in errors.
        """
        name = what or name_for_people(function)
        if self.observers:
            return self._observed(Calling.ask, spanning, to, function, args, kwargs, timeout, name)
        line = self._route(to, time.monotonic() + timeout)
        id = next(self._ids)
        frame = self._call_frame(id, line, self._codec.pack_call(function, tuple(args), dict(kwargs)))
        # The timeout starts here, so that packing the arguments does not count.
        return line.ask(id, frame, name, time.monotonic() + timeout, is_call=True)

    def call_async(
        self,
        to: To,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float,
        what: str | None = None,
    ) -> Future[Any]:
        """`call`, but returns a future of the value."""
        name = what or name_for_people(function)
        if self.observers:
            return self._observed(Calling.ask_async, spanning_future, to, function, args, kwargs, timeout, name)
        line = self._route(to, time.monotonic() + timeout)
        id = next(self._ids)
        frame = self._call_frame(id, line, self._codec.pack_call(function, tuple(args), dict(kwargs)))
        # The timeout starts here, so that packing the arguments does not count.
        return line.ask_async(id, frame, name, time.monotonic() + timeout, is_call=True)

    def _observed(
        self,
        ask: Callable[..., T],
        within: Callable[[Span, Callable[[], T]], T],
        to: To,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float,
        name: str,
    ) -> T:
        """`call` or `call_async` with events for observers, and in a span if there is a tracer."""
        self.observers.emit(Asked(peer=str(to), what=name))
        tracing = self.execution.tracing

        def call() -> T:
            line = self._route(to, time.monotonic() + timeout)
            packed = self._codec.pack_call(function, tuple(args), dict(kwargs))
            self.observers.emit(Packed())
            id = self._issue(line, name, is_call=True)
            frame = self._encoded(self._call_frame(id, line, packed))
            return ask(line, id, frame, name, time.monotonic() + timeout, is_call=True)

        return call() if tracing is None else within(tracing.begin(name, to), call)

    def pack(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedCall:
        """Pack a call for `create`. Raises if a part of the call cannot be sent."""
        return self._codec.pack_call(function, args, kwargs)

    def create(self, to: WorkerInfo, ref: RefId, packed: PackedCall, what: str, timeout: float) -> Future[Any]:
        """Ask a worker to run a function and keep its value under ``ref``. Returns a future of the answer.

        ``what`` names the call in errors. ``timeout`` is in seconds, or infinity.
        """
        deadline = time.monotonic() + timeout
        tree, packing = packed

        def ask() -> Future[Any]:
            line = self._route(to, deadline)
            id = self._issue(line, what, is_call=True)
            cargo = self.execution.load(tree, packing, line)
            message = Create(id, ref, tree, cargo.refs, cargo.mark, autocast.here(), cargo.coded)
            frame = self.execution.frame(message, cargo)
            if self.observers:
                frame = self._encoded(frame)
            return line.ask_async(id, frame, what, deadline, is_call=True)

        tracing = self.execution.tracing
        return ask() if tracing is None else spanning_future(tracing.begin(what, to), ask)

    def ask_now(self, to: WorkerInfo, make: Callable[[int, Mark | None], Any], what: str, timeout: float) -> Any:
        """The answer to the request ``make(id, mark)``, which counts as one of the user's calls."""
        deadline = time.monotonic() + timeout
        mark, _ = self.execution.recording.asking((), to)

        def ask() -> Any:
            line = self._route(to, deadline)
            id = self._issue(line, what, is_call=True)
            return line.ask(id, self._question(make(id, mark)), what, deadline, is_call=True)

        tracing = self.execution.tracing
        return ask() if tracing is None else spanning(tracing.begin(what, to), ask)

    def _call_frame(self, id: int, to: Calling, packed: PackedCall) -> Frame:
        tree, packing = packed
        modes = autocast.here() if autocast.is_on() else ()
        cargo = self.execution.load(tree, packing, to)
        return self.execution.frame(Call(id, tree, cargo.refs, cargo.mark, modes, cargo.coded), cargo)

    # Internal requests.

    def ask_later(self, to: WorkerInfo, make: Callable[[int], Any], what: str, deadline: float) -> Future[Any]:
        """A future of the answer to the internal request ``make(id)``."""
        line = self._route(to, deadline)
        id = self._issue(line, what, is_call=False)
        return line.ask_async(id, self._question(make(id)), what, deadline, is_call=False)

    def insist(
        self, to: WorkerInfo, make: Callable[[int], Any], what: str, seconds: float, *, suspected: bool = False
    ) -> Any:
        """The answer to an internal request ``make(id)``, over new connections if necessary.

        Raises if no connection can be made. ``suspected``: try to connect even if the last attempts failed.
        """
        deadline = time.monotonic() + seconds
        while True:
            line = self._route(to, deadline, suspected=suspected)
            try:
                id = self._issue(line, what, is_call=False)
                return line.ask(id, self._question(make(id)), what, deadline, is_call=False)
            except WorkerLostError:
                # A broken connection proves nothing. Only a failure to connect means that the worker is not there.
                if time.monotonic() >= deadline:
                    raise

    def is_reachable(self, info: WorkerInfo, seconds: float) -> bool:
        """Return True if a worker answers, over a new connection if necessary. Raises if it does not answer."""
        self.insist(info, Ping, "an answer", seconds, suspected=True)
        return True

    def _issue(self, line: Calling, what: str, *, is_call: bool) -> int:
        """The id of a new request, reported to observers."""
        id = next(self._ids)
        if self.observers:
            self.observers.emit(Issued(peer=line.peer.name, call=id, what=what, is_call=is_call))
        return id

    def _question(self, message: Any) -> Frame:
        frame = encode(message)
        if self.observers:
            self.observers.emit(Encoded())
        return frame

    # One-way messages.

    def post(self, to: To, message: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a one-way message. Raises `WorkerLostError`."""
        line = self._route(to, math.inf)
        frame = encode(message, tensors, self._way_of_gradients(line, tensors))
        if self.observers:
            frame = self._encoded(frame, message)
        self._post(line, frame)

    def post_lazily(self, to: To, message: Any) -> None:
        """Send a one-way message with the next message or at the next tick. Raises `WorkerLostError`."""
        line = self._route(to, math.inf)
        frame = encode(message)
        # Not with observers: they must see messages leave in the order in which they are made.
        if self.observers or not line.post_lazily(frame):
            self._post(line, frame)

    def post_awaited(self, to: int, message: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a one-way message that a thread of worker ``to`` waits for. Raises `WorkerLostError`."""
        link = self._links.get(to)
        served = None if link is None else link.served
        staging = None
        if self.devices is not None and any(tensor.is_cuda for tensor in tensors):
            lending = None if served is None else served.channel.device_lending
            if lending is None or not lending.takes(tensors):
                self.post(to, message, tensors)
                return
            staging = Gradients(lending)
        elif self.devices is not None and self.devices.crosses:
            staging = Gradients(None)
        frame = encode(message, tensors, staging)
        awaited = served is not None and may_be_awaited(frame)
        if frame.places and not awaited:  # its segments are known only on that line
            del frame
            self.post(to, message, tensors)
            return
        if self.observers:
            frame = self._encoded(frame, message)
        if served is not None and awaited:
            served.reply(frame)
        else:
            self._post(self._route(to, math.inf), frame)

    def post_failure(self, to: To, make: Callable[..., Any], error: BaseException) -> None:
        """Send a one-way message about an exception; see `Translation.tell_failure`. Raises `WorkerLostError`."""
        line = self._route(to, math.inf)
        frame = self.execution.tell_failure(make, error, line)
        if self.observers:
            self.observers.emit(Encoded())
        self._post(line, frame)

    def _post(self, line: Calling, frame: Frame) -> None:
        try:
            line.post(frame)
        except (ChannelClosed, ProtocolError) as error:
            line.lose(error)
            lost = line.lost or error
            raise WorkerLostError(str(lost), line.peer.name) from error

    def _encoded(self, frame: Frame, message: Any = None) -> Frame:
        """Report a frame to observers. A tracer adds the mark of the message's pass or of this thread's call."""
        tracing = self.execution.tracing
        if tracing is not None:
            frame = tracing.attach(frame) if message is None else tracing.attach_pass(frame, message)
        self.observers.emit(Encoded())
        return frame

    def _way_of_gradients(self, line: Line, tensors: Sequence[torch.Tensor]) -> Gradients | None:
        if self.devices is None:
            return None
        if any(tensor.is_cuda for tensor in tensors):
            return Gradients(line.channel.device_lending)
        return Gradients(None) if self.devices.crosses else None
