"""Observing: events about what happens inside a worker, for tools that subscribe to them.

The layers emit small structs. Each has the thread and the time, in nanoseconds of a clock that all processes of a host
share. Test schedulers, benchmarks and profilers subscribe to the events. So they replace no methods and need no private
names. No event is created while there are no observers: emitting code checks this first.

An observer is called on the thread on which the event happens, in the middle of it. So the observer must be quick, must
not raise and must not call the worker. Some locks of the worker may be held.

    calls       Asked ─► Packed ─► Issued ─► Encoded ─► Sent
                ─► (peer: Read ─► Began ─► Invoked ─► Returned ─► Packed ─► Encoded ─► Ended ─► Sent)
                ─► Read ─► Came ─► HandedOut ─► Settled
                and, in a context, SendRecorded after Issued, RecvRecorded before Invoked and Settled
                and, if the function goes on after its request has been handled, FinishedLate at the peer
    threads     Waits ─► Resumes             Queued ─► Starts ─► Stops
    passes      PassBegan ─► Planned ─► RunBegan ─► RunEnded ─► … ─► PassEnded          GateWaits ─► GateOpens
    runs        RunBegan ─► TorchBegan ─► RecvReached ─► GradientsSent ─► Encoded ─► Sent
                ─► TorchEnded ─► RunEnded, with Stored before RunEnded or, if others wait for the report, after it
                ─► (peer: GradientsCame ─► RunBegan, or GateOpens)
    references  RefMade ─► RefFreed
    links       LinkUp ─► LinkLost

Two workers use the same names for the same thing. A request has an id that its sender gives to no other request. The id
(``call``) and the sender's name identify the call on both sides. Gradients are identified by their pass and their
sources.
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
    """Something has just happened on this thread."""

    at: int = msgspec.field(default_factory=_now)
    thread: int = msgspec.field(default_factory=_thread)


class Asked(Event, frozen=True, gc=False):
    """A request to a peer is about to be made: its values are not packed yet."""

    peer: str
    what: str


class Issued(Event, frozen=True, gc=False):
    """A request to a peer has its id. The frame is made next."""

    peer: str
    call: int
    what: str
    is_call: bool
    """True for a user call, False for an internal request."""


class Packed(Event, frozen=True, gc=False):
    """The arguments of a call, or its value, have been packed."""


class SendRecorded(Event, frozen=True, gc=False):
    """The tensors of an outgoing message have been recorded in the graph of a context."""


class RecvRecorded(Event, frozen=True, gc=False):
    """The tensors of an incoming message have been recorded in the graph of a context."""


class Encoded(Event, frozen=True, gc=False):
    """A message has become a frame."""


class Sent(Event, frozen=True, gc=False):
    """A frame has been written."""

    peer: str
    line: int
    size: int
    replies: bool
    """The frame answers requests: those that this thread has handled, and perhaps those of other threads."""
    frames: int = 1
    """How many frames have left in this write."""


class Read(Event, frozen=True, gc=False):
    """Bytes have been read from a line, but not decoded yet."""

    peer: str
    line: int


class Drained(Event, frozen=True, gc=False):
    """Every message that has been read on a served line is over, or its thread waits for a peer."""

    peer: str
    line: int


class Came(Event, frozen=True, gc=False):
    """Messages on a calling line have been decoded, but not handled yet."""

    peer: str
    line: int
    count: int
    """How many futures and messages there are, without replies that come too late."""
    frames: int = 0
    """How many frames there were."""


class HandedOut(Event, frozen=True, gc=False):
    """The futures and messages of a `Came` event have been given to their threads."""

    peer: str
    line: int
    count: int


class Began(Event, frozen=True, gc=False):
    """The handling of a message begins. It includes the run of a request's function."""

    peer: str
    kind: str
    call: int = 0
    """The id of the request; 0 for other messages."""


class Ended(Event, frozen=True, gc=False):
    """A message has been handled. ``replies``: it has a reply, which leaves later with `Sent`."""

    peer: str
    kind: str
    replies: bool
    call: int = 0
    failed: bool = False
    """The reply is an error."""


class FinishedLate(Event, frozen=True, gc=False):
    """A call has finished after its request was handled: its function is a coroutine, or returned a future."""

    peer: str
    call: int
    failed: bool


class Invoked(Event, frozen=True, gc=False):
    """The user's function is called now. Its arguments have been unpacked."""

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
    """A thread begins to wait for something that only peers can cause. ``slot``: the request, if it awaits a reply."""

    slot: Any = None


