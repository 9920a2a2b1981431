"""Agent: one worker's end of all connections. It makes calls to other workers and serves theirs.

The agent ties the parts of this package together and holds what they share, such as the table of message handlers.
`routes` has the links with the peers, and `outgoing` what this worker sends on them.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from backhaul.agent.accounts import Accounts
from backhaul.agent.activity import Activity
from backhaul.agent.completions import Completions
from backhaul.agent.connecting import Connecting, shut_down
from backhaul.agent.endings import Ending, Endings
from backhaul.agent.execution import Execution
from backhaul.agent.farewell import Counts, Farewell
from backhaul.agent.fates import Fates
from backhaul.agent.federated import FederatedExecution
from backhaul.agent.future import Future
from backhaul.agent.line import Line
from backhaul.agent.listening import Listeners
from backhaul.agent.losses import Losses
from backhaul.agent.member import Member
from backhaul.agent.membership import Membership
from backhaul.agent.observing import Observers
from backhaul.agent.outgoing import Outgoing
from backhaul.agent.pool import Pool
from backhaul.agent.presence import Presence
from backhaul.agent.reception import Reception
from backhaul.agent.serving import Handler, Serving
from backhaul.agent.waiting import Vigils
from backhaul.agent.watch import Watch
from backhaul.devices.maps import check as check_maps
from backhaul.devices.staging import WorkerDevices, needs_devices, own_devices
from backhaul.edges.crossing import Edges
from backhaul.errors import MisuseError, OptionError, ProtocolError, WorkerLostError
from backhaul.ids import GUEST, Addresses, WorkerInfo
from backhaul.options import RpcOptions
from backhaul.transport.awake import most_awake
from backhaul.transport.base import Listener, Transport
from backhaul.trust.guard import Guard
from backhaul.trust.penalties import Penalties
from backhaul.trust.permissions import Permissions, Stamps
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Call, Failure, Goodbye, Inspect, Ping, Result
from backhaul.wire.values import Codec

_BREACHES = 16
_BREACH_SECONDS = 4.0
_FOR_GUESTS = (Inspect, Ping)


class Agent(Outgoing):
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
        self.transport = transport
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
            me = membership.join(name, rank, transport.addresses, deadline, check, mine)
            if name is None:
                transport.introduce(me.name)
            devices = _find_devices(me, membership)
        except BaseException:
            self.endings.close()
            transport.close()
            raise
        observers = Observers()
        self.activity = Activity()
        self.accounts = Accounts()
        self.activity.lines = self.accounts.lines
        label = f"backhaul-{me.name}"
        self.pool = Pool(label, options.num_worker_threads, enter)
        self.watch = Watch(label + "-watch", options.unresponsive_after, enter)
        self.watch.trim = transport.trim
        transport.when_used(self.watch.wake)
        limits = options.limits
        self.permissions = Permissions(me.name, options.message_limit)
        """What each peer may do in a federation."""
        execution: Execution
        if self.trust.runs_any_function:
            execution = Execution(me, codec, enter, options.message_limit)
        else:
            execution = FederatedExecution(
                me, codec, enter, options.message_limit, options.head_limit, self.permissions
            )
        execution.devices = devices
        if options.edges:
            execution.edges = Edges(me, options.edges)
            self.on_connection_ended.append(execution.edges.lost)
        execution.observers = observers
        execution.activity = self.activity
        execution.accounts = self.accounts
        serving = Serving(
            self.pool,
            self.watch,
            self._handle,
            options.num_worker_threads,
            observers,
            self.activity,
            options.max_unsent_bytes,
            options.unresponsive_after,
            most_awake(options.busy_poll),
        )
        if limits is not None:
            serving.guard = Guard(execution, self.permissions, limits)
        lock = threading.Lock()
        self._losses = Losses(self, lock)
        serving.on_end = self._losses.served_ended
        super().__init__(
            me,
            membership,
            Connecting(self, self._losses),
            serving,
            lock,
            codec=codec,
            execution=execution,
            observers=observers,
            devices=devices,
        )
        self._handlers: dict[type[Any], Handler] = {}
        self.completions = Completions(self.pool, self.watch, observers)
        self.presence = Presence(self.completions.add, {info.id for info in self.members()})
        self.leaving = False
        """This worker has been told to shut down, so peers that leave are not reported."""
        self.vigils = Vigils(most_awake(options.busy_poll))
        self.listeners = Listeners(serving, self.watch, self.vigils, self._lines_to, self._handlers)
        self.watch.ticks = [serving.tick, self.completions.tick, self.listeners.tick]
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

    def how_ended(self, info: WorkerInfo) -> str | None:
        """How the process of a worker ended. None unless the machine, the launcher or the engine says that it ended."""
        return self._losses.how_ended(info)

    def is_elsewhere(self, info: WorkerInfo) -> bool:
        """Whether a worker is known to be on another machine."""
        return self._losses.is_elsewhere(info)

    def is_replaced(self, info: WorkerInfo) -> bool:
        """Whether the launcher or engine replaces the process of a dead worker; True once the replacement has come."""
        return self._losses.is_replaced(info)

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


def _find_devices(me: WorkerInfo, membership: Membership) -> WorkerDevices | None:
    """The GPUs that tensors in messages may be on. None if no worker has a device map."""
    found = membership.devices()
    if not needs_devices(found):
        return None
    if membership.dynamic:
        raise OptionError("device maps need a group whose members are known: give world_size")
    check_maps(found)
    devices = WorkerDevices(me.name, found)
    # A class attribute, so all agents of this process share it. See `Future.devices`.
    Future.devices = tuple(sorted({*Future.devices, *devices.streams.devices}))
    return devices


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
