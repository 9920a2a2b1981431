"""The contents of ``torch.distributed.rpc.backend_registry``: backends by name. Torch's names mean Backhaul."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from backhaul.dropin.rpc import api
from backhaul.dropin.rpc.agent import TensorPipeAgent, meet_all, print_failures
from backhaul.dropin.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from backhaul.dropin.rpc.options import TensorPipeRpcBackendOptions
from backhaul.rendezvous import place_from
from backhaul.worker import Worker

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """How to make a backend's options and its agent."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _Registry(type):
    """Makes `BackendType` look like an enum, but one that can grow."""

    @property
    def __members__(cls) -> dict[str, BackendType]:
        return dict(_members)

    def __getitem__(cls, name: str) -> BackendType:
        return _members[name]

    def __getattr__(cls, name: str) -> BackendType:
        try:
            return _members[name]
        except KeyError:
            raise AttributeError(name) from None

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(list(_members.values()))

    def __len__(cls) -> int:
        return len(_members)


class BackendType(metaclass=_Registry):
    """A backend."""

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


# Backends are registered for the process, before there is a worker.
_members: dict[str, BackendType] = {}


def backend_registered(backend_name: str) -> bool:
    return backend_name in _members


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Register a backend under a name; returns its member of `BackendType`."""
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    made = _members[backend_name] = BackendType(backend_name, value)
    return made


def construct_rpc_backend_options(
    backend: Any, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD, **kwargs: Any
) -> Any:
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    return backend.value.init_backend_handler(*args, **kwargs)


def _options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    _transports: Any = None,
    _channels: Any = None,
    **_: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout, init_method=init_method, num_worker_threads=num_worker_threads
    )


def _agent(store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> TensorPipeAgent:
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
    worker = Worker(*place_from(name, rank, world_size or None), store=store, options=rpc_backend_options.ours())
    print_failures(worker)
    meet_all(worker, worker.options.connect_timeout)
    agent = TensorPipeAgent(worker, rpc_backend_options)
    api._init_rpc_states(agent)
    return agent


register_backend("TENSORPIPE", _options, _agent)
