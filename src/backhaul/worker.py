"""Worker: the one place where all layers are wired together; and the current worker.

All state of a worker hangs off its `Worker`. The functions of `backhaul.rpc` use the current
worker: a context variable, which the threads of a worker set to that worker. The variable falls
back to the process's own worker, made by `init_rpc`. So one process can host many workers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from backhaul import current_worker as _current_worker
from backhaul.agent.agent import Agent
from backhaul.agent.farewell import LAST, WORK
from backhaul.agent.future import Future
from backhaul.agent.logs import set_up_logging
from backhaul.agent.membership import Membership
from backhaul.agent.retrying import Retry, Retrying
from backhaul.agent.retrying import checked as checked_retry
from backhaul.agent.routes import To
from backhaul.autograd.autograd import Autograd
from backhaul.autograd.context_id import ContextId
from backhaul.autograd.contexts import current_context as _autograd_context
from backhaul.errors import LeakError, MisuseError, OptionError, RpcTimeoutError, WorkerLostError
from backhaul.ids import WorkerInfo
from backhaul.inspection.inspection import Inspection
from backhaul.options import RpcOptions
from backhaul.refs.references import References
from backhaul.refs.rref import RRef
from backhaul.remote_profile import caller as _profiled
from backhaul.remote_profile import profilers as _profilers
from backhaul.remote_profile.callee import Reports
from backhaul.rendezvous import Place, meet, meet_in
from backhaul.transport.base import Addresses, Transport
from backhaul.transport.stream import StreamTransport
from backhaul.wire.values import Codec

if TYPE_CHECKING:
    from torch.distributed import Store

UNSET_TIMEOUT = -1.0
_profiler_is_on = _profilers.is_on
_JOIN_SECONDS = 60.0
_IDLE_POLL = 0.005
# How long to wait for threads that still run the user's functions.
_CLOSE = 5.0
_HURRIED_CLOSE = 0.2


class Worker:
    """A member of a group: makes calls to the others and serves theirs. Thread-safe."""

    def __init__(
        self,
        name: str | None,
        rank: int | None,
        world_size: int | None,
        *,
        store: Store,
        options: RpcOptions | None = None,
        transport: Transport | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Join the group that meets in ``store``, and start to serve calls.

        ``world_size`` None means a dynamic group, in which ``rank`` may be None too. ``check`` is called
        repeatedly while this worker waits for the others; it may raise to end the wait.
        """
        self.options = RpcOptions() if options is None else options
        trust = self.options.policy
        trust.check_group(world_size)
        self.codec = Codec(bounded=not trust.believes, max_bytes=self.options.message_limit)
        self.before_call: list[Callable[[WorkerInfo, Any, Sequence[Any], Mapping[str, Any]], None]] = []
        """Called with the target, the function, args and kwargs before each call leaves."""
        if transport is None:
            transport = StreamTransport(trust.transport_options(self.options))
        self._agent = Agent(
            name,
            rank,
            options=self.options,
            transport=transport,
            membership=Membership(store, world_size, self._is_there(transport)),
            codec=self.codec,
            enter=self._enter,
            deadline=time.monotonic() + max(_JOIN_SECONDS, self.options.rpc_timeout),
            check=check,
        )
        self.references = References(self._agent, self.codec, self._seconds)
        self._retrying = Retrying(self._agent)
        self.release: Callable[[], None] = self.references.release_all
        """Called by a graceful shutdown to release the references that this worker holds."""
        self.autograd = Autograd(self._agent)
        self.codec.register(ContextId, "context", lambda id, _: int(id), lambda id, _: ContextId.lift(id))
        self.inspection = Inspection(self._agent, self.references, self.autograd)
        self._agent.inspect = self.inspection
        self.reports = Reports()
        """For torch's profilers of other workers: how values that they asked for were made here."""
        _profilers.install()
        self._agent.start()
        try:
            self.inspection.start(self.options)
        except BaseException:
            self.shutdown(graceful=False)
            raise

    def __repr__(self) -> str:
        return f"<Worker {self.info.name!r} rank {self.info.id}>"

    @property
    def info(self) -> WorkerInfo:
        return self._agent.me

    @property
    def agent(self) -> Agent:
        return self._agent

    @property
    def closed(self) -> bool:
        return self._agent.closed.is_set()

    @property
    def forked(self) -> bool:
        """True in a forked child, where this copy of the worker is unusable."""
        return self._agent.forked

    def rpc_sync(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
        *,
        retry: Retry | int = 0,
    ) -> Any:
        """The value of ``func(*args, **kwargs)`` on worker ``to``. See `backhaul.rpc.rpc_sync`."""
        if retry:
            return self._retry(self._retrying.call, retry, self.rpc_sync, to, func, args, kwargs, timeout)
        args, kwargs = _check_arguments(args, kwargs)
        if self.before_call:
            self._prepare(to, func, args, kwargs)
        if _profiler_is_on():
            return _profiled.call(self._agent, _profiled.Request(to, func, args, kwargs, self._seconds(timeout)))
        return self._agent.call(to, func, args, kwargs, self._seconds(timeout))

    def rpc_async(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
        *,
        retry: Retry | int = 0,
    ) -> Future[Any]:
        """A future of the value of ``func(*args, **kwargs)`` on worker ``to``. See `backhaul.rpc.rpc_async`."""
        if retry:
            return self._retry(  # type: ignore[no-any-return]
                self._retrying.call_async, retry, self.rpc_async, to, func, args, kwargs, timeout
            )
        args, kwargs = _check_arguments(args, kwargs)
        if self.before_call:
            self._prepare(to, func, args, kwargs)
        if _profiler_is_on():
            return _profiled.call_async(self._agent, _profiled.Request(to, func, args, kwargs, self._seconds(timeout)))
        return self._agent.call_async(to, func, args, kwargs, self._seconds(timeout))

    def _retry(
        self, how: Callable[..., Any], retry: Retry | int, call: Callable[..., Any], to: To, *request: Any
    ) -> Any:
        policy = checked_retry(retry)
        if _autograd_context.get() is not None:
            raise MisuseError(
                "retry= repeats single calls, but inside a distributed autograd context the lost attempt may have "
                "recorded a part of the graph. Leave out retry here, and repeat the whole `with context()` block "
                "when it raises WorkerLostError, as checkpoint.Resume does"
            )
        return how(to, policy, request, lambda: call(to, *request))

    def remote(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> RRef[Any]:
        """A reference to the value of ``func(*args, **kwargs)``, which stays on ``to``. See `backhaul.rpc.remote`."""
        args, kwargs = _check_arguments(args, kwargs)
        if self.before_call:
            self._prepare(to, func, args, kwargs)
        self._agent.require_usable()
        if _profiler_is_on():
            request = _profiled.Request(to, func, args, kwargs, self._seconds(timeout))
            return _profiled.remote(self._agent, self.references.remote, request, timeout)
        return self.references.remote(to, func, args, kwargs, timeout)

    def expose(self, obj: Any = None, *, to: str | Sequence[str] = "*") -> Any:
        """Let the other members of a federation call a function, or use a class, on this worker.

        Like `backhaul.rpc.expose`, but for this worker alone. If both expose the same name, this entry takes
        precedence.
        """
        return self._agent.permissions.exposed.expose(obj, to)

    def get_worker_info(self, name: To | None = None) -> WorkerInfo:
        """This worker, or the worker with that name or rank."""
        self._agent.require_usable()
        return self.info if name is None else self._agent.membership.find(name).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All members known to this worker, by rank."""
        if self._agent.membership.dynamic:
            self._agent.membership.refresh()
        return self._agent.members()

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """Leave the group. See `backhaul.rpc.shutdown`."""
        self._agent.require_usable()
        seconds = _check_seconds("timeout", timeout)
        deadline = time.monotonic() + (seconds or math.inf)
        self._agent.leaving = True
        lost: list[str] = []
        leaks: list[str] = []
        patience = _HURRIED_CLOSE
        try:
            if graceful and self._agent.membership.dynamic:
                self._finish(deadline)
            elif graceful:
                lost = self._agent.farewell.run(WORK, deadline)
                self.references.expect_none()
                self.release()
                lost = sorted({*lost, *self._agent.farewell.run(LAST, deadline)})
                leaks = [] if lost else self.references.leaks()
            if graceful and not lost:
                patience = _CLOSE  # no call is running, so the threads end at once
        finally:
            self._agent.execution.closing.set()
            self._agent.membership.leave(ended=graceful)
            self.references.close()
            self.autograd.close()
            self.inspection.close()
            self._agent.close(patience)
        if lost:
            names = ", ".join(map(repr, lost))
            raise WorkerLostError(
                f"graceful shutdown: worker {names} died, or left without shutdown(); the others are done", lost[0]
            )
        if leaks and self.options.forbid_leaks:
            raise LeakError(
                f"Leaking RRef: after all references were released, other workers still hold {'; '.join(leaks)}"
            )

    @contextmanager
    def as_current(self) -> Iterator[Worker]:
        """Make this the current worker of the block, for the functions of `backhaul.rpc`."""
        token = _current_worker.variable.set(self)
        try:
            yield self
        finally:
            _current_worker.variable.reset(token)

    def _is_there(self, transport: Transport) -> Callable[[Addresses], bool]:
        return lambda addresses: transport.is_listening(addresses, time.monotonic() + self.options.connect_timeout)

    def _enter(self) -> None:
        _current_worker.variable.set(self)
        if self._agent.devices is not None:
            self._agent.devices.streams.adopt_thread()
        # A thread adopts the value of torch.set_num_threads when it first asks for it, and small operations never ask.
        torch.get_num_threads()

    def _prepare(self, to: To, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        info = self._agent.membership.find(to).info
        for hook in list(self.before_call):
            hook(info, func, args, kwargs)

    def _seconds(self, timeout: float) -> float:
        """A timeout in torch's convention, in seconds: negative means the default, 0 means no limit."""
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout != timeout:
            raise OptionError(f"timeout {timeout!r} must be in seconds: 0 means no limit, a negative value the default")
        if timeout < 0:
            timeout = self.options.rpc_timeout
        return timeout or math.inf

    def _finish(self, deadline: float) -> None:
        """Wait until all calls that this worker sent or serves have finished."""
        while not self._agent.idle():
            if time.monotonic() > deadline:
                raise RpcTimeoutError("graceful shutdown: this worker's work was still going on at the deadline")
            self._agent.closed.wait(_IDLE_POLL)


def _check_arguments(
    args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if args is not None and not isinstance(args, tuple | list):
        raise OptionError(f"args must be a tuple, as in args=(x,), not a {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError(f"kwargs must be a dict, not a {type(kwargs).__name__}")
    return args or (), kwargs or {}


def _check_seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise OptionError(f"{name}: {value!r} must be a number of seconds; 0 means no limit")
    return float(value)


_becoming = threading.Lock()  # a process becomes one worker


def current() -> Worker:
    """The current worker. Raises `NotInitializedError` if there is none."""
    return _current_worker.get()


def current_or_none() -> Worker | None:
    return _current_worker.get_or_none()


def become_worker(
    place: Place, options: RpcOptions, check: Callable[[], None] = lambda: None, store: Store | None = None
) -> None:
    """Make this process the worker at ``place``. See `backhaul.rpc.init_rpc`.

    ``store`` belongs to the engine that started the workers. Without it, the option ``init_method`` decides.
    """
    with _becoming:
        existing = current_or_none()
        if existing is not None and not existing.forked:
            raise MisuseError(
                f"RPC is already initialized here, as worker {existing.info.name!r}; call shutdown() first"
            )
        set_up_logging(place.name)
        if store is None:
            store = meet(options.init_method, place, max(_JOIN_SECONDS, options.rpc_timeout))
        else:
            store = meet_in(store, place)
        _current_worker.set_process_worker(Worker(*place, store=store, options=options, check=check))


def set_process_worker(worker: Worker | None) -> None:
    """Make ``worker`` the one that this process falls back to."""
    _current_worker.set_process_worker(worker)
