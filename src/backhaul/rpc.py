"""Remote procedure calls: run a function on another worker and get its value.

The names and meanings are those of ``torch.distributed.rpc``. The functions forward to the
current `Worker` (see `backhaul.worker`); all of them may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from backhaul import functions
from backhaul.agent.agent import To
from backhaul.agent.future import Future
from backhaul.agent.presence import Subscription
from backhaul.agent.retrying import Retry
from backhaul.eager import eager
from backhaul.errors import (
    AuthenticationError,
    BackhaulError,
    ForkedError,
    LeakError,
    MisuseError,
    NotInitializedError,
    OptionError,
    PartialError,
    ProtocolError,
    QuotaError,
    RefusedError,
    RemoteError,
    RpcTimeoutError,
    UnknownWorkerError,
    UnsendableError,
    WorkerLostError,
    WorkerSuspectedError,
    WorkerUnresponsiveError,
)
from backhaul.ids import WorkerInfo
from backhaul.options import BackendType, Quotas, RpcOptions
from backhaul.refs.rref import RRef
from backhaul.rendezvous import place_from
from backhaul.security.tls import TLS
from backhaul.trust.exposure import expose
from backhaul.worker import UNSET_TIMEOUT, become_worker, current, set_process_worker

T = TypeVar("T")


def is_available() -> bool:
    """True: there is nothing to be built in."""
    return True


@eager
def init_rpc(
    name: str | None = None,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcOptions | None = None,
) -> None:
    """Make this process a worker: meet the others, and start to serve.

    Returns when every worker of the group has come. Name, rank and world size are
    taken from the launcher (``backhaul run``, ``torchrun``) when they are not given; the name is then
    ``worker<rank>``. A rank without a world size makes a dynamic group, which workers join
    and leave at any time. Call `shutdown` at the end.

    Raises `OptionError` for a name or a rank that is taken or out of range, and `RpcTimeoutError`
    naming the ranks that did not come.
    """
    options = RpcOptions() if rpc_backend_options is None else rpc_backend_options
    if backend is not None and not isinstance(backend, BackendType):
        raise OptionError(f"backend {backend!r} must be a BackendType; leave it out for the only one")
    if not isinstance(options, RpcOptions):
        raise OptionError(f"rpc_backend_options must be RpcOptions, not {type(options).__name__}")
    become_worker(place_from(name, rank, world_size), options)


@eager
def debug_info() -> dict[str, Any]:
    """The figures of this worker now: calls, bytes, threads, references, contexts. See docs/seeing.md.

    Counters only grow, so that two of these make rates.
    """
    return current().inspection.debug_info()


@eager
def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave the group; `init_rpc` works again afterwards.

    With ``graceful`` it returns when every worker has called it and all work is over, nested
    work included; in a dynamic group, when this worker's own work is. Without, it is local
    and at once: calls under way fail, here and at the peers. ``timeout`` is in seconds, 0 meaning
    no limit. A dead peer holds nobody up.

    Raises `WorkerLostError` if a worker died first, and `RpcTimeoutError` at the timeout; this
    worker is down in any case.
    """
    worker = current()
    try:
        worker.shutdown(graceful, timeout)
    finally:
        if worker.closed:
            set_process_worker(None)


@eager
def rpc_sync(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
    *,
    retry: Retry | int = 0,
) -> T:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and return its value.

    ``to`` is a name, a rank or a `WorkerInfo`, this worker included. ``func`` is anything that can be
    found by its module and name there: a function, a class, a method, a torch operator, a
    TorchScript function; an ``async def`` function is awaited. ``timeout`` is in seconds; 0 means no
    limit and a negative value the option ``rpc_timeout``.

    ``retry`` declares that ``func`` may run more than once: if the worker is lost, the call is repeated that many
    times, or as a `Retry` says, when the worker or its replacement answers. ``timeout`` is that of each attempt. What
    ``func`` raises is never repeated. Inside an autograd context ``retry`` is refused.

    Raises what ``func`` raised there, with the traceback there as its cause; `RpcTimeoutError`;
    `WorkerLostError` if the worker dies; `UnsendableError` if something cannot travel.
    """
    return current().rpc_sync(to, func, args, kwargs, timeout, retry=retry)  # type: ignore[no-any-return]


@eager
def rpc_async(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
    *,
    retry: Retry | int = 0,
) -> Future[T]:
    """Start ``func(*args, **kwargs)`` on worker ``to`` and return a future of its value.

    The arguments are as in `rpc_sync`. The tensors among them have been sent, and may be
    changed, when this returns, unless there is a ``retry``. What `rpc_sync` raises from there, the future raises; what
    is wrong here (an unknown worker, an unsendable value, a worker that cannot be reached) is raised at once. With a
    ``retry``, a worker that cannot be reached is waited for, and a tensor that was changed meanwhile is an error.
    """
    return current().rpc_async(to, func, args, kwargs, timeout, retry=retry)


@eager
def remote(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[T]:
    """Start ``func(*args, **kwargs)`` on worker ``to``, leave its value there, and return a reference to it.

    Returns at once. What ``func`` raises there is raised when the reference is used. ``timeout`` limits
    how long the owner may take to confirm that it has the request.
    """
    return current().remote(to, func, args, kwargs, timeout)


def on_lost(callback: Callable[[WorkerInfo, WorkerLostError], Any]) -> Subscription:
    """Have ``callback(worker, cause)`` called whenever this worker loses another one, until the result is removed.

    A worker is lost when it is known to have ended or left, or cannot be reached; a connection that breaks and is made
    again at once is no loss. ``cause`` is what its calls raise. The worker may come back: see `on_joined`. Callbacks
    run one after the other on a thread of this worker's, and may make calls; what they raise is logged.
    """
    return current().agent.presence.on_lost(callback)


def on_joined(callback: Callable[[WorkerInfo], Any]) -> Subscription:
    """Have ``callback(worker)`` called whenever a worker joins, until the result is removed.

    It is called for a newcomer to a dynamic group, for a process that takes the place of a lost worker under its name,
    and for a lost worker that can be reached again. Callbacks are run as those of `on_lost`, in order with them.
    """
    return current().agent.presence.on_joined(callback)


@eager
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """The `WorkerInfo` of the worker of that name or rank, or of this one."""
    return current().get_worker_info(worker_name)


@eager
def get_worker_infos() -> list[WorkerInfo]:
    """All workers of the group, by rank; of a dynamic group, those that are known now."""
    return current().get_worker_infos()


__all__ = [  # noqa: RUF022 in the order of sorted()
    "AuthenticationError",
    "BackendType",
    "BackhaulError",
    "ForkedError",
    "Future",
    "LeakError",
    "MisuseError",
    "NotInitializedError",
    "OptionError",
    "PartialError",
    "ProtocolError",
    "QuotaError",
    "Quotas",
    "RRef",
    "RefusedError",
    "RemoteError",
    "Retry",
    "RpcOptions",
    "RpcTimeoutError",
    "TLS",
    "UnknownWorkerError",
    "UnsendableError",
    "WorkerInfo",
    "WorkerLostError",
    "WorkerSuspectedError",
    "WorkerUnresponsiveError",
    "expose",
    "functions",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "on_joined",
    "on_lost",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
