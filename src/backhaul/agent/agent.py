"""Agent: makes calls to other workers and serves theirs.

The agent ties the parts of this package together and holds what they share: the link with each peer, the lines that
peers have opened, and the table of message handlers. A link's line for requests is opened on first use.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from backhaul.agent import autocast
from backhaul.agent.accounts import Accounts
from backhaul.agent.activity import Activity
from backhaul.agent.calling import Calling
from backhaul.agent.completions import Completions
from backhaul.agent.connecting import Connecting, shut_down
from backhaul.agent.endings import Ending, Endings
from backhaul.agent.execution import Execution, name_for_people
from backhaul.agent.farewell import Counts, Farewell
from backhaul.agent.fates import Fates
from backhaul.agent.federated import FederatedExecution
from backhaul.agent.future import Future
from backhaul.agent.line import Line
from backhaul.agent.link import Link
from backhaul.agent.listening import Listeners
from backhaul.agent.losses import Losses
from backhaul.agent.membership import Member, Membership
from backhaul.agent.observing import Asked, Encoded, Issued, Observers, Packed
from backhaul.agent.pool import Pool
from backhaul.agent.presence import Presence
from backhaul.agent.reading import Reading
from backhaul.agent.reception import Reception
from backhaul.agent.serving import Handler, Serving
from backhaul.agent.tracing import Span, spanning, spanning_future
from backhaul.agent.waiting import Vigils
from backhaul.agent.watch import Watch
from backhaul.devices.maps import check as check_maps
from backhaul.devices.staging import Gradients, WorkerDevices, needs_devices, own_devices
from backhaul.edges.crossing import Edges
from backhaul.errors import (
    ForkedError,
    MisuseError,
    NotInitializedError,
    OptionError,
    ProtocolError,
    WorkerLostError,
)
from backhaul.ids import GUEST, Addresses, RefId, WorkerInfo
from backhaul.options import RpcOptions
from backhaul.transport.awake import most_awake
from backhaul.transport.base import ChannelClosed, Listener, Transport
from backhaul.trust.guard import Guard
from backhaul.trust.penalties import Penalties
from backhaul.trust.permissions import Permissions, Stamps
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Call, Create, Failure, Goodbye, Inspect, Mark, Ping, Result
from backhaul.wire.trees import Packing
from backhaul.wire.values import Codec

_CUT_OFF_SECONDS = 2.0
_BREACHES = 16
_BREACH_SECONDS = 4.0
_FOR_GUESTS = (Inspect, Ping)

To = str | int | WorkerInfo
PackedCall = tuple[Any, Packing]
"""The tree of a call, and the state that holds its tensors and references."""

T = TypeVar("T")


class Agent:
    """The calls that one worker makes and serves. All methods are thread-safe."""

    def __init__(
        self,
        name: str | None,
        rank: int | None,
        *,
        options: RpcOptions,
        transport: Transport,
        membership: Membership,
        codec: Codec,
        enter: Callable[[], None],
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        """Listen, and join the group; call `start` next. ``enter`` runs first on each thread that this agent starts."""
        self.options = options
        self.trust = options.policy
        self.membership = membership
        self._codec = codec
        self.transport = transport
        self.closed = threading.Event()
        self.forked = False
        self._links: dict[int, Link] = {}
        self._routes: dict[To, Link] = {}
        self._lock = threading.Lock()
        self.on_connection_ended: list[Callable[[object, WorkerInfo, WorkerLostError], None]] = []
        """Called on any thread when a connection breaks, or when its peer dies or leaves. For upper layers."""

        self.on_connected: list[Callable[[WorkerInfo], None]] = []
        """Called on any thread when a new connection with a peer is up. For upper layers."""
        self.on_replaced: list[Callable[[Member, Member], None]] = []
        """Called on any thread with the old and the new member when a process has replaced a member. By then nothing of
        the old process is under way, and the new process has been sent nothing."""
        self.inspect: Callable[[str, Mapping[str, Any]], Any] = _nothing_to_see
        """Answers an inspection of this worker: takes a topic and arguments, returns plain data. For upper layers."""
        self.idle_checks: list[Callable[[], bool]] = []
        """Each returns True if its upper layer has nothing under way. Called before a graceful shutdown ends."""
        self.ask_engine: Callable[[Addresses], Ending | None] = lambda addresses: None
        """Returns how an unresponsive worker ended, or None if the engine that started the workers knows of no end.
        Called on a thread that may block briefly."""

        self._listeners: Sequence[Listener] = transport.listen()
        self.endings = Endings()
        """How other processes of this launch ended."""
        try:
            if name is not None:  # before it joins: bad credentials then fail before the group hears of this worker
                transport.introduce(name)
            mine = own_devices(options.device_maps, options.devices)
            self.me = membership.join(name, rank, transport.addresses, deadline, check, mine)
            if name is None:
                transport.introduce(self.me.name)
            self.devices = self._find_devices()
            """The GPUs that tensors in messages may be on. None if no worker has a device map."""
        except BaseException:
            self.endings.close()
            transport.close()
            raise
        self.observers = Observers()
        """The observers that receive this agent's events."""
        self.activity = Activity()
        self.accounts = Accounts()
        self.activity.lines = self.accounts.lines
        self._ids = itertools.count(1)  # request ids, over all lines: an id and this worker's name identify a call
        label = f"backhaul-{self.me.name}"
        self.pool = Pool(label, options.num_worker_threads, enter)
        self.watch = Watch(label + "-watch", options.unresponsive_after, enter)
        self.watch.trim = transport.trim
        transport.when_used(self.watch.wake)
        limits = options.limits
        self.permissions = Permissions(self.me.name, options.message_limit)
        """What each peer may do in a federation."""
        self.execution: Execution
        if self.trust.runs_any_function:
            self.execution = Execution(self.me, codec, enter, options.message_limit)
        else:
            self.execution = FederatedExecution(
                self.me, codec, enter, options.message_limit, options.head_limit, self.permissions
            )
        self.execution.devices = self.devices
        if options.edges:
            self.execution.edges = Edges(self.me, options.edges)
            self.on_connection_ended.append(self.execution.edges.lost)
        self.execution.observers = self.observers
        self.execution.activity = self.activity
        self.execution.accounts = self.accounts
        self.serving = Serving(
            self.pool,
            self.watch,
            self._handle,
            options.num_worker_threads,
            self.observers,
            self.activity,
            options.max_unsent_bytes,
            options.unresponsive_after,
            most_awake(options.busy_poll),
        )
        if limits is not None:
            self.serving.guard = Guard(self.execution, self.permissions, limits)
        self._losses = Losses(self, self._lock)
        self.serving.on_end = self._losses.served_ended
        self.connecting = Connecting(self, self._losses)
        self._handlers: dict[type[Any], Handler] = {}
        self.completions = Completions(self.pool, self.watch, self.observers)
        self.presence = Presence(self.completions.add, {info.id for info in self.members()})
        self.leaving = False
        """This worker has been told to shut down, so peers that leave are not reported."""
        self.vigils = Vigils(most_awake(options.busy_poll))
        self.listeners = Listeners(self.serving, self.watch, self.vigils, self._lines_to, self._handlers)
        self.watch.ticks = [self.serving.tick, self.completions.tick, self.listeners.tick]
        self.fates = Fates(self)
        """Tracks peers that cannot be reached: suspected, over, or back."""
        self.fates.on_suspected.append(self._losses.told)
        self.fates.on_over.append(lambda peer, _: membership.forget(peer.id))
        self.fates.on_over.append(lambda peer, reason: self._losses.told(peer, _lost(peer, reason)))
        self.fates.on_back.append(self.presence.came)
        self.farewell = Farewell(self, self.closed)
        self._stamps = None if self.trust.shows else Stamps()
        self.penalties = Penalties(_BREACHES, _BREACH_SECONDS)
        self._reception = Reception(self, label + "-door")
        self._handlers |= {
            Call: self._on_call,
            Ping: lambda line, envelope: encode(Result(envelope.message.id, None)),
            Goodbye: self._losses.on_goodbye,
        }
        if self.trust.shows:
            self._handlers[Inspect] = self._on_inspect
        for message, handler in self.farewell.handlers():
            self.register(message, handler)
        _abandon_in_children(self)

    def _find_devices(self) -> WorkerDevices | None:
        found = self.membership.devices()
        if not needs_devices(found):
            return None
        if self.membership.dynamic:
            raise OptionError("device maps need a group whose members are known: give world_size")
        check_maps(found)
        devices = WorkerDevices(self.me.name, found)
        # A class attribute, so all agents of this process share it. See `Future.devices`.
        Future.devices = tuple(sorted({*Future.devices, *devices.streams.devices}))
        return devices

    def start(self) -> None:
        """Let peers in. A newcomer greets all other workers, so that they learn of it without the store."""
        self.watch.start()
        for listener in self._listeners:
            self.watch.add_listener(listener, self._reception.door.visit)
        if self.endings.expected:
            self.watch.add_listener(self.endings, lambda _: self._losses.read_news())
        if self.membership.dynamic or self.membership.replaces:
            self.connecting.greet_all()

    def register(self, message: type[Any], handler: Handler) -> None:
        """Have ``handler`` handle all messages of this type. The handler must not raise and must not wait for peers."""
        self._handlers[message] = handler

    def intercept(self, message: type[Any], before: Callable[[Envelope], None]) -> Callable[[], None]:
        """Call ``before`` with each incoming message of this type. Returns a function that ends the interception.

        ``before`` must be quick and must not raise.
        """
        handler = self._handlers[message]

        def handle(line: Line, envelope: Envelope) -> Frame | None:
            before(envelope)
            return handler(line, envelope)

        def restore() -> None:
            if self._handlers[message] is handle:
                self._handlers[message] = handler

        self._handlers[message] = handle
        return restore

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

    def post(self, to: To, message: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a one-way message. Raises `WorkerLostError`."""
        line = self._route(to, math.inf)
        frame = encode(message, tensors, self._way_of_gradients(line, tensors))
        if self.observers:
            frame = self._encoded(frame, message)
        self._post(line, frame)

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

    def post_lazily(self, to: To, message: Any) -> None:
        """Send a one-way message with the next message or at the next tick. Raises `WorkerLostError`."""
        line = self._route(to, math.inf)
        frame = encode(message)
        # Not with observers: they must see messages leave in the order in which they are made.
        if self.observers or not line.post_lazily(frame):
            self._post(line, frame)

    def post_frame(self, to: To, frame: Frame) -> None:
        """Send a one-way message that is already encoded. Raises `WorkerLostError`."""
        self._post(self._route(to, math.inf), frame)

    def post_awaited(self, to: int, message: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a one-way message that a thread of worker ``to`` waits for. Raises `WorkerLostError`."""
        link = self._links.get(to)
        if self.devices is not None and any(tensor.is_cuda for tensor in tensors):
            served = None if link is None else link.served
            if served is None or served.channel.device_lending is None:
                self.post(to, message, tensors)
                return
            staging: Gradients | None = Gradients(served.channel.device_lending)
        elif self.devices is not None and self.devices.crosses:
            staging = Gradients(None)
        else:
            staging = None
        frame = encode(message, tensors, staging)
        if self.observers:
            frame = self._encoded(frame, message)
        if link is None or not link.post_awaited(frame):
            self._post(self._route(to, math.inf), frame)

    def _lines_to(self, ranks: Iterable[int]) -> list[Reading]:
        """The open lines to these workers."""
        links = map(self._links.get, ranks)
        return [line for link in links if link is not None and (line := link.open) is not None]

    def is_connected(self, rank: int) -> bool:
        """Whether messages to the worker of this rank can leave without a new connection."""
        link = self._links.get(rank)
        return link is not None and link.open is not None

    def reach(self, to: To, seconds: float) -> WorkerInfo:
        """Open the line for requests to a worker, if there is none. Returns the worker that answered."""
        return self._route(to, time.monotonic() + seconds).peer

    def connected(self, rank: int) -> WorkerInfo | None:
        """The worker of this rank if messages to it can leave without a new connection, else None."""
        link = self._links.get(rank)
        return None if link is None or link.open is None else link.peer

    def post_failure(self, to: To, make: Callable[..., Any], error: BaseException) -> None:
        """Send a one-way message about an exception; see `Execution.tell_failure`. Raises `WorkerLostError`."""
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

    def is_reachable(self, info: WorkerInfo, seconds: float) -> bool:
        """Return True if a worker answers, over a new connection if necessary. Raises if it does not answer."""
        self.insist(info, Ping, "an answer", seconds, suspected=True)
        return True

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

    def how_ended(self, info: WorkerInfo) -> str | None:
        """How the process of a worker ended. None unless the machine, the launcher or the engine says that it ended."""
        return self._losses.how_ended(info)

    def is_elsewhere(self, info: WorkerInfo) -> bool:
        """Whether a worker is known to be on another machine."""
        return self._losses.is_elsewhere(info)

    def is_replaced(self, info: WorkerInfo) -> bool:
        """Whether the launcher or engine replaces the process of a dead worker; True once the replacement has come."""
        return self._losses.is_replaced(info)

    def cut_off(self, rank: int) -> None:
        """End the connections with a worker that counts as dead. Returns when they have been read to the end."""
        link = self._links.get(rank)
        name = "" if link is None else link.peer.name
        self._end_lines(rank, WorkerLostError(f"worker {name!r} is lost: it does not answer", name))

    def _end_lines(self, rank: int, lost: WorkerLostError) -> None:
        """End the connections with a worker. Returns when they have been read to the end."""
        link = self._links.get(rank)
        if link is not None and (line := link.open) is not None:
            line.lose(lost)
        for served in self.serving.lines_of(rank):
            served.shutdown()
            served.over.wait(_CUT_OFF_SECONDS)

    def ask_later(self, to: WorkerInfo, make: Callable[[int], Any], what: str, deadline: float) -> Future[Any]:
        """A future of the answer to the internal request ``make(id)``."""
        line = self._route(to, deadline)
        id = self._issue(line, what, is_call=False)
        return line.ask_async(id, self._question(make(id)), what, deadline, is_call=False)

    def _call_frame(self, id: int, to: Calling, packed: PackedCall) -> Frame:
        tree, packing = packed
        modes = autocast.here() if autocast.is_on() else ()
        cargo = self.execution.load(tree, packing, to)
        return self.execution.frame(Call(id, tree, cargo.refs, cargo.mark, modes, cargo.coded), cargo)

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

    def _route(self, to: To, deadline: float, *, suspected: bool = False) -> Calling:
        """The line for requests to a worker, opened if necessary. ``suspected``: see `insist`."""
        link = self._routes.get(to)
        if link is not None and (line := link.open) is not None and not self.forked:
            return line
        self.require_usable()
        member = self.membership.find(to)
        try:
            line = self.connecting.line_to(member, deadline, suspected=suspected)
        except WorkerLostError:
            # Another process may have replaced the worker since this process last heard of it.
            successor = self.membership.successor(member)
            if successor is None:
                raise
            member = successor
            line = self.connecting.line_to(member, deadline)
        self._routes[to] = self._links[member.id]
        return line

    def link(self, peer: WorkerInfo) -> Link:
        """The link with a peer, created if necessary. The same rank under another name is another peer."""
        with self._lock:
            link = self._links.get(peer.id)
            if link is None or link.peer != peer:
                link = self._links[peer.id] = Link(peer)
            return link

    def known_link(self, rank: int) -> Link | None:
        """The link with the peer of this rank, if there is one."""
        return self._links.get(rank)

    def require_usable(self) -> None:
        """Raise `ForkedError` or `NotInitializedError` if this agent cannot make calls."""
        if self.forked:
            raise ForkedError(
                f"this process was forked from worker {self.me.name!r} and cannot use its connections; call init_rpc "
                "in the child with a name of its own, or start processes with the 'spawn' method"
            )
        if self.closed.is_set():
            raise NotInitializedError(f"worker {self.me.name!r} has been shut down; call init_rpc again")

    def _handle(self, line: Line, envelope: Envelope) -> Frame | None:
        handler = self._handlers.get(type(envelope.message))
        if handler is None or (line.peer.id == GUEST and type(envelope.message) not in _FOR_GUESTS):
            raise ProtocolError(f"a {type(envelope.message).__name__} where requests are expected")
        if self.devices is None:
            return handler(line, envelope)
        streams = self.devices.streams
        before = streams.enter()
        try:
            return handler(line, envelope)
        finally:
            streams.leave(before)

    def _on_call(self, line: Line, envelope: Envelope) -> Frame | None:
        line.calls_started += 1
        late = line.reply_late if self.serving.guard is None else partial(line.reply_late, size=envelope.size)
        frame = self.execution.run(envelope, line, late)
        if frame is not None:
            line.count_finished(envelope.size, releases=False)
        return frame

    def _on_inspect(self, line: Line, envelope: Envelope) -> Frame:
        message: Inspect = envelope.message
        try:
            return self.answer(message.id, self.inspect(message.topic, message.arguments))
        except Exception as error:  # an inspection is not a call, so it does not count as a failed call
            return self.execution.tell_failure(lambda *what: Failure(message.id, *what), error, line)

    def members(self) -> list[WorkerInfo]:
        return self.membership.members()

    def peers_connected(self) -> bool:
        """Whether any other worker can still make calls to this one."""
        return any(
            line.peer != self.me and line.peer.id != GUEST and not line.said_goodbye
            for line in list(self.serving.lines)
        )

    def answer(self, id: int, value: Any) -> Frame:
        """The frame that answers an internal request with a value."""
        tree, _ = self._codec.pack(value)
        return encode(Result(id, tree))

    def counts(self) -> Counts:
        """Whether all calls of this worker are settled; the calls sent to each peer; the calls finished for each peer.

        In a federation, peers must not learn how often others call. There this returns whether all calls made and
        served here are settled, and a number that changes when the counts change and reveals nothing else.
        """
        idle, sent, finished = self._counts()
        if self._stamps is None:
            return idle, sent, finished
        lines: list[Line] = [*self.serving.lines, *self.calling()]
        idle = idle and all(line.calls_started == line.calls_finished for line in lines)
        return idle, {}, {self.me.id: self._stamps.of((sorted(sent.items()), sorted(finished.items())))}

    def _counts(self) -> Counts:
        sent: dict[int, int] = {}
        finished: dict[int, int] = {}
        settled = 0
        for line in self.calling():
            sent[line.peer.id] = line.calls_sent
            settled += line.calls_settled
            finished[line.peer.id] = line.calls_finished
        for served in list(self.serving.lines):
            finished[served.peer.id] = finished.get(served.peer.id, 0) + served.calls_finished
        finished = {rank: count for rank, count in finished.items() if count}
        idle = sum(sent.values()) == settled and all(check() for check in self.idle_checks)
        return idle, sent, finished

    def idle(self) -> bool:
        """Whether nothing that this worker sent or serves is under way."""
        lines: list[Line] = [*self.serving.lines, *self.calling()]
        return self.counts()[0] and all(line.calls_started == line.calls_finished for line in lines)

    def calling(self) -> list[Calling]:
        """The lines that this worker has opened and not lost."""
        return [line for link in list(self._links.values()) if (line := link.open) is not None]

    def transport_memory(self) -> dict[str, int]:
        """Bytes of shared memory that carry large tensors."""
        return self.transport.memory()

    def close(self, wait: float) -> None:
        """Close everything now. Waits at most ``wait`` seconds for functions that still run here."""
        with self._lock:
            if self.closed.is_set():
                return
            self.closed.set()
        deadline = time.monotonic() + wait
        for listener in self._listeners:
            self.watch.remove_listener(listener)
        if self.endings.expected:
            self.watch.remove_listener(self.endings)
        self.endings.close()
        with self.presence.changed:
            self.presence.changed.notify_all()
        self._reception.door.close()
        gone = shut_down(self.me)
        for line in self.calling():
            line.say_goodbye()
            line.lose(gone)
        for served in list(self.serving.lines):
            served.say_goodbye()
            served.shutdown()
        self.fates.close()
        self.execution.close(deadline - time.monotonic())
        self.watch.close()
        self.pool.close(deadline)
        self.vigils.close()
        self.transport.close()

    def abandon(self) -> None:
        """In a forked child: close the descriptors, so that peers notice when the parent dies."""
        self.forked = True
        for line in self.calling():
            line.abandon()
        for served in list(self.serving.lines):
            served.abandon()
        self.serving.abandon()
        self.vigils.close()
        self.watch.abandon()
        self._reception.door.abandon()
        self.endings.abandon()
        self.transport.abandon()


def _lost(peer: WorkerInfo, reason: str) -> WorkerLostError:
    return WorkerLostError(f"worker {peer.name!r} is lost: {reason}", peer.name)


def _nothing_to_see(topic: str, arguments: Mapping[str, Any]) -> Any:
    raise MisuseError(f"this worker has nothing to say about {topic!r}")


def _abandon_in_children(agent: Agent) -> None:
    reference = weakref.ref(agent)

    def abandon() -> None:
        living = reference()
        if living is not None and not living.closed.is_set():
            living.abandon()

    os.register_at_fork(after_in_child=abandon)
