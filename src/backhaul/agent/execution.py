"""Execution: runs the functions of users for peers. `translation` has the way from messages to values and back."""

from __future__ import annotations

import contextvars
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from backhaul.agent import autocast
from backhaul.agent.activity import Activity, Late
from backhaul.agent.coroutines import Coroutines
from backhaul.agent.future import Future
from backhaul.agent.observing import Encoded, FinishedLate, Invoked, Returned
from backhaul.agent.tracing import Tracing
from backhaul.agent.translation import Peer, Translation
from backhaul.devices.handover import Streams
from backhaul.errors import MisuseError
from backhaul.ids import WorkerInfo
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, is_failure
from backhaul.wire.messages import Mark
from backhaul.wire.values import Codec

_is_grad_enabled = torch.is_grad_enabled

ASYNC_MARK = "_backhaul_async_execution"
"""The attribute that `functions.async_execution` sets on a function."""


class Execution(Translation):
    """Executes the calls that one worker serves. Thread-safe."""

    def __init__(self, me: WorkerInfo, codec: Codec, enter: Callable[[], None], max_message_bytes: int) -> None:
        super().__init__(me, codec, max_message_bytes)
        self.activity = Activity()
        self.tracing: Tracing | None = None
        self._coroutines = Coroutines(me.name, enter)

    def run(self, envelope: Envelope, to: Peer, send_late: Callable[[Frame], None]) -> Frame | None:
        """Execute a Call that came from ``to``. Never raises.

        Returns the reply. Returns None if ``send_late`` gets the reply later: the function is a coroutine, or is marked
        with `functions.async_execution` and returned a future.
        """
        id, asked = envelope.message.id, envelope.message.mark
        try:
            value, later = self.execute(envelope, to.peer)
            if later:
                key = (to.peer.id, id)
                self.activity.late[key] = Late(to.peer, envelope.message, time.monotonic())
                follow(value, lambda done: self._finish_late(key, done, to, asked, send_late))
                return None
            return self.result(id, value, to, asked)
        except BaseException as error:
            return self.failure(id, error, to)

    def _finish_late(
        self, key: tuple[int, int], done: Any, to: Peer, asked: Mark | None, send_late: Callable[[Frame], None]
    ) -> None:
        frame = self._reply(key[1], done, to, asked)
        self.activity.late.pop(key, None)
        if self.observers:
            self.observers.emit(Encoded())
            self.observers.emit(FinishedLate(peer=to.peer.name, call=key[1], failed=is_failure(frame)))
        send_late(frame)

    def execute(self, envelope: Envelope, sender: WorkerInfo) -> tuple[Any, bool]:
        """Run the function of a request. Returns ``(value, False)``, or ``(a future of the value, True)``."""
        # In a separate context, so that context variables set by the function do not reach this thread's next call.
        context = contextvars.copy_context()
        mark = envelope.message.mark
        if mark is not None:
            context.run(self.recording.enter, mark, sender)
        function, args, kwargs = self.unpack(envelope, sender)
        if envelope.message.autocast:
            function = autocast.under(envelope.message.autocast, function)
        if self.observers:
            return self.execute_observed(context, function, args, kwargs, envelope, sender)
        return self.invoke(context, function, args, kwargs)

    def execute_observed(
        self,
        context: contextvars.Context,
        function: Any,
        args: Any,
        kwargs: Any,
        envelope: Envelope,
        sender: WorkerInfo,
    ) -> tuple[Any, bool]:
        """`invoke`, in a span if there is a tracer. A tracer is an observer, so without observers there is none."""
        tracing = self.tracing
        if tracing is None:
            return self.invoke(context, function, args, kwargs)
        found: tuple[Any, bool] = context.run(
            tracing.serve,
            # A context cannot be entered twice, so the function gets a copy with what the tracer has set.
            lambda: self.invoke(contextvars.copy_context(), function, args, kwargs),
            name_for_people(function),
            envelope,
            sender,
        )
        return found

    def invoke(self, context: contextvars.Context, function: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Run a function in a context. Returns ``(value, False)``, or ``(a future of the value, True)``.

        Raises what the function raises, and `MisuseError` if an ``async_execution`` function returns no future.
        """
        grad = _is_grad_enabled()
        try:
            if self.observers:
                value = self._observed(context, function, args, kwargs)
            else:
                value = context.run(function, *args, **kwargs)
        finally:
            if _is_grad_enabled() is not grad:
                self._switch_gradients(grad, function)
        if type(value) is types.CoroutineType:
            return context.run(self._coroutines.start, value, self._streams), True
        if not getattr(function, ASYNC_MARK, False):
            return value, False
        if not isinstance(value, torch._C.Future):
            raise MisuseError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, and "
                f"{getattr(function, '__qualname__', function)}, which is marked with @rpc.functions.async_execution, "
                f"returned a {type(value).__name__}"
            )
        return value, True

    @property
    def _streams(self) -> Streams | None:
        return None if self.devices is None else self.devices.streams

    def _switch_gradients(self, on: bool, function: Any) -> None:
        """Undo a function's change of the gradient mode, and warn: this thread's next call may be another caller's."""
        torch._C._set_grad_enabled(on)
        here, there = ("on", "off") if on else ("off", "on")
        warnings.warn(
            f"{name_for_people(function)} on worker {self._me.name!r} has switched gradients {there} "
            f"(torch.set_grad_enabled) and has ended. They are {here} again, because torch keeps the switch for each "
            "thread and the next call may run on any. Write `with torch.no_grad():` in the functions that need it, or "
            "around the calls",
            UserWarning,
            stacklevel=2,
        )

    def _observed(self, context: contextvars.Context, function: Any, args: Any, kwargs: Any) -> Any:
        self.observers.emit(Invoked(what=name_for_people(function)))
        failed = True
        try:
            value = context.run(function, *args, **kwargs)
            failed = False
        finally:
            self.observers.emit(Returned(failed=failed))
        return value

    def close(self, seconds: float) -> None:
        """Cancel the coroutines, and wait at most this many seconds for them to end."""
        self._coroutines.close(seconds)

    def _reply(self, id: int, done: Any, to: Peer, asked: Mark | None) -> Frame:
        try:
            return self.result(id, done.value(), to, asked)
        except BaseException as error:
            return self.failure(id, error, to)


def name_for_people(function: Any) -> str:
    """The name of a function in errors and traces."""
    if isinstance(function, types.BuiltinFunctionType):
        return function.__name__  # the qualified name of torch.add contains an internal class
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)


def follow(future: Any, done: Callable[[Any], None]) -> None:
    """Call ``done(future)`` when a torch future or a `Future` is complete."""
    if isinstance(future, Future):
        future.when_done(done)
    else:
        future.add_done_callback(done)
