"""References: hands out the values behind references, to the RRefs of this worker and to peers.

`holdings` keeps track of which worker holds which reference, and for how long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backhaul.agent.agent import Agent
from backhaul.agent.execution import ASYNC_MARK, Execution, follow, name_for_people
from backhaul.agent.federated import FederatedExecution
from backhaul.agent.future import Future
from backhaul.agent.line import Line
from backhaul.agent.routes import To
from backhaul.devices.streams import on_gpus, use
from backhaul.eager import eager
from backhaul.errors import (
    BackhaulError,
    MisuseError,
    NotInitializedError,
    ProtocolError,
    RpcTimeoutError,
    WorkerLostError,
)
from backhaul.ids import RefId, WorkerInfo
from backhaul.refs.cell import Cell
from backhaul.refs.holdings import Holdings
from backhaul.refs.proxy import invoke, invoke_found, type_of
from backhaul.refs.rref import RRef
from backhaul.remote_profile import caller as profiled
from backhaul.remote_profile.profilers import is_on as profiler_is_on
from backhaul.wire import callables
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Create, Fetch, Mark
from backhaul.wire.trees import Packing, Unpacking
from backhaul.wire.values import Codec


class References:
    """One worker's references, to its own values and to those of others. Thread-safe."""

    def __init__(self, agent: Agent, codec: Codec, seconds: Callable[[float], float]) -> None:
        """``seconds`` turns a user's timeout into seconds."""
        self.me = agent.me
        self.execution: Execution = agent.execution
        self._agent = agent
        self._seconds = seconds
        self._holdings = Holdings(agent)
        codec.register(RRef, "rref", self._lower, self._lift)
        agent.register(Create, self._on_create)
        agent.register(Fetch, self._on_fetch)
        if isinstance(agent.execution, FederatedExecution):
            agent.execution.entries[callables.name_of(invoke)] = self._invoke_for

    # Requests of RRefs.

    def keep(self, value: Any) -> RefId:
        """Keep a value of this worker, and return a reference to it. The caller has one copy: see `dropped`."""
        cell = Cell()
        self._set(cell, value)
        return self._holdings.keep(cell)

    def _set(self, cell: Cell, value: Any) -> None:
        if self._agent.devices is not None:
            self._agent.devices.streams.leave_word()
        cell.set(value)

    def dropped(self, ref: RefId) -> None:
        """A copy of a reference is gone. Called by finalizers."""
        self._holdings.dropped(ref)

    def owner(self, ref: RefId) -> WorkerInfo:
        return self.me if ref.owner == self.me.id else self._holdings.info(ref.owner)

    def is_confirmed(self, ref: RefId) -> bool:
        return self._holdings.is_confirmed(ref)

    def describe(self, ref: RefId) -> str:
        """The state of a reference, as text for people."""
        return self._holdings.describe(ref)

    def creation(self, ref: RefId) -> Future[Any]:
        return self._holdings.creation(ref)

    def fetch(self, ref: RefId, timeout: float) -> Any:
        """The value if this worker owns it, else a copy. Waits until the value has been made: see `RRef.to_here`."""
        seconds = self._seconds(timeout)
        if ref.owner == self.me.id:
            return self._local(ref, time.monotonic() + seconds)
        if self._holdings.closed:
            raise NotInitializedError(
                f"worker {self.me.name!r} has been shut down, and its references with it. Cannot call to_here() on "
                "it after deletion. Call init_rpc again"
            )
        self._await_creation(ref, seconds)
        self._holdings.require(ref)
        to = self._holdings.info(ref.owner)

        def fetch(id: int, mark: Mark | None) -> Fetch:
            self._holdings.require(ref)  # again: meanwhile another process may have taken the owner's place
            return Fetch(id, ref, mark)

        return self._agent.ask_now(to, fetch, f"to_here of {ref}", seconds)

    def local_value(self, ref: RefId) -> Any:
        return self._local(ref, time.monotonic() + self._seconds(-1.0))

    def use(self, ref: RefId, run: Callable[[Cell], None]) -> None:
        """Call ``run(cell)`` once a value of ours has been made: now, or later on a thread of the pool."""
        cell = self._holdings.cell(ref)
        devices = self._agent.devices

        def run_here() -> None:
            if devices is None:
                run(cell)
                return
            with devices.streams.handling():
                run(cell)

        if cell.when_ready(lambda: self._agent.pool.run(run_here)):
            run_here()

    def remote(
        self,
        to: To,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float,
        what: str | None = None,
    ) -> RRef[Any]:
        """A reference to the value of a function that ``to`` runs. Error messages call the function ``what``."""
        owner = self._agent.membership.find(to).info
        unreachable: WorkerLostError | RpcTimeoutError | None = None
        if not self._agent.is_connected(owner.id):
            # The reference belongs to the process that gets the request. This may replace the process that is known.
            try:
                owner = self._agent.reach(to, self._seconds(timeout))
            except (WorkerLostError, RpcTimeoutError) as error:
                unreachable = error
        ref = self._holdings.new_ref(owner)
        packed = self._agent.pack(function, tuple(args), dict(kwargs))
        self._holdings.creating(ref)
        rref: RRef[Any] = RRef._made(self, ref)
        try:
            if unreachable is not None:
                raise unreachable
            answer = self._agent.create(owner, ref, packed, what or name_for_people(function), self._seconds(timeout))
        except (WorkerLostError, RpcTimeoutError) as error:
            self._holdings.created(ref, error)
            return rref
        except BaseException:
            self._holdings.never_asked(ref)
            raise
        self._holdings.asked(ref, answer)
        return rref

    @eager
    def call_method(self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float) -> Any:
        self._await_creation(rref._ref, self._seconds(timeout))
        self._holdings.require(rref._ref)
        arguments = (rref, name, args, kwargs)
        if profiler_is_on():
            return profiled.call(self._agent, self._request(rref, arguments, timeout))
        return self._agent.call(rref.owner(), invoke, arguments, {}, self._seconds(timeout), f"method {name}")

    @eager
    def call_method_async(self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float) -> Future[Any]:
        self._holdings.require(rref._ref)
        arguments = (rref, name, args, kwargs)
        if profiler_is_on():
            return profiled.call_async(self._agent, self._request(rref, arguments, timeout))
        return self._agent.call_async(rref.owner(), invoke, arguments, {}, self._seconds(timeout), f"method {name}")

    @eager
    def remote_method(self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float) -> RRef[Any]:
        self._holdings.require(rref._ref)
        if profiler_is_on():
            request = self._request(rref, (rref, name, args, kwargs), timeout)
            return profiled.remote(self._agent, self.remote, request, timeout)
        return self.remote(rref.owner(), invoke, (rref, name, args, kwargs), {}, timeout)

    def _request(self, rref: RRef[Any], arguments: tuple[Any, ...], timeout: float) -> profiled.Request:
        """The description of a method call, for a profiler."""
        name, seconds = arguments[1], self._seconds(timeout)
        return profiled.Request(rref.owner(), invoke, arguments, {}, seconds, f"method {name}", f"RRef.{name}")

    def type_of(self, rref: RRef[Any], timeout: float, blocking: bool) -> Any:
        self._holdings.require(rref._ref)
        call = self._agent.call if blocking else self._agent.call_async
        return call(rref.owner(), type_of, (rref,), {}, self._seconds(timeout))

    def _local(self, ref: RefId, deadline: float) -> Any:
        cell = self._holdings.cell(ref)
        if not cell.ready:
            handling = self._agent.serving.about_to_wait()
            try:
                with self._agent.activity.waits(lambda: {"kind": "value", "ref": str(ref)}):
                    made = cell.wait(deadline)
                if not made:
                    raise RpcTimeoutError(
                        f"RPC ran for more than set timeout: the value {ref} has not been made yet; call again to "
                        "keep waiting"
                    )
            finally:
                if handling:
                    self._agent.serving.resumed()
        value = cell.get()
        if self._agent.devices is not None:
            self._agent.devices.streams.catch_up()
            use(on_gpus(value))
        return value

    def _await_creation(self, ref: RefId, seconds: float) -> None:
        """Wait until the owner has confirmed a creation of ours. Raises the error of a creation that failed.

        Without this wait, a request for a value whose creation was lost on the way would wait on the owner for it.
        """
        creation = self._holdings.answer(ref)
        if creation is None:
            return
        if seconds >= self._seconds(-1.0):
            creation.wait()
            return
        over = threading.Event()
        creation.when_done(lambda _: over.set())
        if not over.wait(seconds):
            raise RpcTimeoutError(
                f"RPC ran for more than set timeout: the owner of {ref} has not confirmed its creation yet; call again "
                "to keep waiting"
            )
        creation.wait()

    # RRefs in messages.

    def _lower(self, rref: RRef[Any], packing: Packing) -> Any:
        if rref._references is not self:
            raise MisuseError(f"{rref!r} belongs to another worker of this process, or to one that was shut down")
        self._holdings.require(rref._ref)
        ref = rref._ref
        packing.attach(ref, rref)
        return ref.owner, ref.creator, ref.number, ref.life

    def _lift(self, value: Any, unpacking: Unpacking) -> RRef[Any]:
        if type(value) is not tuple or len(value) not in (3, 4) or not all(type(part) is int for part in value):
            raise ProtocolError("a value that is not a reference, in the place of a reference")
        ref = RefId(*value)
        known = unpacking.announced is None or ref in unpacking.announced
        if not known or not self._holdings.hold(ref):
            raise ProtocolError(f"a reference {ref} that the message does not announce")
        return RRef._made(self, ref)

    # Requests of peers.

    def _on_create(self, line: Line, envelope: Envelope) -> Frame | None:
        message: Create = envelope.message
        ref, peer = message.ref, line.peer
        if ref.owner != self.me.id or ref.creator != peer.id:
            raise ProtocolError(f"a creation of {ref} by rank {peer.id} on rank {self.me.id}")
        cell = self._holdings.own_for(ref, peer)
        size = envelope.size
        line.calls_started += 1
        # Reply before the function runs: the creator waits only until it is listed, and it is listed now.
        line.reply(self._agent.answer(message.id, None))
        try:
            value, later = self.execution.execute(envelope, peer)
        except BaseException as error:
            cell.fail(error, self.me.name)
            line.count_finished(size)
            return None
        if later:
            follow(value, lambda done: self._finish(cell, done, line, size))
        else:
            self._set(cell, value)
            line.count_finished(size)
        return None

    def _finish(self, cell: Cell, done: Any, line: Line, size: int) -> None:
        try:
            value = done.value()
        except BaseException as error:
            cell.fail(error, self.me.name)
        else:
            self._set(cell, value)
        line.count_finished(size)

    def _on_fetch(self, line: Line, envelope: Envelope) -> Frame | None:
        id, ref, asked = envelope.message.id, envelope.message.ref, envelope.message.mark
        line.calls_started += 1
        try:
            cell = self._holdings.cell(ref)
        except BackhaulError as error:
            line.count_finished(releases=False)
            return self.execution.failure(id, error, line)

        def answer() -> Frame:
            try:
                if (error := cell.error) is not None:
                    return self.execution.failure(id, error, line)
                return self.execution.result(id, cell.get(), line, asked)
            except BaseException as unsendable:
                return self.execution.failure(id, unsendable, line)
            finally:
                line.count_finished(releases=False)

        if cell.when_ready(lambda: line.send_late(answer(), releases=1)):
            if self._agent.devices is not None:
                self._agent.devices.streams.catch_up()  # the value may have been made after this request began
            return answer()
        return None

    def _invoke_for(self, peer: WorkerInfo) -> Callable[..., Future[Any]]:
        """`invoke` for a peer of a federation: it calls only methods that are exposed to the peer.

        The value must be one that was given to the peer.
        """
        permissions = self._agent.permissions

        def method(value: Any, name: str) -> Callable[..., Any]:
            found = permissions.names(peer.name).method(value, name)
            if found is None:
                what = f"the method {name!r} of a {type(value).__qualname__}"
                raise permissions.refuse(peer.name, what, "no method of that name is exposed to this peer")
            return found

        def invoke_method(*arguments: Any) -> Future[Any]:
            kinds = tuple(map(type, arguments))
            if kinds != (RRef, str, tuple, dict) or not arguments[0].is_owner():
                raise permissions.refuse(peer.name, "a method", f"arguments of the types {kinds}")
            return invoke_found(arguments[0], lambda value: method(value, arguments[1]), *arguments[2:])

        setattr(invoke_method, ASYNC_MARK, True)
        return invoke_method

    # The end.

    def release_all(self) -> None:
        """Give up all references to values of others, even if there are copies here, because the group ends."""
        self._holdings.release_all()

    def expect_none(self) -> None:
        """All workers give up their references now. From now on `leaks` includes what a worker still holds when it
        leaves."""
        self._holdings.expect_none()

    def leaks(self) -> list[str]:
        """Values of ours for which other workers are listed, as text. Call it when no worker should be listed."""
        return self._holdings.leaks()

    @property
    def patience(self) -> float:
        """The option ``rpc_timeout``, in seconds, or infinity."""
        return self._seconds(-1.0)

    def require_sendable(self, ref: RefId) -> None:
        """Raise if a reference cannot be sent: this worker has been shut down, or the value is lost."""
        if self._holdings.closed:
            raise NotInitializedError(
                f"Cannot call fork an UserRRef after deletion: worker {self.me.name!r} has been shut down"
            )
        self._holdings.require(ref)

    def close(self) -> None:
        self._holdings.close()

    def counts(self) -> dict[str, int]:
        """The sizes of the tables, for tests and tools."""
        return self._holdings.counts()
