"""The contents of ``torch.distributed.rpc.internal``: names of calls, and the pickler that users may replace."""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from backhaul.rpc import RRef

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

_tables = threading.local()  # of the message that a thread packs or unpacks


class RPCExecMode(enum.Enum):
    """The kind of a call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A call."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """An exception, as text."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """Pickles values, with tensors and RRefs outside the pickle; the codec underneath carries those."""

    def __init__(self) -> None:
        self._dispatch_table: dict[Any, Any] = copyreg.dispatch_table.copy()
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict: dict[type[Any], Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type[Any], reducer: Callable[[Any], Any]) -> None:
        self._class_reducer_dict.setdefault(obj_class, reducer)

    @classmethod
    def _tensor_receiver(cls, tensor_index: int) -> Any:
        return _tables.received[-1][tensor_index]

    def _tensor_reducer(self, tensor: Any) -> tuple[Any, ...]:
        table = _tables.sent[-1]
        table.append(tensor)
        return _InternalRPCPickler._tensor_receiver, (len(table) - 1,)

    def _rref_reducer(self, rref: RRef[Any]) -> tuple[Any, ...]:
        rref._references.require_sendable(rref._ref)
        return self._tensor_reducer(rref)

    def serialize(self, obj: Any) -> tuple[bytes, list[Any]]:
        """Bytes, and the tensors and references that they refer to."""
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = {**self._dispatch_table, RRef: self._rref_reducer, **self._class_reducer_dict}
        stack = _tables.__dict__.setdefault("sent", [])
        stack.append([])
        try:
            pickler.dump(obj)
            return file.getvalue(), stack[-1]
        finally:
            stack.pop()

    def deserialize(self, binary_data: bytes, tensor_table: list[Any]) -> Any:
        """The value. A missing definition is returned as the AttributeError that describes it, not raised."""
        stack = _tables.__dict__.setdefault("received", [])
        stack.append(tensor_table)
        try:
            return pickle.Unpickler(io.BytesIO(binary_data)).load()
        except AttributeError as error:
            found = AttributeError(
                f"{error} Default RPC pickler does not serialize function code: define it on both workers"
            )
            found.__cause__ = error
            return found
        finally:
            stack.pop()


_internal_rpc_pickler = _InternalRPCPickler()  # a name of torch's module; it has no state


def serialize(obj: Any) -> tuple[bytes, list[Any]]:
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[Any]) -> Any:
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name of a call in profiles."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
