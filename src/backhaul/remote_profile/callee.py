"""What runs on the callee of a profiled call."""

from __future__ import annotations

import contextvars
import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import torch

from backhaul import current_worker
from backhaul.agent.execution import ASYNC_MARK, follow
from backhaul.agent.future import Future
from backhaul.remote_profile.profilers import Listener, Options
from backhaul.remote_profile.rows import Report

_log = logging.getLogger(__name__)

T = TypeVar("T")

RECORDED = "_backhaul_recorded"
"""An attribute of a function that runs another one: how to do so for a listener, ``recorded(listener, *args)``."""

MOST_KEPT = 1000
"""The most reports on values of `remote` that are kept; their creators may have died."""

_SENDABLE = frozenset({type(None), bool, int, float, str, bytes, torch.Tensor})


class Reports:
    """Reports on values of `remote`, which one worker keeps until their creators ask. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Report] = OrderedDict()

    def keep(self, token: str, listener: Listener) -> None:
        report = _report(listener)
        if report is not None:
            with self._lock:
                self._kept[token] = report
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)

    def take(self, token: str) -> Report | None:
        with self._lock:
            return self._kept.pop(token, None)


def run_profiled(options: Any, function: Any, args: Any, kwargs: Any) -> Future[Any]:
    """Run a function; a future of its value and of the report on it."""
    listener = Listener(Options(*options))
    future: Future[Any] = Future()
    value, later = _execute(listener, function, args, kwargs)
    if later:
        follow(value, lambda done: _pass_on(done, future, lambda result: (_sendable(result), _report(listener))))
    else:
        future.settle((_sendable(value), _report(listener)))
    return future


def run_for_reference(options: Any, token: str, function: Any, args: Any, kwargs: Any) -> Future[Any]:
    """Run a function whose value stays here; a future of the value. `collect` returns the report."""
    listener = Listener(Options(*options))
    reports = current_worker.get().reports
    future: Future[Any] = Future()
    try:
        value, later = _execute(listener, function, args, kwargs)
    except BaseException:
        reports.keep(token, listener)
        raise
    if later:

        def finish(done: Any) -> None:
            reports.keep(token, listener)
            _pass_on(done, future, lambda result: result)

        follow(value, finish)
    else:
        reports.keep(token, listener)
        future.settle(value)
    return future


def collect(rref: Any, token: str) -> Future[Any]:
    """The report on how the value of a reference was made, once the function is done. None if there is none."""
    future: Future[Any] = Future()
    reports = current_worker.get().reports

    def answer(_: Any) -> None:
        future.settle(reports.take(token))

    rref._references.use(rref._ref, answer)
    return future


for _each in (run_profiled, run_for_reference, collect):
    setattr(_each, ASYNC_MARK, True)


def recorded(listener: Listener, function: Any) -> Callable[..., Any]:
    """The function, with its work recorded. For a coroutine, all its steps are recorded."""
    if inspect.iscoroutinefunction(function):

        def run(*args: Any, **kwargs: Any) -> Any:
            return _stepwise(listener, function(*args, **kwargs))

    else:

        def run(*args: Any, **kwargs: Any) -> Any:
            _try(listener.begin)
            try:
                return function(*args, **kwargs)
            finally:
                _try(listener.end)

    run.__qualname__ = getattr(function, "__qualname__", None) or repr(function)
    setattr(run, ASYNC_MARK, getattr(function, ASYNC_MARK, False))
    return run


def _execute(listener: Listener, function: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Run a function. ``(value, False)``, or ``(a future of the value, True)``."""
    special = getattr(function, RECORDED, None)
    if special is not None:
        return special(listener, *args), True
    execution = current_worker.get().agent.execution
    found: tuple[Any, bool] = execution.invoke(contextvars.copy_context(), recorded(listener, function), args, kwargs)
    return found


async def _stepwise(listener: Listener, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await _Steps(listener, coroutine)


class _Steps:
    """Runs a coroutine, and records it while it has the thread; between its steps, other work has the thread."""

    def __init__(self, listener: Listener, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._listener = listener
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self._coroutine.send
        given: Any = None
        while True:
            _try(self._listener.begin)
            try:
                awaited = step(given)
            except StopIteration as end:
                return end.value
            finally:
                _try(self._listener.end)
            try:
                step, given = self._coroutine.send, (yield awaited)
            except BaseException as error:
                step, given = self._coroutine.throw, error


def _sendable(value: Any) -> Any:
    """The value, if it can be sent. Otherwise raises an error that names the value alone, not the report beside it."""
    if type(value) not in _SENDABLE:
        current_worker.get().codec.pack(value)
    return value


def _report(listener: Listener) -> Report | None:
    """The report; None if making it failed."""
    return _try(lambda: listener.report(current_worker.get().info))


def _try(step: Callable[[], T]) -> T | None:
    """Do a step of profiling. Its failure must not become an error of the call."""
    try:
        return step()
    except Exception:
        _log.exception("a call could not be profiled; its result is not affected")
        return None


def _pass_on(done: Any, future: Future[Any], make: Callable[[Any], Any]) -> None:
    try:
        made = make(done.value())
    except BaseException as error:
        future.settle(None, error)
    else:
        future.settle(made)
