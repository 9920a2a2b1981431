"""Proxies: call methods of a referenced value on its owner."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backhaul.agent import autocast
from backhaul.agent.execution import ASYNC_MARK, follow
from backhaul.agent.future import Future
from backhaul.eager import eager
from backhaul.remote_profile.callee import RECORDED, recorded

if TYPE_CHECKING:
    from backhaul.refs.cell import Cell
    from backhaul.refs.rref import RRef
    from backhaul.remote_profile.profilers import Listener


class Proxy:
    """Looks like the value; each attribute is a method that runs on the owner."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: float) -> None:
        self._rref = rref
        self._call = call
        self._timeout = timeout

    # Not `eager`: torch.compile cannot continue after a graph break at an attribute. It breaks at the call in `method`.
    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "__dict__":  # tools that look for a __dict__ must not get a method
            raise AttributeError(f"a proxy has no {name}")
        rref, call, timeout = self._rref, self._call, self._timeout

        def method(*args: Any, **kwargs: Any) -> Any:
            return call(rref, name, args, kwargs, timeout)

        return method

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._rref, "__call__", args, kwargs, self._timeout)

    def __repr__(self) -> str:
        return f"<proxy of {self._rref!r}>"


def invoke(rref: RRef[Any], name: str, args: Any, kwargs: Any) -> Future[Any]:
    """A future of the result of a method of the value. Runs on the owner, once the value exists.

    No thread is blocked until then.
    """
    return invoke_found(rref, lambda value: getattr(value, name), args, kwargs)


def invoke_recorded(listener: Listener, rref: RRef[Any], name: str, args: Any, kwargs: Any) -> Future[Any]:
    """`invoke` for a caller that is profiled: the method is recorded once it runs."""
    return invoke_found(rref, lambda value: recorded(listener, getattr(value, name)), args, kwargs)


def invoke_found(rref: RRef[Any], find: Callable[[Any], Callable[..., Any]], args: Any, kwargs: Any) -> Future[Any]:
    """Like `invoke`, for the method that ``find(value)`` returns."""
    references = rref._references
    future: Future[Any] = Future()
    context = contextvars.copy_context()
    modes = autocast.here()  # the caller's modes; if there is no value yet, another thread will run the method

    def run(cell: Cell) -> None:
        if (failed := cell.error) is not None:
            future.settle(None, failed)
            return
        try:
            method = find(cell.get())
            if modes:
                method = autocast.under(modes, method)
            value, later = references.execution.invoke(context, method, args, kwargs)
        except BaseException as error:
            future.settle(None, error)
            return
        if later:
            follow(value, lambda done: _pass_on(done, future))
        else:
            future.settle(value)

    references.use(rref._ref, run)
    return future


def type_of(rref: RRef[Any]) -> Future[type]:
    """A future of the type of the value. Runs on the owner, once the value exists."""
    future: Future[type] = Future()

    def run(cell: Cell) -> None:
        if (failed := cell.error) is not None:
            future.settle(None, failed)
        else:
            future.settle(type(cell.get()))

    rref._references.use(rref._ref, run)
    return future


def _pass_on(done: Any, future: Future[Any]) -> None:
    try:
        value = done.value()
    except BaseException as error:
        future.settle(None, error)
    else:
        future.settle(value)


setattr(invoke, ASYNC_MARK, True)
setattr(invoke, RECORDED, invoke_recorded)
setattr(type_of, ASYNC_MARK, True)
