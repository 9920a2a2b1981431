"""The contents of ``torch.distributed.rpc``, private names included, over `backhaul.rpc`."""

from __future__ import annotations

import numbers
import os
import threading
import time
from typing import Any

import torch.distributed as dist

from backhaul.dropin import autograd as dist_autograd
from backhaul.dropin.rpc import api, backend_registry, constants, functions, internal
from backhaul.dropin.rpc.agent import RpcAgent, TensorPipeAgent, enable_gil_profiling
from backhaul.dropin.rpc.api import (
    AllGatherStates,
    _all_gather,
    _barrier,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _require_initialized,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    _use_rpc_pickler,
    _wait_all,
    _wait_all_workers,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from backhaul.dropin.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from backhaul.dropin.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from backhaul.dropin.rpc.server_process_global_profiler import _server_process_global_profile
from backhaul.dropin.rpc.worker_info import WorkerInfo, checked
from backhaul.rendezvous import meet, place_from
from backhaul.rpc import Future, RRef, is_available
from backhaul.worker import current

PyRRef = RRef

_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
_is_tensorpipe_available = True
_becoming = threading.Lock()  # a process becomes one worker
_CONFIRMED_WITHIN = 0.5

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "backend_registered",
    "construct_rpc_backend_options",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """See `backhaul.rpc.init_rpc`. Accepts torch's options."""
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _backend_of(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    checked(name)
    _require_rank(rank, rpc_backend_options.init_method)
    with _becoming:
        if _is_current_rpc_agent_set():
            raise RuntimeError("RPC is already initialized")
        place = place_from(name, rank, world_size or None)
        store = meet(rpc_backend_options.init_method, place, max(60.0, rpc_backend_options.rpc_timeout), alone=True)
        dist_autograd._init(rank)
        _init_rpc_backend(
            backend, store, place.name, -1 if place.rank is None else place.rank, place.world_size, rpc_backend_options
        )


def _require_rank(rank: int, init_method: str) -> None:
    """Raise unless a rank is given or in the environment."""
    if rank != -1:
        return
    if not init_method.startswith("env://"):
        raise ValueError(f"Error initializing torch.distributed using {init_method}: rank parameter missing")
    if "RANK" not in os.environ:
        raise ValueError(
            "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not "
            "set"
        )


def _backend_of(options: Any) -> Any:
    """The backend to which these options belong."""
    if options is None:
        return backend_registry.BackendType.TENSORPIPE
    for candidate in backend_registry.BackendType:
        try:
            theirs = type(backend_registry.construct_rpc_backend_options(candidate))
        except TypeError:  # this backend needs more options
            continue
        if isinstance(options, theirs):
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    for value, kind in (
        (backend, backend_registry.BackendType),
        (store, dist.Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ):
        if not isinstance(value, kind):
            raise RuntimeError(f"Argument {value} must be of type {kind} but got type {type(value)}")
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


def _rref_context_get_debug_info() -> dict[str, str]:
    """How many references of each kind there are.

    Torch confirms references in arguments before the function runs. Here that happens concurrently, so this waits
    briefly.
    """
    references = current().references
    deadline = time.monotonic() + _CONFIRMED_WITHIN
    while (counts := references.counts())["unconfirmed"] and time.monotonic() < deadline:
        time.sleep(0.001)
    return {
        "num_owner_rrefs": str(counts["shared"]),
        "num_pending_futures": str(counts["creations"]),
        "num_pending_users": str(counts["unconfirmed"]),
        "num_forks": str(counts["holders"]),
    }


@_require_initialized
def _get_debug_info() -> dict[str, Any]:
    return {
        **_rref_context_get_debug_info(),
        **_get_current_rpc_agent().get_debug_info(),
        **dist_autograd._get_debug_info(),
    }


def _enable_jit_rref_pickle() -> None:
    """Does nothing: torch would pickle RRefs inside TorchScript modules, which cannot hold ours."""


def _disable_jit_rref_pickle() -> None:
    """See `_enable_jit_rref_pickle`."""


def _set_profiler_node_id(rank: int) -> None:
    """Does nothing: events get the rank of their worker when a profile with calls is read."""
