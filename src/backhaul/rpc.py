"""Remote procedure calls: run a function on another worker and get its value.

The names and meanings are those of ``torch.distributed.rpc``. The functions forward to the
current `Worker` (see `backhaul.worker`); all of them may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from backhaul import functions
from backhaul.agent.future import Future
from backhaul.agent.presence import Subscription
from backhaul.agent.retrying import Retry
from backhaul.agent.routes import To
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
    """True: Backhaul needs no optional part of torch's build."""
    return True


@eager
def init_rpc(
    name: str | None = None,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcOptions | None = None,
) -> None:
    """Make this process a worker: join the group and start to serve calls.

    Returns when every worker of the group has joined. Name, rank and world size
    come from the launcher (``backhaul run``, ``torchrun``) if they are not given; the default name is
    ``worker<rank>``. A rank without a world size makes a dynamic group, which workers join
    and leave at any time. Call `shutdown` at the end.

    Raises `OptionError` for a name or a rank that is taken or out of range, and `RpcTimeoutError`, with
    the missing ranks, if some workers do not join in time.
    """
    options = RpcOptions() if rpc_backend_options is None else rpc_backend_options
    if backend is not None and not isinstance(backend, BackendType):
        raise OptionError(f"backend {backend!r} must be a BackendType; leave it out for the only one")
    if not isinstance(options, RpcOptions):
        raise OptionError(f"rpc_backend_options must be RpcOptions, not {type(options).__name__}")
    become_worker(place_from(name, rank, world_size), options)


@eager
def debug_info() -> dict[str, Any]:
    """This worker's current figures: calls, bytes, threads, references, contexts. See docs/seeing.md.

    Counters only grow, so the difference of two readings gives a rate.
    """
    return current().inspection.debug_info()


@eager
def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave the group; `init_rpc` works again afterwards.

    A graceful shutdown returns when every worker has called it and all calls have finished, nested
    calls included. In a dynamic group it waits only for this worker's own calls. A shutdown that is not
    graceful is local and immediate: unfinished calls fail, here and at the peers. ``timeout`` is in seconds; 0
    means no limit. A dead peer does not delay the others.

    Raises `WorkerLostError` if a worker died first, and `RpcTimeoutError` at the timeout. This
    worker is shut down in any case.
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

    ``to`` is a name, a rank or a `WorkerInfo`; a worker may call itself. ``func`` is anything that worker ``to`` can
    import by module and name: a function, a class, a method, a torch operator, a
    TorchScript function. An ``async def`` function is awaited. ``timeout`` is in seconds; 0 means no
    limit, and a negative value means the option ``rpc_timeout``.

    ``retry`` declares that ``func`` may run more than once. If the worker is lost, the call is repeated when the
    worker or its replacement answers: up to ``retry`` times, or as a `Retry` says. ``timeout`` applies to each
    attempt. A call whose ``func`` raises is never repeated. Inside an autograd context ``retry`` raises `MisuseError`.

    Raises the exception that ``func`` raised, with the remote traceback as its cause; `RpcTimeoutError`;
    `WorkerLostError` if the worker dies; `UnsendableError` if an argument or the result cannot be sent.
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

    The arguments are as in `rpc_sync`. When this returns, tensors among them have been sent and may be
    changed, unless ``retry`` is given. The future raises errors of the other worker, as `rpc_sync` would. Errors on
    this side (an unknown worker, an unsendable value, an unreachable worker) are raised at once. With ``retry``, the
    call waits for an unreachable worker, and changing a tensor in the meantime is an error.
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

    Returns at once. An exception of ``func`` is raised when the reference is used. ``timeout`` limits
    how long the owner may take to confirm that it has received the request.
    """
    return current().remote(to, func, args, kwargs, timeout)


def on_lost(callback: Callable[[WorkerInfo, WorkerLostError], Any]) -> Subscription:
    """Call ``callback(worker, cause)`` whenever this worker loses another one, until the subscription is removed.

    A worker is lost when it has ended or left, or is unreachable. A connection that breaks and is restored
    at once is not a loss. ``cause`` is the error that calls to the worker raise. The worker may come back: see
    `on_joined`. Callbacks run one after the other on a thread of this worker, and may make calls. Exceptions of
    callbacks are logged.
    """
    return current().agent.presence.on_lost(callback)


def on_joined(callback: Callable[[WorkerInfo], Any]) -> Subscription:
    """Call ``callback(worker)`` whenever a worker joins, until the subscription is removed.

    The callback runs for a newcomer to a dynamic group, for a process that replaces a lost worker under its name,
    and for a lost worker that is reachable again. Callbacks run on the same thread as those of `on_lost`, in the order
    of events.
    """
    return current().agent.presence.on_joined(callback)


@eager
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """The `WorkerInfo` of the worker with that name or rank; without one, of this worker."""
    return current().get_worker_info(worker_name)


@eager
def get_worker_infos() -> list[WorkerInfo]:
    """All workers of the group, by rank. In a dynamic group: the workers known now."""
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
