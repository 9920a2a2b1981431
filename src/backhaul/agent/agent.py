"""Agent: makes calls to other workers and serves theirs.

It ties the parts of this package together and holds what they share: the outbound connection
to each peer, made when it is first needed; the inbound ones; the table of message handlers.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from backhaul.agent.completions import Completions
from backhaul.agent.door import PATIENCE, Door
from backhaul.agent.execution import Execution
from backhaul.agent.farewell import Counts, Farewell
from backhaul.agent.federated import FederatedExecution
from backhaul.agent.future import Future
from backhaul.agent.guard import Guard
from backhaul.agent.membership import Member, Membership
from backhaul.agent.news import News
from backhaul.agent.outbound import Outbound
from backhaul.agent.pool import Pool
from backhaul.agent.serving import Handler, Inbound, Serving
from backhaul.agent.watch import Watch
from backhaul.errors import (
    AuthenticationError,
    BackhaulError,
    ForkedError,
    NotInitializedError,
    ProtocolError,
    RpcTimeoutError,
    WorkerLostError,
)
from backhaul.ids import WorkerInfo
from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello, Welcome
from backhaul.security.permissions import Permissions
from backhaul.transport.base import Channel, ChannelClosed, Listener, Transport
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Call, Goodbye, Mark, Ping, Refs, Result
from backhaul.wire.values import Codec

_log = logging.getLogger(__name__)

_CUT_OFF_SECONDS = 2.0
_GREET_SECONDS = 2.0

To = str | int | WorkerInfo


class Agent:
    """One worker's calls, both ways. All methods are thread-safe."""

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
        """Listen, and join the group. ``enter`` runs first on every thread that this agent makes."""
        self.options = options
        self.membership = membership
        self._codec = codec
        self._transport = transport
        self.closed = threading.Event()
        self.forked = False
        self._routes: dict[To, Outbound] = {}
        self._connecting: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        self.on_connection_ended: list[Callable[[object, WorkerInfo, WorkerLostError], None]] = []
        """Called, on any thread, when a connection breaks, or its peer dies or leaves. For upper layers."""

        self.on_connected: list[Callable[[WorkerInfo], None]] = []
        """Called, on any thread, when there is a new connection with a peer. For upper layers."""
        self.idle_checks: list[Callable[[], bool]] = []
        """Whether nothing of an upper layer's is under way; asked before a graceful shutdown ends."""

        self._listeners: Sequence[Listener] = transport.listen()
        try:
            if name is not None:  # what is wrong with its credentials, the others need not hear of
                transport.introduce(name)
            self.me = membership.join(name, rank, transport.addresses, deadline, check)
            if name is None:
                transport.introduce(self.me.name)
        except BaseException:
            transport.close()
            raise
        label = f"backhaul-{self.me.name}"
        self.pool = Pool(label, options.num_worker_threads, enter)
        self.watch = Watch(label + "-watch", options.unresponsive_after, enter)
        self.watch.trim = transport.trim
        transport.when_used(self.watch.wake)
        limits = options.limits
        self.permissions = Permissions(self.me.name, options.message_limit)
        """What peers may do, in a federation."""
        self.execution: Execution
        if options.trust == "federation":
            self.execution = FederatedExecution(
                self.me, codec, enter, options.message_limit, options.head_limit, self.permissions
            )
        else:
            self.execution = Execution(self.me, codec, enter, options.message_limit)
        self.serving = Serving(self.pool, self.watch, self._handle, options.num_worker_threads)
        if limits is not None:
            self.serving.guard = Guard(self.execution, self.permissions, limits)
        self.serving.on_end = self._inbound_ended
        self.completions = Completions(self.pool, self.watch)
        self.watch.ticks = [self.serving.tick, self.completions.tick]
        self.farewell = Farewell(self, self.closed)
        self._door = Door(label + "-door", self._judge, self._let_in, patience=min(PATIENCE, options.connect_timeout))
        self._handlers: dict[type[Any], Handler] = {
            Call: self._on_call,
            Ping: lambda inbound, envelope: encode(Result(envelope.message.id, None)),
            Goodbye: self._on_goodbye,
        }
        for message, handler in self.farewell.handlers():
            self.register(message, handler)
        _abandon_in_children(self)

    def start(self) -> None:
        """Let peers in. A newcomer to a dynamic group greets all others, so that they know of it without the store."""
        self.watch.start()
        for listener in self._listeners:
            self.watch.add_listener(listener, self._door.visit)
        if self.membership.dynamic:
            for info in self.members():
                try:
                    if info != self.me:
                        self._connect(self.membership.find(info), time.monotonic() + _GREET_SECONDS)
                except BackhaulError as error:
                    _log.info("could not greet %s: %s", info.name, error)

    def register(self, message: type[Any], handler: Handler) -> None:
        """Let ``handler`` have the messages of this type. It must not raise, nor wait for peers."""
        self._handlers[message] = handler

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

        ``timeout`` is in seconds, or infinity; ``what`` is what errors call it.
        """
        outbound = self._route(to, time.monotonic() + timeout)
        make = self._request(outbound, function, args, kwargs)
        deadline = time.monotonic() + timeout  # packing the arguments is no waiting
        return outbound.ask(make, what or name_for_people(function), deadline, is_call=True)

    def call_async(
        self,
        to: To,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float,
        what: str | None = None,
    ) -> Future[Any]:
        """A future of that value."""
        outbound = self._route(to, time.monotonic() + timeout)
        make = self._request(outbound, function, args, kwargs)
        deadline = time.monotonic() + timeout  # packing the arguments is no waiting
        return outbound.ask_async(make, what or name_for_people(function), deadline, is_call=True)

    def ask_now(self, to: WorkerInfo, make: Callable[[int, Mark | None], Any], what: str, timeout: float) -> Any:
        """The answer to a request that counts as a call of the user's: ``make(id, mark)`` is the message."""
        deadline = time.monotonic() + timeout
        mark, _ = self.execution.recording.asking((), to)
        return self._route(to, deadline).ask(lambda id: encode(make(id, mark)), what, deadline, is_call=True)

    def post(self, to: To, message: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a one-way message. Raises `WorkerLostError`."""
        self._post(self._route(to, math.inf), encode(message, tensors))

    def post_frame(self, to: To, frame: Frame) -> None:
        """Send a one-way message that is encoded. Raises `WorkerLostError`."""
        self._post(self._route(to, math.inf), frame)

    def listen(self, to: To, about: int) -> News | None:
        """Let a worker's messages about this come where its replies do, for the calling thread; None if that cannot be.

        For a thread that is about to wait for them, and tells the worker so.
        """
        return self._route(to, math.inf).listen(about)

    def hear(self, news: News) -> None:
        """Handle what has arrived, one message after the other."""
        while news.arrived:
            envelope = news.arrived.popleft()
            # An outbound has a peer, too, and they look at nothing else.
            self._handlers[type(envelope.message)](news.outbound, envelope)  # type: ignore[arg-type]

    def is_connected(self, rank: int) -> bool:
        """Whether messages to that worker can leave without a new connection."""
        outbound = self._routes.get(rank)
        return outbound is not None and outbound.lost is None

    def post_failure(self, to: To, make: Callable[..., Any], error: BaseException) -> None:
        """Send a one-way message about an exception; see `Execution.tell_failure`. Raises `WorkerLostError`."""
        outbound = self._route(to, math.inf)
        self._post(outbound, self.execution.tell_failure(make, error, outbound))

    def _post(self, outbound: Outbound, frame: Frame) -> None:
        try:
            outbound.post(frame)
        except (ChannelClosed, ProtocolError) as error:
            outbound.lose(error)
            lost = outbound.lost or error
            raise WorkerLostError(str(lost), outbound.peer.name) from error

    def prepare(
        self, to: WorkerInfo, value: Any, make: Callable[[int, Any, Refs, Mark | None], Any]
    ) -> Callable[[str, float], Future[Any]]:
        """Pack a value; returns a function that sends ``make(id, tree, refs, mark)`` as a call of the user's.

        That function takes what to call it in errors, and a timeout. What cannot travel raises here.
        """
        tree, packing = self._codec.pack(value, ("func", "args", "kwargs"))

        def send(what: str, timeout: float) -> Future[Any]:
            deadline = time.monotonic() + timeout
            outbound = self._route(to, deadline)

            def frame(id: int) -> Frame:
                return self.execution.request(lambda refs, mark: make(id, tree, refs, mark), packing, outbound)

            return outbound.ask_async(frame, what, deadline, is_call=True)

        return send

    def is_reachable(self, info: WorkerInfo, seconds: float) -> bool:
        """Whether a worker answers, over a new connection if need be. Raises if it does not."""
        self.insist(info, Ping, "an answer", seconds)
        return True

    def insist(self, to: WorkerInfo, make: Callable[[int], Any], what: str, seconds: float) -> Any:
        """The answer to a question of our own, over new connections if need be. Raises if nobody is there."""
        deadline = time.monotonic() + seconds
        while True:
            outbound = self._route(to, deadline)
            try:
                return outbound.ask(lambda id: encode(make(id)), what, deadline, is_call=False)
            except WorkerLostError:
                # That connection has broken, too. Only one that cannot be made says that nobody is there.
                if time.monotonic() >= deadline:
                    raise

    def cut_off(self, rank: int) -> None:
        """End the connections with a worker that is as good as dead; returns when they have been read to the end."""
        outbound = self._routes.get(rank)
        if outbound is not None:
            name = outbound.peer.name
            outbound.lose(WorkerLostError(f"worker {name!r} is lost: it does not answer", name))
        for inbound in list(self.serving.inbounds):
            if inbound.peer.id == rank:
                inbound.shutdown()
                inbound.over.wait(_CUT_OFF_SECONDS)

    def ask_later(self, to: WorkerInfo, make: Callable[[int], Any], what: str, deadline: float) -> Future[Any]:
        """A future of the answer to a question of our own: ``make(id)`` is the message."""
        outbound = self._route(to, deadline)
        return outbound.ask_async(lambda id: encode(make(id)), what, deadline, is_call=False)

    def _request(
        self, to: Outbound, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[int], Frame]:
        tree, packing = self._codec.pack_call(function, tuple(args), dict(kwargs))
        return lambda id: self.execution.request(lambda refs, mark: Call(id, tree, refs, mark), packing, to)

    def _route(self, to: To, deadline: float) -> Outbound:
        outbound = self._routes.get(to)
        if outbound is not None and outbound.lost is None and not self.forked:
            return outbound
        self.require_usable()
        member = self.membership.find(to)
        try:
            outbound = self._connect(member, deadline)
        except WorkerLostError:
            # In a dynamic group another may have taken its place since this worker heard of it.
            successor = self.membership.successor(member)
            if successor is None:
                raise
            outbound = self._connect(successor, deadline)
        self._routes[to] = outbound
        return outbound

    def require_usable(self) -> None:
        """Raise unless calls can be made with this agent."""
        if self.forked:
            raise ForkedError(
                f"this process was forked from worker {self.me.name!r} and cannot use its connections; call init_rpc "
                "in the child with a name of its own, or start processes with the 'spawn' method"
            )
        if self.closed.is_set():
            raise NotInitializedError(f"worker {self.me.name!r} has been shut down; call init_rpc again")

    def _connect(self, member: Member, deadline: float) -> Outbound:
        with self._lock:
            connecting = self._connecting.setdefault(member.id, threading.Lock())
        handling = self.serving.about_to_wait()
        try:
            with connecting:
                outbound = self._routes.get(member.id)
                if outbound is None or outbound.lost is not None:
                    outbound = self._routes[member.id] = self._open(member, deadline)
                    if self.closed.is_set():  # close() may not have seen it
                        outbound.lose(
                            WorkerLostError(f"worker {self.me.name!r} (this one) was shut down", self.me.name)
                        )
                return outbound
        finally:
            if handling:
                self.serving.resumed()

    def _open(self, member: Member, deadline: float) -> Outbound:
        hello = Hello(self.membership.group, self.me.id, self.me.name, member.id, self._transport.addresses)
        deadline = min(deadline, time.monotonic() + self.options.connect_timeout)
        try:
            channel, welcome = self._transport.connect(member.addresses, hello, deadline)
        except TimeoutError as error:
            raise RpcTimeoutError(
                f"worker {member.name!r} did not answer the greeting in time: RPC ran for more than set timeout"
            ) from error
        except (AuthenticationError, ProtocolError) as error:
            raise type(error)(f"no connection to worker {member.name!r}: {error}") from error
        except ChannelClosed as error:
            self.membership.forget(member.id)
            raise WorkerLostError(f"worker {member.name!r} cannot be reached: {error}", member.name) from error
        if (welcome.id, welcome.name) != (member.id, member.name):
            channel.close()
            raise AuthenticationError(
                f"at the address of worker {member.name!r} (rank {member.id}) answers {welcome.name!r} "
                f"(rank {welcome.id})"
            )
        for callback in list(self.on_connected):
            callback(member.info)
        return Outbound(
            member.info,
            channel,
            execution=self.execution,
            serving=self.serving,
            completions=self.completions,
            watch=self.watch,
            unresponsive_after=self.options.unresponsive_after,
            on_lost=self._outbound_lost,
        )

    def _outbound_lost(self, outbound: Outbound, error: WorkerLostError) -> None:
        self.membership.forget(outbound.peer.id)
        self._connection_ended(outbound, outbound.peer, error)

    def _connection_ended(self, connection: object, peer: WorkerInfo, error: WorkerLostError) -> None:
        if self.closed.is_set():
            return
        _log.debug("= lost %s: %s", peer.name, error)
        for callback in list(self.on_connection_ended):
            callback(connection, peer, error)

    def _handle(self, inbound: Inbound, envelope: Envelope) -> Frame | None:
        handler = self._handlers.get(type(envelope.message))
        if handler is None:
            raise ProtocolError(f"a {type(envelope.message).__name__} where requests are expected")
        return handler(inbound, envelope)

    def _on_call(self, inbound: Inbound, envelope: Envelope) -> Frame | None:
        inbound.calls_started += 1
        frame = self.execution.run(envelope, inbound, inbound.reply_late)
        if frame is not None:
            inbound.count_finished()
        return frame

    def _on_goodbye(self, inbound: Inbound, envelope: Envelope) -> None:
        inbound.said_goodbye = True
        outbound = self._routes.get(inbound.peer.id)
        self.membership.forget(inbound.peer.id)
        if outbound is not None:
            name = inbound.peer.name
            left = WorkerLostError(f"worker {name!r} has left the group", name)
            self.pool.run(lambda: outbound.lose(left))

    def _inbound_ended(self, inbound: Inbound, error: Exception) -> None:
        name = inbound.peer.name
        how = "has left the group" if inbound.said_goodbye else f"is lost: {error}"
        self._connection_ended(inbound, inbound.peer, WorkerLostError(f"worker {name!r} {how}", name))

    def _let_in(self, channel: Channel, hello: Hello) -> None:
        self.pool.run(lambda: self._welcome(channel, hello))

    def _welcome(self, channel: Channel, hello: Hello) -> None:
        self.membership.met(Member(hello.id, hello.name, hello.addresses))
        inbound = Inbound(WorkerInfo(hello.id, hello.name), channel, self.serving)
        for callback in list(self.on_connected):
            callback(inbound.peer)
        self.serving.add(inbound)
        if self.closed.is_set():
            inbound.shutdown()

    def _judge(self, hello: Hello) -> Welcome:
        me = self.me
        if hello.group != self.membership.group:
            refused = "it belongs to another group, or to an earlier one of this name"
        elif hello.to_id != me.id:
            refused = f"it looks for rank {hello.to_id}; this is rank {me.id}"
        elif not self._is_member(hello):
            refused = f"no worker {hello.name!r} of rank {hello.id} is in this group"
        elif self.closed.is_set():
            refused = "it is shutting down"
        else:
            refused = ""
        return Welcome(me.id, me.name, refused)

    def _is_member(self, hello: Hello) -> bool:
        # A newcomer to a dynamic group may be ahead of what this worker has read of the store.
        if self.membership.dynamic:
            return True
        return WorkerInfo(hello.id, hello.name) in self.membership.members()

    def members(self) -> list[WorkerInfo]:
        return self.membership.members()

    def peers_connected(self) -> bool:
        """Some other worker can still make calls to this one."""
        return any(inb.peer != self.me and not inb.said_goodbye for inb in list(self.serving.inbounds))

    def answer(self, id: int, value: Any) -> Frame:
        """The frame that answers a question of our own with a value."""
        tree, _ = self._codec.pack(value)
        return encode(Result(id, tree))

    def counts(self) -> Counts:
        """Whether all calls of this worker are settled; calls sent to, and finished for, each peer."""
        sent: dict[int, int] = {}
        settled = 0
        for outbound in self._outbounds():
            sent[outbound.peer.id] = outbound.calls_sent
            settled += outbound.calls_settled
        finished: dict[int, int] = {}
        for inbound in list(self.serving.inbounds):
            finished[inbound.peer.id] = finished.get(inbound.peer.id, 0) + inbound.calls_finished
        idle = sum(sent.values()) == settled and all(check() for check in self.idle_checks)
        return idle, sent, finished

    def idle(self) -> bool:
        """Nothing that this worker sent, or serves, is under way."""
        inbounds = list(self.serving.inbounds)
        return self.counts()[0] and all(inb.calls_started == inb.calls_finished for inb in inbounds)

    def _outbounds(self) -> list[Outbound]:
        return [out for out in set(self._routes.values()) if out.lost is None]

    def close(self, wait: float) -> None:
        """Close everything, now. Waits at most ``wait`` seconds for functions that still run here."""
        with self._lock:
            if self.closed.is_set():
                return
            self.closed.set()
        deadline = time.monotonic() + wait
        for listener in self._listeners:
            self.watch.remove_listener(listener)
        self._door.close()
        gone = WorkerLostError(f"worker {self.me.name!r} (this one) was shut down", self.me.name)
        for outbound in self._outbounds():
            outbound.say_goodbye()
            outbound.lose(gone)
        for inbound in list(self.serving.inbounds):
            inbound.shutdown()
        self.execution.close(deadline - time.monotonic())
        self.watch.close()
        self.pool.close(deadline)
        self._transport.close()

    def abandon(self) -> None:
        """In a forked child: give up the descriptors, so that peers notice when the parent dies."""
        self.forked = True
        for outbound in set(self._routes.values()):
            outbound.abandon()
        for inbound in list(self.serving.inbounds):
            inbound.abandon()
        self.watch.abandon()
        self._door.abandon()
        self._transport.abandon()


def _abandon_in_children(agent: Agent) -> None:
    reference = weakref.ref(agent)

    def abandon() -> None:
        living = reference()
        if living is not None and not living.closed.is_set():
            living.abandon()

    os.register_at_fork(after_in_child=abandon)


def name_for_people(function: Any) -> str:
    """What error messages call it."""
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)
