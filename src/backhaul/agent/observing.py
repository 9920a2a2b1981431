"""Observing: what happens inside a worker, told to whoever wants to know.

The layers emit small structs. Each has the time, in nanoseconds of a clock that all processes of a host share, and the
thread. Schedulers of tests, benchmarks and profilers subscribe to them; they replace no methods and know no names of
private ones. Nothing is made while nobody observes: the places that emit ask first whether there are observers.

An observer is called on the thread on which the thing happens, in the middle of it. So it must be quick, must not raise
and must not call the worker. Some locks of the worker may be held.

    calls       Asked ─► Packed ─► Issued ─► Encoded ─► Sent
                ─► (peer: Read ─► Began ─► Invoked ─► Returned ─► Packed ─► Encoded ─► Ended ─► Sent)
                ─► Read ─► Came ─► HandedOut ─► Settled
                and, in a context, SendRecorded after Issued, RecvRecorded before Invoked and Settled
                and, if the function goes on after its request has been handled, FinishedLate at the peer
    threads     Waits ─► Resumes             Queued ─► Starts ─► Stops
    passes      PassBegan ─► Planned ─► RunBegan ─► RunEnded ─► … ─► PassEnded          GateWaits ─► GateOpens
    runs        RunBegan ─► TorchBegan ─► RecvReached ─► GradientsSent ─► Encoded ─► Sent
                ─► TorchEnded ─► Stored ─► RunEnded
                ─► (peer: GradientsCame ─► RunBegan, or GateOpens)
    references  RefMade ─► RefFreed
    links       LinkUp ─► LinkLost

Two workers name the same thing alike. A request has a number that its sender gives to no other request: with the
sender's name, it names the call on both sides (``call``). Gradients are named by their pass and their sources.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

_now = time.perf_counter_ns
_thread = threading.get_ident


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something has happened, just now, on this thread."""

    at: int = msgspec.field(default_factory=_now)
    thread: int = msgspec.field(default_factory=_thread)


class Asked(Event, frozen=True, gc=False):
    """A request to a peer is about to be made: its values are not packed yet."""

    peer: str
    what: str


class Issued(Event, frozen=True, gc=False):
    """A request to a peer has its number. The frame is made now."""

    peer: str
    call: int
    what: str
    is_call: bool
    """A call of the user's, not a question of our own."""


class Packed(Event, frozen=True, gc=False):
    """The arguments of a call, or its value, have been packed."""


class SendRecorded(Event, frozen=True, gc=False):
    """The tensors of a message that is about to leave are in the graph of a context."""


class RecvRecorded(Event, frozen=True, gc=False):
    """The tensors of a message that has come are in the graph of a context."""


class Encoded(Event, frozen=True, gc=False):
    """A message has become a frame."""


class Sent(Event, frozen=True, gc=False):
    """A frame has been written."""

    peer: str
    line: int
    size: int
    replies: bool
    """It answers requests: those that this thread has handled, and perhaps others'."""
    frames: int = 1
    """How many frames have left in this write."""


class Read(Event, frozen=True, gc=False):
    """Bytes have been read from a line, and not decoded yet."""

    peer: str
    line: int


class Came(Event, frozen=True, gc=False):
    """Messages have been decoded that came where replies do. They have not been handled yet."""

    peer: str
    line: int
    count: int
    """Without replies that come too late."""
    frames: int = 0
    """How many frames there were."""


class HandedOut(Event, frozen=True, gc=False):
    """Futures and messages that `Came` told of have been given to the threads that they are for."""

    peer: str
    line: int
    count: int


class Began(Event, frozen=True, gc=False):
    """A message is being handled; a request's function runs in there."""

    peer: str
    kind: str
    call: int = 0
    """The number of the request, if it is one."""


class Ended(Event, frozen=True, gc=False):
    """A message has been handled. ``replies``: its reply is still to leave, with `Sent`."""

    peer: str
    kind: str
    replies: bool
    call: int = 0
    failed: bool = False
    """The reply tells of an error."""


class FinishedLate(Event, frozen=True, gc=False):
    """A call has its result only now, after its request was handled: it is a coroutine, or returned a future."""

    peer: str
    call: int
    failed: bool


class Invoked(Event, frozen=True, gc=False):
    """The user's function is called now; its arguments have been unpacked."""

    what: str


class Returned(Event, frozen=True, gc=False):
    """The user's function has returned, or raised."""

    failed: bool


class Settled(Event, frozen=True, gc=False):
    """A request has its outcome: the value of its reply has been unpacked, or an exception is raised instead."""

    peer: str
    call: int
    failed: bool


