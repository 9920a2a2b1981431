"""RRef: a reference to a value on another worker, or on this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from backhaul import current_worker
from backhaul.eager import eager
from backhaul.errors import MisuseError, NotInitializedError, UnsendableError
from backhaul.ids import RefId, WorkerInfo
from backhaul.refs.proxy import Proxy
from backhaul.remote_profile import caller as profiled
from backhaul.remote_profile.profilers import is_on as profiler_is_on

if TYPE_CHECKING:
    from backhaul.refs.references import References

T = TypeVar("T")

DEFAULT_TIMEOUT = -1.0


class RRef(Generic[T]):
    """A reference to a value that lives on its *owner*.

    ``RRef(value)`` makes a reference to a value of this worker. `backhaul.rpc.remote` makes a reference to a value that
    another worker makes. You can send a reference in calls and results, alone or inside other values. The owner
    keeps the value as long as any worker has a reference to it.

    Methods are thread-safe. Timeouts are in seconds; 0 means no limit, and a negative value means the option
    ``rpc_timeout``. ``RRef(value)`` raises `NotInitializedError` before ``init_rpc``.
    """

    __slots__ = ("__weakref__", "_ref", "_references")

    def __init__(self, value: T, type_hint: Any = None) -> None:
        """``type_hint`` is torch's, for TorchScript, and changes nothing here."""
        worker = current_worker.get_or_none()
        if worker is None:
            raise NotInitializedError(
                "Current RPC agent is not set! Did you initialize the RPC framework? Call init_rpc before RRef(value)"
            )
        references: References = worker.references
        self._references = references
        self._ref = references.keep(value)

    @classmethod
    def _made(cls, references: References, ref: RefId) -> RRef[T]:
        """One more copy of a reference. ``references`` must have counted it already."""
        self = cls.__new__(cls)
        self._references = references
        self._ref = ref
        return self

    def __del__(self) -> None:
        # A finalizer may run on any thread, at any point, while any lock is held. So it only queues the reference.
        references = getattr(self, "_references", None)
        if references is not None and hasattr(self, "_ref"):
            references.dropped(self._ref)

    def __repr__(self) -> str:
        kind = "OwnerRRef" if self.is_owner() else "UserRRef"
        return f"<{kind} {self._ref} on {self.owner_name()!r}: {self._references.describe(self._ref)}>"

    @eager
    def owner(self) -> WorkerInfo:
        """The worker on which the value lives."""
        return self._references.owner(self._ref)

    @eager
    def owner_name(self) -> str:
        return self.owner().name

    @eager
    def is_owner(self) -> bool:
        """Whether the value lives on this worker."""
        return self._ref.owner == self._references.me.id

    @eager
    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this worker's reference. True on the owner itself."""
        return self._references.is_confirmed(self._ref)

    @eager
    def to_here(self, timeout: float = DEFAULT_TIMEOUT) -> T:
        """A copy of the value; on the owner, the value itself.

        Waits until the value has been made. Raises the exception of the function that failed to make it,
        `RpcTimeoutError`, or `WorkerLostError` if the owner is lost.
        """
        if profiler_is_on():
            return profiled.to_here(self, timeout)  # type: ignore[no-any-return]
        return self._references.fetch(self._ref, timeout)  # type: ignore[no-any-return]

    @eager
    def local_value(self) -> T:
        """The value itself, on the owner. Waits until the value has been made.

        Raises `MisuseError` on any other worker, the exception of the function that failed to make the value, or
        `RpcTimeoutError`.
        """
        if not self.is_owner():
            raise MisuseError(
                f"local_value() of a reference to a value on {self.owner_name()!r}: only the owner has the value "
                "itself. Use to_here() for a copy, or rpc_sync() to call a method of it"
            )
        return self._references.local_value(self._ref)  # type: ignore[no-any-return]

    @eager
    def rpc_sync(self, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """A proxy: ``rref.rpc_sync().method(x)`` runs the method on the owner and returns its value."""
        return Proxy(self, self._references.call_method, timeout)

    @eager
    def rpc_async(self, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """A proxy like that of `rpc_sync`, but its methods return futures."""
        return Proxy(self, self._references.call_method_async, timeout)

    @eager
    def remote(self, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """A proxy like that of `rpc_sync`, but its methods return references to their values, on the same owner."""
        return Proxy(self, self._references.remote_method, timeout)

    @eager
    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass with the value, a tensor, as its root.

        With the id of a context, the pass is distributed: see `backhaul.autograd.backward`. Without an id, it runs on
        the owner only, like ``value.backward()`` there.
        """
        current_worker.get().autograd.backward_of(self, dist_autograd_ctx_id, retain_graph)

    def _get_type(self, timeout: float = DEFAULT_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value; a future of it unless ``blocking``."""
        return self._references.type_of(self, timeout, blocking)

    def _get_future(self) -> Any:
        """A future that is done when the owner has confirmed the creation."""
        return self._references.creation(self._ref)

    def __reduce__(self) -> NoReturn:
        raise UnsendableError(
            "Can not pickle rref in python pickler: an RRef can only be sent to other workers, in the arguments and "
            "results of calls. Pickled by other means it would not keep its value alive"
        )