class Resumes(Event, frozen=True, gc=False):
    """The wait of a `Waits` event is over."""

    slot: Any = None


class Queued(Event, frozen=True, gc=False):
    """A job waits for another thread: the completion of a future, or a message that was read for that thread."""


class Starts(Event, frozen=True, gc=False):
    """A queued job begins on this thread. If it is a message, the fields name it; see `Began`."""

    peer: str = ""
    kind: str = ""
    call: int = 0


class Stops(Event, frozen=True, gc=False):
    """A queued job is over, or has been dropped."""

    began: bool = True
    """There was a `Starts` event for the job on this thread."""
    replies: bool = True
    """If the job was a request, it has been answered."""
    failed: bool = False
    """The reply was an error."""


class PassBegan(Event, frozen=True, gc=False):
    """A backward pass has been started here."""

    context: int
    backward: int


class PassEnded(Event, frozen=True, gc=False):
    """A backward pass is over on all workers, or has failed."""

    context: int
    backward: int
    failed: bool


class Planned(Event, frozen=True, gc=False):
    """The runnable components of a pass have been found, after the pass began or gradients came."""

    backward: int


class RunBegan(Event, frozen=True, gc=False):
    """A component of a pass is about to run."""

    context: int
    backward: int
    sources: tuple[int, ...]


class RunEnded(Event, frozen=True, gc=False):
    """A component of a pass has run."""

    backward: int
    sources: tuple[int, ...]


class TorchBegan(Event, frozen=True, gc=False):
    """Torch's engine is called now, in the middle of a run."""

    backward: int


class RecvReached(Event, frozen=True, gc=False):
    """Torch's engine has reached tensors that came from a peer. Their gradients go back to that peer."""

    backward: int
    peer: str


class GradientsSent(Event, frozen=True, gc=False):
    """Gradients of a pass are about to leave. ``sources`` are the peer's tensors that they belong to."""

    backward: int
    peer: str
    sources: tuple[int, ...]


class GradientsCame(Event, frozen=True, gc=False):
    """Gradients of a pass have come. ``sources`` are this worker's tensors that they belong to."""

    backward: int
    peer: str
    sources: tuple[int, ...]


class TorchEnded(Event, frozen=True, gc=False):
    """Torch's engine has returned."""

    backward: int


class Stored(Event, frozen=True, gc=False):
    """The gradients of leaves have been added to the gradients of the context."""

    backward: int


class GateWaits(Event, frozen=True, gc=False):
    """A run has reached a gate whose gradients have not come yet."""

    backward: int
    source: int


class GateOpens(Event, frozen=True, gc=False):
    """The gradients of a gate have come, or the pass has failed."""

    backward: int
    source: int


class RefMade(Event, frozen=True, gc=False):
    """This worker holds a new value for references."""

    ref: str


class RefFreed(Event, frozen=True, gc=False):
    """No worker refers to a value of this worker any more."""

    ref: str


class Losing(Event, frozen=True, gc=False):
    """A line has ended, and the threads that wait on it are about to be told."""

    peer: str


class LinkUp(Event, frozen=True, gc=False):
    """A new line with a peer is open."""

    peer: str
    served: bool
    """The peer has opened the line."""


class LinkLost(Event, frozen=True, gc=False):
    """A line with a peer has ended, and all waiting threads and layers have been told."""

    peer: str
    served: bool
    reason: str


class Suspected(Event, frozen=True, gc=False):
    """A peer cannot be reached. It is not known whether it is dead."""

    peer: str
    reason: str


class Present(Event, frozen=True, gc=False):
    """A suspected peer answers again."""

    peer: str


class Over(Event, frozen=True, gc=False):
    """An incarnation of a peer has ended, and what it held has been given up."""

    peer: str
    reason: str
    certain: bool
    """True if the end is known. False if the peer was only silent for as long as ``lost_after`` says."""


Observer = Callable[[Event], None]


class Observers(list[Observer]):
    """The observers of one worker. Thread-safe. True while there is at least one; emitting code checks this first.

    A list, because its truth value needs no Python call and no attribute, and each call checks it at a dozen places.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` with every event. Returns a function that ends this."""
        with self._lock:
            self.append(observer)
        return lambda: self._remove(observer)

    def _remove(self, observer: Observer) -> None:
        with self._lock:
            self[:] = [other for other in self if other is not observer]

    def emit(self, event: Event) -> None:
        for observer in tuple(self):
            observer(event)
