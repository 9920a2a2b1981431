"""The contents of ``torch.distributed.rpc.api``: the calls, and the gather functions that libraries use."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from backhaul import rpc as ours
from backhaul.dropin.futures import wait_all
from backhaul.dropin.rpc import agent as _agents
from backhaul.dropin.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from backhaul.dropin.rpc.internal import PythonUDF, _internal_rpc_pickler
from backhaul.dropin.rpc.rrefs import made_within, require_python
from backhaul.rpc import Future, RpcTimeoutError, RRef, WorkerInfo, WorkerLostError
from backhaul.worker import current, set_process_worker

F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["AllGatherStates", "RRef", "get_worker_info", "remote", "rpc_async", "rpc_sync", "shutdown"]

logger = logging.getLogger(__name__)

_ignore_rref_leak = True
# Names of torch's module, which programs and its own tests use.
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()  # likewise
_LOOK_AGAIN = 1.0
_REMIND_SECONDS = 10.0

_get_current_rpc_agent = _agents.get_current
_is_current_rpc_agent_set = _agents.is_set
_reset_current_rpc_agent = _agents.forget


def _set_and_start_rpc_agent(agent: _agents.RpcAgent) -> None:
    """Make ``agent`` the current one."""
    if isinstance(agent, _agents.TensorPipeAgent):
        _agents.adopt(agent)
    else:
        _agents.set_other(agent)


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """A context in which calls are pickled with this pickler. All workers must use a compatible one."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _require_initialized(func: F) -> F:
    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _is_current_rpc_agent_set():
            raise RuntimeError("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.")
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _run_serialized(data: bytes, tensors: list[Any]) -> Any:
    """Run a call that a user's pickler pickled."""
    call = _default_pickler.deserialize(data, tensors)
    if isinstance(call, AttributeError):
        raise call
    return call.func(*call.args, **call.kwargs)


