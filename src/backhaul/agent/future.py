"""Future: a `torch.futures.Future` that can also be awaited, and whose wait reads the reply itself.

Torch's class does the storing and the waking. What we add is *help*: a thread that waits
for a call takes part in reading the peer's replies (see `outbound`), so that no other
thread has to be woken first.
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

# What torch's own constructor, for a future of no device, and `set_result` come down to.
_make: Any = torch._C.Future.__init__
_complete: Any = torch._C.Future.set_result


class Future(torch.futures.Future[T]):
    """The value of a call, when it comes.

    `wait()` returns it or raises; ``await future`` does so in asyncio; `then` and
    `add_done_callback` chain, in the context variables of the thread that called them.
    All methods may be called from any thread.
    """

    callback_error: Callable[[BaseException], BaseException] = staticmethod(lambda error: error)
    """What becomes of an error that a callback of `then` raises."""

    has_callbacks = False
    """User code hangs on this future: whoever completes it must hold nothing."""

    # Of the class, until an instance has its own: thousands of calls may be in flight.
    _help: Callable[[], None] | None = None
    _attend: Callable[[], None] | None = None
    _settled = False
    devices: tuple[int, ...] = ()
    """The GPUs that values may have tensors on. Of the class: those that the workers of this process use, since a
    future that a user makes has no worker, and any worker may complete it."""
    _ready: Callable[[Any], None] | None = None
    """Called with the value by each thread that gets it: makes tensors on GPUs ready on its current streams."""
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
        """Return the value when it is there; raise what the call raised."""
        if not self._settled:
            self.help()
            if not self._settled:
                found = super().wait()
                if self._ready is not None:
                    self._ready(found)
                return found
        # As torch would, which gives the interpreter away to see.
        if self._error is not None:
            raise fresh(self._error)
        if self._ready is not None:
            self._ready(self._value)
        return self._value  # type: ignore[no-any-return]

    def value(self) -> T:
        """The value of a future that is done, ready on the current streams of GPUs; raises what the call raised."""
        found = super().value()
        if self._ready is not None:
            self._ready(found)
        return found

    def help(self) -> None:
        """Do what this thread can towards completion; return when no more can be done."""
        help = self._help
        if help is not None and not self.done():
            help()

    def attend(self) -> None:
        """See to it that completion is noticed although no thread waits."""
        attend = self._attend
        if attend is not None and not self.done():
            attend()

    @eager
    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """A future of ``callback(self)``, which runs once this one is done."""
        _require_callable(callback)
        child: Future[S] = Future(devices=self.devices, help=self.help, attend=self.attend)
        context = contextvars.copy_context()

        def run(_: torch.futures.Future[T]) -> None:
            try:
                value = context.run(callback, self)
            except BaseException as error:  # the child's waiter gets it
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
        """The callback of a user, with streams of its own on the GPUs, as torch has it."""
        devices = self.devices
        if not devices:
            return callback

        def run(done: Any) -> None:
            with fresh_streams(devices):
                callback(done)

        return run

    def when_done(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """`add_done_callback` for code of our own: quick, so that whoever completes this may run it."""
        super().add_done_callback(callback)
        self.attend()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            woken = loop.create_future()

            def wake(_: Any) -> None:
                # A loop that closed meanwhile has nobody left to wake.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_resolve, woken)

            self.when_done(wake)
            yield from woken.__await__()
        return self.value()

    def set_result(self, result: T) -> None:
        """Complete it with a value, which `wait` then returns."""
        self.settle(result)

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        """Complete it with an error, which `wait` then raises."""
        self.settle(None, result)

    def settle(self, value: T | None, error: BaseException | None = None) -> None:
        """Complete it, with a value or an error."""
        if self._help is not None:
            self._help = self._attend = None  # they hold on to the call, or to the parent
        if error is not None:
            # The garbage collector cannot see through torch's object: what is kept there must not refer back
            # to this future, by the frames that set it or by those that will raise it.
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
    if not woken.done():  # its task may have been cancelled
        woken.set_result(None)


def _require_callable(callback: Any) -> None:
    if not callable(callback):
        raise TypeError(
            f"incompatible function arguments. A callback is called with the future, and {callback!r} cannot be called"
        )
