"""Torch's agent object, over a `Worker`; and the current agent."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import torch

from backhaul import current_worker as _current_worker
from backhaul.errors import BackhaulError, NotInitializedError
from backhaul.ids import WorkerInfo
from backhaul.worker import Worker, set_process_worker


class RpcAgent:
    """The product of a backend. Users' own backends derive from it."""

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Does nothing: there is nothing to wait for."""

    def sync(self) -> None:
        """Does nothing: there is nothing to wait for."""

    def shutdown(self) -> None:
        """Stop."""

    def get_worker_info(self, worker_name: str | int | None = None) -> WorkerInfo:
        raise NotImplementedError

    def get_worker_infos(self) -> list[WorkerInfo]:
        return []

    def get_debug_info(self) -> dict[str, str]:
        return {}


class TensorPipeAgent(RpcAgent):
    """Backhaul's worker in the form of torch's agent."""

    def __init__(self, worker: Worker, options: Any) -> None:
        self.worker = worker
        self._options = options

    @property
    def is_static_group(self) -> bool:
        return not self.worker.agent.membership.dynamic

    def shutdown(self) -> None:
        if not self.worker.closed:
            self.worker.shutdown(graceful=False)

    def get_worker_info(self, worker_name: str | int | None = None) -> WorkerInfo:
        return self.worker.get_worker_info(worker_name)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return self.worker.get_worker_infos()

    def get_debug_info(self) -> dict[str, str]:
        found = {
            "agent.num_pending_requests": str(sum(each.outstanding for each in self.worker.agent.calling())),
            "agent.thread_pool_size": str(self.worker.options.num_worker_threads),
            "agent.num_idle_threads": str(self.worker.options.num_worker_threads),
        }
        if _gil_profiling:
            found["agent.gil_average_wait_time_us"] = f"{_gil_wait() * 1e6:.1f}"
        return found

    def _get_backend_options(self) -> Any:
        return self._options

    def _get_device_map(self, dst: WorkerInfo) -> dict[Any, Any]:
        return dict(self._options.device_maps.get(dst.name, {}))


def print_failures(worker: Worker) -> None:
    """As in torch, print the exceptions of functions where they ran."""

    def show(error: BaseException, text: str) -> BaseException:
        print(f"On {worker.info}:\n{error!r}\n{text}", file=sys.stderr)
        return as_torch(error, text)

    worker.agent.execution.on_failure = show


def as_torch(error: BaseException, text: str) -> BaseException:
    """The error as torch raises it: a RuntimeError for TorchScript, and for arguments that do not fit an operator."""
    if isinstance(error, torch.jit.Error):
        return RuntimeError(str(error))
    of_an_operator = isinstance(error, TypeError) and "  File " not in text
    if of_an_operator and "received an invalid combination of arguments" in str(error):
        return RuntimeError(f"Overloaded torch operator invoked from Python failed to match any schema: {error}")
    return error


def meet_all(worker: Worker, seconds: float) -> None:
    """Connect to all other workers, so that the first call, whose timeout may be short, does not have to."""
    for info in worker.get_worker_infos():
        with contextlib.suppress(BackhaulError):  # the worker may have left already
            worker.agent.is_reachable(info, seconds)


_GIL_SAMPLES = 20
_gil_profiling = False  # global to the process, like torch's switch and the GIL


def enable_gil_profiling(flag: bool) -> None:
    """Whether the agent's `get_debug_info` measures how long a thread that releases the GIL waits to get it back."""
    global _gil_profiling
    _gil_profiling = flag


def _gil_wait() -> float:
    """The average wait in seconds. Measured now: unlike torch's, Backhaul's threads do not record it for each call."""
    start = time.perf_counter()
    for _ in range(_GIL_SAMPLES):
        time.sleep(0)  # releases the GIL
    return (time.perf_counter() - start) / _GIL_SAMPLES


# The worker of this process, as torch would have its agent.
_agents: dict[Worker, RpcAgent] = {}
_other: RpcAgent | None = None
"""The agent of a backend that the user registered."""


def adopt(agent: TensorPipeAgent) -> None:
    """Make this the agent of the process's worker."""
    _agents.clear()
    _agents[agent.worker] = agent
    set_process_worker(agent.worker)


def get_current() -> RpcAgent:
    if _other is not None:
        return _other
    worker = _current_worker.get_or_none()
    if worker is None or worker.closed:
        raise NotInitializedError("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.")
    found = _agents.get(worker)
    if found is None:  # initialized through backhaul.rpc itself
        from backhaul.dropin.rpc.options import TensorPipeRpcBackendOptions

        found = _agents[worker] = TensorPipeAgent(worker, TensorPipeRpcBackendOptions())
    return found


def is_set() -> bool:
    if _other is not None:
        return True
    worker = _current_worker.get_or_none()
    return worker is not None and not worker.closed and not worker.forked


def set_other(agent: RpcAgent | None) -> None:
    global _other
    _other = agent


def forget() -> None:
    """Forget the current agent."""
    set_other(None)
    _agents.clear()
    set_process_worker(None)