class Waits(Event, frozen=True, gc=False):
    """A thread waits for something that only peers can bring about. ``slot`` is done when a reply ends the wait."""

    slot: Any = None


class Resumes(Event, frozen=True, gc=False):
    """That wait is over."""

    slot: Any = None


class Queued(Event, frozen=True, gc=False):
    """A job waits for another thread: the completion of a future, or a message that was read for that thread."""


class Starts(Event, frozen=True, gc=False):
    """A job begins on this thread. If it is a message, these tell which; see `Began`."""

    peer: str = ""
    kind: str = ""
    call: int = 0


class Stops(Event, frozen=True, gc=False):
    """It is over, or will not be done any more."""

    began: bool = True
    """There was a `Starts` for it on this thread."""
    replies: bool = True
    """If it was a request, it has been answered."""
    failed: bool = False
    """The reply told of an error."""


class PassBegan(Event, frozen=True, gc=False):
    """A backward pass has been started here."""

    context: int
    backward: int


class PassEnded(Event, frozen=True, gc=False):
    """It is over, on all workers, or has failed."""

    context: int
    backward: int
    failed: bool


class Planned(Event, frozen=True, gc=False):
    """It is known which components of a pass can be run, now that the pass has begun or gradients have come."""

    backward: int


class RunBegan(Event, frozen=True, gc=False):
    """A component of a pass is about to be run."""

    context: int
    backward: int
    sources: tuple[int, ...]


class RunEnded(Event, frozen=True, gc=False):
    """It has run."""

    backward: int
    sources: tuple[int, ...]


class TorchBegan(Event, frozen=True, gc=False):
    """Torch's engine is called now, in the middle of a run."""

    backward: int


class RecvReached(Event, frozen=True, gc=False):
    """Torch's engine has come to tensors from a peer: their gradients go back to it."""

    backward: int
    peer: str


class GradientsSent(Event, frozen=True, gc=False):
    """Gradients of a pass are about to leave, for these tensors of the peer's."""

    backward: int
    peer: str
    sources: tuple[int, ...]


class GradientsCame(Event, frozen=True, gc=False):
    """Gradients of a pass have come, for these tensors of this worker's."""

    backward: int
    peer: str
    sources: tuple[int, ...]


class TorchEnded(Event, frozen=True, gc=False):
    """Torch's engine has returned."""

    backward: int


class Stored(Event, frozen=True, gc=False):
    """The gradients of leaves have been added to those of the context."""

    backward: int


class GateWaits(Event, frozen=True, gc=False):
    """A run has come to a gate whose gradients are not there yet."""

    backward: int
    source: int


class GateOpens(Event, frozen=True, gc=False):
    """They have come, or the pass has failed."""

    backward: int
    source: int


class RefMade(Event, frozen=True, gc=False):
    """This worker keeps a new value for references."""

    ref: str


class RefFreed(Event, frozen=True, gc=False):
    """Nobody refers to a value of this worker's any more."""

    ref: str


class Losing(Event, frozen=True, gc=False):
    """A line has ended, and those who wait for it are being told."""

    peer: str


class LinkUp(Event, frozen=True, gc=False):
    """There is a new line with a peer."""

    peer: str
    served: bool
    """The peer has opened it."""


class LinkLost(Event, frozen=True, gc=False):
    """A line with a peer has ended, and everybody has been told."""

    peer: str
    served: bool
    reason: str


class Suspected(Event, frozen=True, gc=False):
    """A peer cannot be reached; whether it is dead is not known."""

    peer: str
    reason: str


class Present(Event, frozen=True, gc=False):
    """A peer that was suspected answers again."""

    peer: str


class Over(Event, frozen=True, gc=False):
    """An incarnation of a peer has ended, and what it held has been given up."""

    peer: str
    reason: str
    certain: bool
    """This is known. Otherwise the peer has been silent for as long as the option ``lost_after`` says."""


Observer = Callable[[Event], None]


class Observers(list[Observer]):
    """Those who observe one worker. Thread-safe. It is true while there is one: whoever emits asks this first.

    A list, since a list is asked without a call and without an attribute: this is asked at a dozen places of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, observer: Observer) -> Callable[[], None]:
        """Have ``observer`` called with every event; returns a function that ends it."""
        with self._lock:
            self.append(observer)
        return lambda: self._remove(observer)

    def _remove(self, observer: Observer) -> None:
        with self._lock:
            self[:] = [other for other in self if other is not observer]

    def emit(self, event: Event) -> None:
        for observer in tuple(self):
            observer(event)
