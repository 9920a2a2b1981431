"""Settling: what becomes of the requests on one line when their replies have been read, or will not come.

A blocking request is opened by its own thread: it takes the value out of the reply, or raises the error. A future is
settled with the value or the error. A future with callbacks, and a future whose reply the watch thread reads, is
settled elsewhere (`completions`), because no user code may run while a thread has the reader role of a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

from backhaul.agent.future import Future
from backhaul.agent.link_state import LinkState
from backhaul.agent.observing import Observers, Settled
from backhaul.agent.pending import Slot
from backhaul.errors import ProtocolError
from backhaul.ids import WorkerInfo

if TYPE_CHECKING:
    from backhaul.agent.completions import Completions
    from backhaul.agent.execution import Execution


class Settling:
    """Opens replies and settles futures. Works on slots that have been taken out of the state. Thread-safe."""

    def __init__(
        self,
        peer: WorkerInfo,
        state: LinkState[Any],
        lock: Lock,
        execution: Execution,
        completions: Completions,
        observers: Observers,
    ) -> None:
        """``lock`` is the lock of the line, which guards ``state``."""
        self._peer = peer
        self._state = state
        self._lock = lock
        self._execution = execution
        self._completions = completions
        self._observers = observers

    def open(self, slot: Slot) -> Any:
        """The value of a reply. Raises its error, or why there is no reply."""
        try:
            if slot.envelope is not None:
                return self._execution.open(slot.envelope, self._peer)
            self._raise(slot)
        except BaseException as error:
            if slot.is_call:
                self._execution.accounts.count_error("sent", error)
            raise

    def open_observed(self, slot: Slot) -> Any:
        """`open`, with an event for observers."""
        failed = True
        try:
            value = self.open(slot)
            failed = False
        finally:
            self._observers.emit(Settled(peer=self._peer.name, call=slot.id, failed=failed))
        return value

    def _raise(self, slot: Slot) -> NoReturn:
        error, slot.error = slot.error or ProtocolError("a request ended without a reply"), None
        try:
            raise error
        finally:
            del error  # break the cycle: its traceback refers to this frame

    def settle_all(self, finished: Iterable[Slot], *, inline: bool) -> None:
        """Settle the futures of finished slots. ``inline``: this thread may do it, if no callbacks run."""
        plain: list[tuple[Slot, Future[Any]]] = []
        for slot in finished:
            if slot.future is None:
                self.count(slot)  # a blocking call that failed
            elif slot.future.has_callbacks:
                self._completions.add(partial(self._settle, slot, slot.future))
            elif inline:
                self._settle(slot, slot.future)
            else:
                plain.append((slot, slot.future))
        if plain:  # in one batch: without callbacks, none can wait for another
            self._completions.add(partial(self._settle_each, plain))

    def fail(self, slot: Slot, error: BaseException | None, *, inline: bool = False) -> None:
        """Finish a slot without a reply. The slot has been taken out already."""
        with self._lock:
            waiters = self._state.finish(slot, error)
        for waiter in waiters:
            waiter.wake()
        self.settle_all([slot], inline=inline)

    def _settle_each(self, plain: list[tuple[Slot, Future[Any]]]) -> None:
        for slot, future in plain:
            self._settle(slot, future)

    def _settle(self, slot: Slot, future: Future[Any]) -> None:
        slot.future = None  # break the cycle: their tensors must not wait for the garbage collector
        try:
            value = self.open_observed(slot) if self._observers else self.open(slot)
        except BaseException as error:  # raised in the thread that waits for the future
            future.settle(None, error)
        else:
            future.settle(value)
        self.count(slot)

    def count(self, slot: Slot) -> None:
        """Note that a request is over. Only calls of the user count."""
        if slot.is_call:
            with self._lock:
                self._state.calls_settled += 1
