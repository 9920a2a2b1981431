"""Runs the user's function, and turns what it raises into something that can travel."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import traceback
import types
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from backhaul.errors import RemoteError, RemoteTraceback
from backhaul.ids import WorkerInfo
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Failure, Result
from backhaul.wire.values import Codec

ASYNC_MARK = "_backhaul_async_execution"
"""The attribute that `functions.async_execution` sets on a function."""


class Execution:
    """Executes calls for one worker.

    ``send_late`` in its methods takes the reply of a call that is not over when the
    function returns: a coroutine, or a future of an ``async_execution`` function.
    """

    def __init__(self, me: WorkerInfo, codec: Codec, enter: Callable[[], None]) -> None:
        self._me = me
        self._codec = codec
        self._enter = enter
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, envelope: Envelope, send_late: Callable[[Frame], None]) -> Frame | None:
        """Execute a Call. Returns the reply, or None if ``send_late`` will get it. Never raises."""
        id = envelope.message.id
        try:
            function, args, kwargs = self._codec.unpack(envelope.message.tree, envelope.tensors)
            # In a context of its own, so that what it sets does not reach the thread's next call.
            value = contextvars.copy_context().run(function, *args, **kwargs)
            if type(value) is types.CoroutineType:
                self._start(value, id, send_late)
                return None
            if getattr(function, ASYNC_MARK, False):
                self._follow(function, value, id, send_late)
                return None
            return self.result(id, value)
        except BaseException as error:
            return self.failure(id, error)

    def result(self, id: int, value: Any) -> Frame:
        """The frame that answers request ``id`` with a value."""
        tree, packing = self._codec.pack(value)
        return encode(Result(id, tree), packing.tensors)

    def failure(self, id: int, error: BaseException) -> Frame:
        """The frame that answers request ``id`` with an exception. Never raises."""
        text = "".join(traceback.format_exception(type(error), error, _user_part(error.__traceback__)))
        kind = type(error)
        message = Failure(id, self._me.name, f"{kind.__module__}.{kind.__qualname__}", _safe_str(error), text)
        try:
            tree, packing = self._codec.pack(error)
            return encode(Failure(*_fields(message), tree), packing.tensors)
        except Exception:  # an exception that cannot travel: its texts do
            return encode(message)

    def open(self, envelope: Envelope) -> Any:
        """The value of a reply; raises what the other side raised."""
        message = envelope.message
        if type(message) is Result:
            return self._codec.unpack(message.tree, envelope.tensors)
        raise self._rebuild(message, envelope)

    def close(self, deadline: float) -> None:
        with self._lock:
            loop, thread = self._loop, self._loop_thread
            self._loop = self._loop_thread = None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop)
            thread.join(max(0.0, deadline))

    def _rebuild(self, message: Failure, envelope: Envelope) -> BaseException:
        error: Any = None
        if message.tree is not None:
            try:
                error = self._codec.unpack(message.tree, envelope.tensors)
            except Exception:  # its type cannot be had here
                error = None
        # SystemExit and KeyboardInterrupt over there must not end this process.
        if not isinstance(error, Exception):
            error = RemoteError(
                f"{message.type_name} on worker {message.worker!r}: {message.text}",
                message.worker,
                message.type_name,
                message.traceback,
            )
        error.__cause__ = RemoteTraceback(message.worker, message.traceback)
        return error  # type: ignore[no-any-return]

    def _follow(self, function: Any, value: Any, id: int, send_late: Callable[[Frame], None]) -> None:
        if not isinstance(value, torch._C.Future):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"Functions decorated with @rpc.functions.async_execution must return a torch.futures.Future object; "
                f"{name} returned a {type(value).__name__}"
            )

        def reply(done: Any) -> None:
            try:
                frame = self.result(id, done.value())
            except BaseException as error:
                frame = self.failure(id, error)
            send_late(frame)

        # Torch's own method: ours would mark the future as carrying user code, which this is not.
        torch.futures.Future.add_done_callback(value, reply) if isinstance(
            value, torch.futures.Future
        ) else value.add_done_callback(reply)
        attend = getattr(value, "attend", None)
        if attend is not None:
            attend()

    def _start(self, coroutine: Coroutine[Any, Any, Any], id: int, send_late: Callable[[Frame], None]) -> None:
        async def run() -> None:
            try:
                frame = self.result(id, await coroutine)
            except BaseException as error:
                frame = self.failure(id, error)
            send_late(frame)

        loop = self._running_loop()
        context = contextvars.copy_context()
        loop.call_soon_threadsafe(lambda: self._keep(loop.create_task(run())), context=context)

    def _keep(self, task: asyncio.Task[None]) -> None:
        """The loop itself only has a weak reference to its tasks."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(
                    target=self._run_loop, args=(loop,), name=f"backhaul-asyncio-{self._me.name}", daemon=True
                )
                self._loop_thread.start()
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._enter()
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()


async def _cancel_all() -> None:
    loop = asyncio.get_running_loop()
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop.stop()


def _fields(message: Failure) -> tuple[int, str, str, str, str]:
    return message.id, message.worker, message.type_name, message.text, message.traceback


def _safe_str(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} whose str() raises>"


def _user_part(frames: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames of this file, which tell a user nothing."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames
