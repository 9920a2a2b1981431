"""Coroutines: the event loop of a worker, which runs called functions that are coroutines.

The loop has its own thread, which the first coroutine starts.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from backhaul.agent.future import Future
from backhaul.agent.steps import start_in_steps
from backhaul.devices.handover import Streams


class Coroutines:
    """The event loop of one worker. Thread-safe."""

    def __init__(self, worker: str, enter: Callable[[], None]) -> None:
        """``enter`` runs first on the thread of the loop."""
        self._worker = worker
        self._enter = enter
        self._tasks: set[asyncio.Task[None]] = set()  # strong references: the loop holds only weak ones
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, coroutine: Coroutine[Any, Any, Any], streams: Streams | None) -> Future[Any]:
        """Run a coroutine in the context of the calling thread. Returns a future of its value.

        ``streams`` are the streams of the worker's GPUs, if it has any.
        """
        future: Future[Any] = Future()

        async def run() -> None:
            if streams is not None:
                streams.begin()
            try:
                value = await coroutine
            except BaseException as error:
                future.settle(None, error)
            else:
                if streams is not None:
                    streams.leave_word()
                future.settle(value)

        loop = self._running_loop()
        context = contextvars.copy_context()
        loop.call_soon_threadsafe(lambda: self._keep(loop.create_task(run())), context=context)
        return future

    def close(self, seconds: float) -> None:
        """Cancel the coroutines, and wait at most this many seconds for the loop to end."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop)
            thread.join(max(0.0, seconds))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                loop.set_task_factory(start_in_steps)
                name = f"backhaul-asyncio-{self._worker}"
                self._thread = threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
                self._thread.start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
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
