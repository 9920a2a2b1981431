"""Future: a `torch.futures.Future` that can also be awaited, and whose wait reads the reply itself.

Torch's class stores the value and wakes the waiting threads. This class adds *help*: a thread that waits for a call
takes part in reading the peer's replies (see `calling`), so that no other thread must be woken first.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from backhaul import current_worker
from backhaul.devices.streams import fresh as fresh_streams
from backhaul.devices.streams import mark
from backhaul.eager import eager
from backhaul.errors import fresh, kept

T = TypeVar("T")
S = TypeVar("S")

# What torch's own constructor (for a future without devices) and `set_result` call in the end.
_make: Any = torch._C.Future.__init__
_complete: Any = torch._C.Future.set_result


class Future(torch.futures.Future[T]):
    """The value of a call, when it comes.

    `wait()` returns the value or raises, and so does ``await future`` in asyncio. Callbacks of `then` and
    `add_done_callback` run with the context variables of the thread that added them. All methods are thread-safe.
    """

    callback_error: Callable[[BaseException], BaseException] = staticmethod(lambda error: error)
    """Converts an error that a callback of `then` raises into the error of the resulting future."""

    has_callbacks = False
    """The future has user callbacks, so the thread that completes it must hold no lock or role."""

    # Class attributes until an instance sets its own, because thousands of calls may be in flight.
    _help: Callable[[], None] | None = None
    _attend: Callable[[], None] | None = None
    _settled = False
    devices: tuple[int, ...] = ()
    """The GPUs that tensors in the value may be on. On the class: the GPUs that the workers of this process use. A
    future that a user makes has no worker, and any worker may complete it."""
    _ready: Callable[[Any], None] | None = None
    """Makes GPU tensors in the value ready on the current streams. Each thread that gets the value calls it."""
    _value: Any = None
    _error: BaseException | None = None

    def __init__(
        self,
        *,
        devices: Sequence[int | str | torch.device] | None = None,
        help: Callable[[], None] | None = None,
        attend: Callable[[], None] | None = None,
    ) -> None:
        _make(self, [])
        if devices is not None:
            self.devices = tuple({*self.devices, *map(_index_of, devices)})
        if help is not None:
            self._help = help
        if attend is not None:
            self._attend = attend

    @eager
    def wait(self) -> T:
        """Wait for the value and return it. Raises what the call raised."""
        if not self._settled:
            self.help()
            if not self._settled:
                found = super().wait()
                if self._ready is not None:
                    self._ready(found)
                return found
        # The same as torch's wait(), but torch would release the interpreter lock first.
        if self._error is not None:
            raise fresh(self._error)
        if self._ready is not None:
            self._ready(self._value)
        return self._value  # type: ignore[no-any-return]

    def value(self) -> T:
        """The value of a future that is done, ready on the current GPU streams. Raises what the call raised."""
        found = super().value()
        if self._ready is not None:
            self._ready(found)
        return found

    def help(self) -> None:
        """Help to complete the future on this thread. Returns when this thread can do no more."""
        help = self._help
        if help is not None and not self.done():
            help()

    def attend(self) -> None:
        """Make sure that completion is noticed although no thread waits."""
        attend = self._attend
        if attend is not None and not self.done():
            attend()

    @eager
    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """A future of ``callback(self)``. The callback runs once this future is done."""
        _require_callable(callback)
        child: Future[S] = Future(devices=self.devices, help=self.help, attend=self.attend)
        context = contextvars.copy_context()

        def run(_: torch.futures.Future[T]) -> None:
            try:
                value = context.run(callback, self)
            except BaseException as error:  # raised in the thread that waits for the child
                child.settle(None, Future.callback_error(error))
            else:
                child.settle(value)

        self.has_callbacks = True
        super().add_done_callback(self._on_streams(run))
        self.attend()
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Run ``callback(self)`` once this future is done."""
        _require_callable(callback)
        context = contextvars.copy_context()
        self.has_callbacks = True
        super().add_done_callback(self._on_streams(lambda _: context.run(callback, self)))
        self.attend()

    def _on_streams(self, callback: Callable[[Any], None]) -> Callable[[Any], None]:
        """Have a user callback run on fresh GPU streams, as torch does."""
        devices = self.devices
        if not devices:
            return callback

        def run(done: Any) -> None:
            with fresh_streams(devices):
                callback(done)

        return run

    def when_done(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """`add_done_callback` for internal callbacks. They must be quick: any completing thread may run them."""
        super().add_done_callback(callback)
        self.attend()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            woken = loop.create_future()

            def wake(_: Any) -> None:
                # If the loop was closed meanwhile, no task is left to wake.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_resolve, woken)

            self.when_done(wake)
            yield from woken.__await__()
        return self.value()

    def set_result(self, result: T) -> None:
        """Complete the future with a value, which `wait` then returns."""
        self.settle(result)

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        """Complete the future with an error, which `wait` then raises."""
        self.settle(None, result)

    def settle(self, value: T | None, error: BaseException | None = None) -> None:
        """Complete the future with a value or an error."""
        if self._help is not None:
            self._help = self._attend = None  # they keep the call or the parent future alive
        if error is not None:
            # The garbage collector cannot look inside torch's object. So the stored error must not refer back to this
            # future, neither through the frames that set it nor through those that will raise it.
            worker = current_worker.get_or_none()
            stored = kept(error, "" if worker is None else worker.info.name)

            def raise_copy(_: Any) -> None:
                raise fresh(stored)

            super()._set_unwrap_func(raise_copy)
            self._error = stored
        elif self.devices:
            self._ready = mark(value)
        self._value = value
        _complete(self, value)
        self._settled = True


def _index_of(device: int | str | torch.device) -> int:
    found = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if found is None else found


def _resolve(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # the waiting task may have been cancelled
        woken.set_result(None)


def _require_callable(callback: Any) -> None:
    if not callable(callback):
        raise TypeError(
            f"incompatible function arguments. A callback is called with the future, and {callback!r} cannot be called"
        )