def _call(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The call to make: unchanged, or pickled by the user's pickler."""
    if isinstance(func, torch.jit.ScriptFunction):
        require_python(func, (args, kwargs))
    if _default_pickler is _internal_rpc_pickler:
        return func, args, kwargs
    return _run_serialized, _default_pickler.serialize(PythonUDF(func, args or (), kwargs or {})), None


@_require_initialized
def rpc_sync(
    to: Any, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """See `backhaul.rpc.rpc_sync`."""
    return ours.rpc_sync(to, *_call(func, args, kwargs), timeout)


@_require_initialized
def rpc_async(
    to: Any, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[Any]:
    """See `backhaul.rpc.rpc_async`."""
    try:
        future = ours.rpc_async(to, *_call(func, args, kwargs), timeout)
    except (WorkerLostError, RpcTimeoutError) as error:
        if "RRef creation" in str(error):  # of a reference in the arguments
            raise
        future = Future()
        future.settle(None, error)
    waited_for = getattr(_thread_local_var, "future_list", None)
    if waited_for is not None:
        waited_for.append(future)
    return future


@_require_initialized
def remote(
    to: Any, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[Any]:
    """See `backhaul.rpc.remote`."""
    return made_within(timeout, ours.remote(to, *_call(func, args, kwargs), timeout))


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """See `backhaul.rpc.get_worker_info`."""
    return _get_current_rpc_agent().get_worker_info(worker_name)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """On leaving the block, wait for all futures that `rpc_async` returned to this thread inside."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


class AllGatherStates:
    """The objects gathered so far, on the leader and then on the others."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


# Names of torch's module, which its own tests use.
_ALL_WORKER_NAMES: set[str] = set()
_all_gather_dict_lock = threading.RLock()
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: collections.defaultdict[str, AllGatherStates] = collections.defaultdict(
    AllGatherStates
)


def _init_rpc_states(agent: _agents.RpcAgent) -> None:
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None) -> None:
    """Receive one worker's object. Runs on the leader."""
    with _all_gather_dict_lock:
        names = worker_names or _ALL_WORKER_NAMES
        if worker_name not in names:
            raise AssertionError(f"{worker_name} is not expected by leader.")
        states = _all_gather_sequence_id_to_states[sequence_id]
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        states.gathered_objects[worker_name] = obj
        if set(names) == set(states.gathered_objects):
            states.proceed_signal.set()


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Receive all objects. Runs on the others."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
    states.gathered_objects = objects_map
    states.proceed_signal.set()


@_require_initialized
def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """The objects of these workers, by name; the worker with the first name gathers them.

    Returns when all have arrived. ``timeout`` applies to each step; by default calls have the default timeout.
    """
    names = set(worker_names or _ALL_WORKER_NAMES)
    leader = min(names)
    me = _get_current_rpc_agent().get_worker_info().name
    with _all_gather_dict_lock:
        key = "".join(sorted(names))
        number = _all_gather_sequence_id.get(key, 0)
        _all_gather_sequence_id[key] = number + 1
        sequence_id = f"{key}{number}"
    call_timeout = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    patience = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    if me == leader:
        _gather_to_leader(sequence_id, me, obj, names)
    else:
        rpc_sync(leader, _gather_to_leader, args=(sequence_id, me, obj, names), timeout=call_timeout)
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    _await(states, names - {me}, patience)
    if me == leader:
        _tell_followers(names - {leader}, sequence_id, states, call_timeout)
    with _all_gather_dict_lock:
        return _all_gather_sequence_id_to_states.pop(sequence_id).gathered_objects


def _await(states: AllGatherStates, names: set[str], patience: float | None) -> None:
    """Wait for the missing objects, as long as all workers that have not sent theirs are alive."""
    deadline = math.inf if patience is None else time.monotonic() + patience
    worker = current()
    start = time.monotonic()
    remind = start + _REMIND_SECONDS
    while not states.proceed_signal.wait(max(0.0, min(_LOOK_AGAIN, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return
        missing = sorted(names - set(states.gathered_objects))
        for name in missing:
            worker.agent.fates.require(worker.get_worker_info(name))
        if time.monotonic() >= remind:
            waited = time.monotonic() - start
            logger.info("a barrier or shutdown has waited %.0f s for %s", waited, ", ".join(map(repr, missing)))
            remind += _REMIND_SECONDS


def _tell_followers(names: set[str], sequence_id: str, states: AllGatherStates, timeout: float) -> None:
    futures = {
        name: rpc_async(name, _broadcast_to_followers, args=(sequence_id, states.gathered_objects), timeout=timeout)
        for name in sorted(names)
    }
    errors: dict[str, Exception] = {}
    for name, future in futures.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors[name] = error
    if errors:
        first = next(iter(errors.values()))
        raise RuntimeError(
            f"Followers {list(errors)} timed out in _all_gather after {timeout:.2f} seconds. The first exception is "
            f"{first}"
        )


@_require_initialized
def _barrier(worker_names: set[str]) -> None:
    """Wait until all these workers have called it. As in torch, a failure is logged and not raised."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called it."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 0) -> None:
    """Release the references that this worker holds."""
    current().references.release_all()


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """See `backhaul.rpc.shutdown`. The steps are torch's, so that each can be replaced."""
    if not isinstance(_get_current_rpc_agent(), _agents.TensorPipeAgent):
        _get_current_rpc_agent().shutdown()
        _agents.forget()
        return
    worker = current()
    worker.options.forbid_leaks = not _ignore_rref_leak
    worker.release = _delete_all_user_and_unforked_owner_rrefs
    try:
        if graceful and not worker.agent.membership.dynamic:
            with contextlib.suppress(WorkerLostError):  # raised again when the others are done
                _wait_all_workers(timeout)
        ours.shutdown(graceful, timeout)
    finally:
        if not worker.closed:
            worker.shutdown(graceful=False)
        set_process_worker(None)
        _agents.forget()


def get_rpc_timeout() -> float:
    """The default timeout of calls, in seconds."""
    return current().options.rpc_timeout


def _set_rpc_timeout(timeout: float) -> None:
    current().options.rpc_timeout = timeout


def _rref_typeof_on_owner(rref: RRef[Any], blocking: bool = True) -> Any:
    return type(rref.local_value())


def _rref_typeof_on_user(rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    return rref._get_type(timeout, blocking)
