"""The faulty backend of torch's tests, over our own faulty transport."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from backhaul.dropin.rpc import api, backend_registry
from backhaul.dropin.rpc.agent import TensorPipeAgent, meet_all, print_failures
from backhaul.dropin.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from backhaul.dropin.rpc.options import TensorPipeRpcBackendOptions
from backhaul.rendezvous import place_from
from backhaul.testing.faults import Action, Faults, FaultyTransport
from backhaul.transport.stream import StreamTransport
from backhaul.wire.messages import Call, Create, Fetch, Gradients, Leave, Notices
from backhaul.worker import Worker

_KINDS: dict[str, type[Any]] = {
    "PYTHON_CALL": Call,
    "SCRIPT_CALL": Call,
    "PYTHON_REMOTE_CALL": Create,
    "SCRIPT_REMOTE_CALL": Create,
    "PYTHON_RREF_FETCH_CALL": Fetch,
    "SCRIPT_RREF_FETCH_CALL": Fetch,
    "RREF_FORK_REQUEST": Notices,
    "RREF_CHILD_ACCEPT": Notices,
    "RREF_USER_DELETE": Notices,
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": Leave,
    "BACKWARD_AUTOGRAD_REQ": Gradients,
}
"""torch's names of messages -> our messages for the same purpose."""


_RETRIED = 0.3
"""Seconds until a lost message that torch would send again gets through."""


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Which messages to lose, the first ``num_fail_sends`` of each, and which to delay, by how many seconds."""

    def __init__(
        self,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


class NamedFaults(Faults):
    """Faults, by torch's names of messages."""

    def __init__(self, options: FaultyTensorPipeRpcBackendOptions) -> None:
        super().__init__()
        delays = {_KINDS[name]: seconds for name, seconds in options.messages_to_delay.items() if name in _KINDS}
        self._delays = {kind: seconds for kind, seconds in delays.items() if seconds}
        self._cuts = {_KINDS[name]: options.num_fail_sends for name in options.messages_to_fail if name in _KINDS}
        self._deciding = threading.Lock()
        self.delay_seconds = max(self._delays.values(), default=_RETRIED)

    def decide(self, kind: type[Any]) -> Action:
        if kind in self._delays:
            return "delay"
        with self._deciding:
            if self._cuts.get(kind, 0) > 0:
                self._cuts[kind] -= 1
                return "delay" if kind in (Notices, Leave) else "cut"
        return "pass"


class FaultyTensorPipeAgent(TensorPipeAgent):
    """A `TensorPipeAgent` with faults."""


def _options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int,
    messages_to_fail: Sequence[str],
    messages_to_delay: Mapping[str, float],
    num_fail_sends: int,
    **_: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads, rpc_timeout, init_method, messages_to_fail, messages_to_delay, num_fail_sends
    )


def _agent(store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> FaultyTensorPipeAgent:
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}")
    options = rpc_backend_options.ours()
    transport = FaultyTransport(StreamTransport(options), NamedFaults(rpc_backend_options))
    worker = Worker(*place_from(name, rank, world_size or None), store=store, options=options, transport=transport)
    print_failures(worker)
    meet_all(worker, options.connect_timeout)
    agent = FaultyTensorPipeAgent(worker, rpc_backend_options)
    api._init_rpc_states(agent)
    return agent


# As torch's module of this name does when it is imported.
backend_registry.register_backend("FAULTY_TENSORPIPE", _options, _agent)
