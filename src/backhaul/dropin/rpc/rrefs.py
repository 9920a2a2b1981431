"""RRefs with torch's behaviour: `adopt` changes ours for the whole process."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any
from weakref import WeakKeyDictionary

from backhaul.dropin.rpc.internal import RPCExecMode
from backhaul.dropin.rpc.profiling import recorded
from backhaul.errors import BackhaulError, MisuseError, RpcTimeoutError
from backhaul.refs.proxy import Proxy
from backhaul.remote_profile.caller import reported
from backhaul.rpc import RRef

_LOOK_AGAIN = 0.001
_types: WeakKeyDictionary[RRef[Any], Any] = WeakKeyDictionary()
"""Futures of the types of values, made at the first question."""

_made: WeakKeyDictionary[RRef[Any], Any] = WeakKeyDictionary()
"""Futures that complete when values of `remote` with a timeout are made."""

_ids: WeakKeyDictionary[RRef[Any], tuple[int, int]] = WeakKeyDictionary()
"""The local ids, in torch's sense, of references and their forks; made when someone reads them."""

_numbers = itertools.count()  # of these local ids

_is_confirmed = RRef.confirmed_by_owner
_to_here = RRef.to_here
_get_future = RRef._get_future
_backward = RRef.backward
_get_type = RRef._get_type
_local_value = RRef.local_value


def confirmed_by_owner(self: RRef[Any]) -> bool:
    """As in torch, a function finds the references in its arguments confirmed: waits if necessary."""
    deadline = time.monotonic() + self._references.patience
    while not (confirmed := _is_confirmed(self)) and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN)
    return confirmed


def backward(self: RRef[Any], dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
    """As in torch, only the owner may omit the context."""
    if dist_autograd_ctx_id == -1 and not self.is_owner():
        raise MisuseError("User RRefs require 'dist_autograd_ctx_id' to be specified")
    _backward(self, dist_autograd_ctx_id, retain_graph)


def get_type(self: RRef[Any], timeout: float = -1.0, blocking: bool = True) -> Any:
    """As in torch, the owner is asked only once."""
    future = _types.get(self)
    if future is None:
        with recorded(RPCExecMode.ASYNC, "_rref_typeof_on_owner", self.owner().name):
            future = _get_type(self, timeout, False)
        _types[self] = future
    if not blocking:
        return future
    try:
        return future.wait()
    except BaseException:
        _types.pop(self, None)
        raise


def _local_ids(rref: RRef[Any]) -> tuple[int, int]:
    """Ids in torch's form. They are unique in this process, and mean nothing to other workers."""
    found = _ids.get(rref)
    if found is None:
        first = next(_numbers)
        found = _ids[rref] = first, first if rref.is_owner() else next(_numbers)
    return found


def _unique_id(rref: RRef[Any], local_id: int) -> str:
    return f"GloballyUniqueId(created_on={rref._ref.creator}, local_id={local_id})"


def text(self: RRef[Any]) -> str:
    """The reference in torch's notation."""
    own, fork = _local_ids(self)
    if self.is_owner():
        return f"OwnerRRef({_unique_id(self, own)})"
    return f"UserRRef(RRefId = {_unique_id(self, own)}, ForkId = {_unique_id(self, fork)})"


def local_value(self: RRef[Any]) -> Any:
    """As in torch, with torch's message for a reference that lives elsewhere."""
    if self.is_owner():
        return _local_value(self)
    own, fork = _local_ids(self)
    me, owner = self._references.me, self.owner()
    raise MisuseError(
        f"For UserRRef(rref_id={_unique_id(self, own)}, fork_id={_unique_id(self, fork)}), can't call localValue() on "
        f"user WorkerInfo(id={me.id}, name={me.name}). Call it on owner WorkerInfo(id={owner.id}, name={owner.name})"
    )


def require_python(function: Any, value: Any) -> None:
    """Raise if a TorchScript function has an RRef in its arguments. Its worker could only report that later."""
    if isinstance(value, RRef):
        raise MisuseError(
            f"{function.name}, a TorchScript function, cannot take {value!r}: RRefs in TorchScript go through torch's "
            "own RPC agent, written in C++, and backhaul.dropin has replaced it. Give it the value, or call a "
            "Python function that takes the RRef and passes on its local_value()"
        )
    if isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            require_python(function, each)


def made_within(timeout: float, rref: RRef[Any]) -> RRef[Any]:
    """As in torch, the timeout of `remote` covers making the value, not only the arrival of the request."""
    if timeout > 0 and not rref.is_owner():
        with contextlib.suppress(BackhaulError):  # the request did not arrive: using the reference raises
            _made[rref] = _get_type(rref, timeout, False)
    return rref


def to_here(self: RRef[Any], timeout: float = -1.0) -> Any:
    """As in torch, a value that was not made in time is not available any more."""
    made = _made.get(self)
    if made is not None and made.done():
        try:
            made.wait()
        except RpcTimeoutError as error:
            raise RpcTimeoutError(f"RRef creation by rpc.remote has failed: {error}") from error
        except Exception:
            _made.pop(self, None)
    return _to_here(self, timeout)


def get_future(self: RRef[Any]) -> Any:
    """As in torch, a future that completes when the value is made, or at the timeout of `remote`."""
    return _made.get(self) or _get_future(self)


def get_profiling_future(self: RRef[Any]) -> Any:
    """A future that completes when the profile has the owner's events for making the value."""
    future = reported(self)
    if future is None:
        raise MisuseError(
            "Profiling future has not been set: no profiler was on when rpc.remote made this reference, or the owner "
            "does not report on it"
        )
    return future


class RRefProxy(Proxy):
    """As in torch, a method that the value's type lacks raises at once."""

    def __getattr__(self, name: str) -> Any:
        type_ = self._rref._get_type(self._timeout)
        if not hasattr(type_, name):
            raise AttributeError(f"type object {type_.__name__!r} has no attribute {name!r}")
        method, timeout = super().__getattr__(name), self._timeout

        def call(*args: Any, **kwargs: Any) -> Any:
            value = method(*args, **kwargs)
            return made_within(timeout, value) if isinstance(value, RRef) else value

        return call


def _proxy(call: str) -> Any:
    def api(self: RRef[Any], timeout: float = -1.0) -> RRefProxy:
        return RRefProxy(self, getattr(self._references, call), timeout)

    return api


def _serialize(self: RRef[Any]) -> tuple[Any, ...]:
    """Check that the reference can be sent, and return its id. Torch would return what it sends."""
    self._references.require_sendable(self._ref)
    return self._ref.owner, self._ref.creator, self._ref.number


def adopt() -> None:
    """Give all references this behaviour from now on."""
    members = {
        "confirmed_by_owner": confirmed_by_owner,
        "backward": backward,
        "_get_future": get_future,
        "to_here": to_here,
        "local_value": local_value,
        "__str__": text,
        "_get_type": get_type,
        "_get_profiling_future": get_profiling_future,
        "_serialize": _serialize,
        "rpc_sync": _proxy("call_method"),
        "rpc_async": _proxy("call_method_async"),
        "remote": _proxy("remote_method"),
    }
    for name, member in members.items():
        setattr(RRef, name, member)
