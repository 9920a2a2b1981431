"""Translation: values, and the exceptions of functions, into frames, and messages back into values.

A value that leaves is packed into a tree. Its tensors and references become the `Cargo` of the message: references are
pinned, and in an autograd context tensors that require grad are recorded. Then the message is made, and then its frame.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch
from torch._C import _are_functorch_transforms_active

from backhaul.agent.accounts import Accounts
from backhaul.agent.observing import (
    Observers,
    Packed,
    RecvRecorded,
    SendRecorded,
)
from backhaul.agent.recording import NoRecording, Recording, Tensors
from backhaul.agent.traffic import NoTraffic, Traffic
from backhaul.devices.staging import WorkerDevices, no_map
from backhaul.edges.compression import expanded
from backhaul.edges.crossing import Crossing, Edges
from backhaul.errors import (
    NotInitializedError,
    RemoteError,
    RemoteTraceback,
    UnsendableError,
    WorkerLostError,
    user_frames,
)
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Channel
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode
from backhaul.wire.landing import land
from backhaul.wire.messages import Coded, Failed, Failure, Mark, Refs, Result
from backhaul.wire.tensors import Staging
from backhaul.wire.trees import ATOMS, Packing
from backhaul.wire.values import Codec

_log = logging.getLogger("backhaul.security")


class Peer(Protocol):
    """The connection on which a message leaves."""

    @property
    def peer(self) -> WorkerInfo: ...

    @property
    def channel(self) -> Channel: ...

    @property
    def broken(self) -> bool: ...


class Cargo(msgspec.Struct, frozen=True, gc=False):
    """Everything that a message carries besides its tree.

    The cargo is made first, then the message, and then the frame (`Translation.frame`). The references in the cargo are
    pinned for this message. A caller that drops the message instead must call `Traffic.stayed`.
    """

    mark: Mark | None
    refs: Refs
    tensors: Tensors
    staging: Staging | None
    coded: tuple[Coded, ...]


class Translation:
    """What one worker sends and receives, as values on one side and frames on the other. Thread-safe."""

    def __init__(self, me: WorkerInfo, codec: Codec, max_message_bytes: int) -> None:
        self.traffic: Traffic = NoTraffic()
        self.observers = Observers()
        self.devices: WorkerDevices | None = None
        """The GPUs that tensors in messages may be on. None if no worker has a device map."""
        self.edges: Edges | None = None
        """The transformations of tensors that leave for some peers. None if no peer has any."""
        self.accounts = Accounts()
        self.closing = threading.Event()
        """This worker is about to be closed, so what peers ask for may be gone."""
        self.recording: Recording = NoRecording()
        self.on_failure: Callable[[BaseException, str], BaseException] | None = None
        """Called with each exception for a peer and its traceback text. Returns the exception to send instead."""
        self._max_message_bytes = max_message_bytes
        self._me = me
        self._codec = codec

    # Messages that have come.

    def open(self, envelope: Envelope, sender: WorkerInfo) -> Any:
        """The value of a reply. Raises the exception that the other worker raised."""
        message = envelope.message
        if type(message) is Result:
            if type(message.tree) in ATOMS and not message.refs and message.mark is None:
                return message.tree
            return self.unpack(envelope, sender)
        raise self.rebuild(envelope, sender)

    def unpack(self, envelope: Envelope, sender: WorkerInfo) -> Any:
        """The value of a message's tree. Reports its references to `traffic` as arrived, even if this raises."""
        message = envelope.message
        try:
            return self._codec.unpack(message.tree, self._receive(envelope, sender))
        finally:
            if message.refs:
                self.traffic.arrived(message.refs)

    def _receive(self, envelope: Envelope, sender: WorkerInfo) -> Tensors:
        """The tensors of a message: on their devices, expanded if they were compressed, and recorded if marked."""
        message = envelope.message
        land(envelope.tensors)
        tensors: Tensors = envelope.tensors
        if coded := getattr(message, "coded", ()):
            tensors = expanded(coded, tensors, self._max_message_bytes)
        mark = getattr(message, "mark", None)
        if mark is not None and mark.message:
            tensors = self.recording.received(mark, tensors, sender)
            if self.observers:
                self.observers.emit(RecvRecorded())
        return tensors

    def discard(self, envelope: Envelope) -> None:
        """Drop a message that is not unpacked. Reports its references to `traffic` as arrived."""
        if envelope.message.refs:
            self.traffic.arrived(envelope.message.refs)

    def rebuild(self, envelope: Envelope, sender: WorkerInfo) -> BaseException:
        """The exception in a message from another worker; a `RemoteError` if its type is not available here."""
        message: Failure | Failed = envelope.message
        error: Any = None
        if message.tree is not None:
            try:
                error = self.unpack(envelope, sender)
            except Exception:  # its type is not available here
                error = None
        # SystemExit and KeyboardInterrupt on the other worker must not end this process.
        if not isinstance(error, Exception):
            error = RemoteError(
                f"{message.type_name} on worker {message.worker!r}: {message.text} (Original exception on remote side "
                "was of this type, which is not available here)",
                message.worker,
                message.type_name,
                message.traceback,
            )
        error.__cause__ = RemoteTraceback(message.worker, message.traceback)
        return error  # type: ignore[no-any-return]

    # Requests.

    def load(self, tree: Any, packing: Packing, to: Peer) -> Cargo:
        """The cargo of a request with this packed value. Runs on the calling thread. Raises `UnsendableError`."""
        if _are_functorch_transforms_active() and any(map(_stands_for_another, packing.tensors)):
            raise inside_a_transform()
        try:
            if self.edges is not None and (crossing := self.edges.to(to.peer.name)) is not None:
                return self._cross(crossing, tree, packing, to)
            mark, tensors = self.recording.asking(packing.tensors, to.peer)
            if mark is not None:
                self._asks(mark, packing)
            return self._load(mark, tensors, packing, to, reply=False)
        except RuntimeError as error:
            if _are_functorch_transforms_active():
                raise inside_a_transform() from error
            raise

    def _cross(self, crossing: Crossing, tree: Any, packing: Packing, to: Peer) -> Cargo:
        """`load`, for a peer with an edge."""
        leaving = crossing.values(tree, packing.tensors)
        if to.broken:  # `Edges.lost` may have dropped the feedback already, before these values added to it
            crossing.feedback.clear()
        mark, recorded = self.recording.asking(leaving.tensors, to.peer)
        if mark is not None:
            self._asks(mark, packing)
        tensors, coded = leaving.wired(recorded)
        return self._load(mark, tensors, packing, to, coded, reply=False)

    def _asks(self, mark: Mark, packing: Packing) -> None:
        """Report a recorded request. Raises if one of its tensors would arrive without its history."""
        if packing.unrecorded is not None and mark.grad:
            raise without_history(packing.unrecorded)
        if self.observers:
            self.observers.emit(SendRecorded())

    # Replies.

    def result(self, id: int, value: Any, to: Peer, asked: Mark | None) -> Frame:
        """The frame that answers request ``id`` of ``to`` with a value. ``asked`` is the mark of the request."""
        crossing = None if self.edges is None else self.edges.to(to.peer.name)
        if asked is None and crossing is None and type(value) in ATOMS:
            return encode(Result(id, value))
        tree, packing = self._codec.pack(value)
        if self.observers:
            self.observers.emit(Packed())
        if crossing is None:
            cargo = self._load_reply(packing, to, asked)
        else:
            cargo = self._cross_back(crossing, tree, packing, to, asked)
        return self.frame(Result(id, tree, cargo.refs, cargo.mark, cargo.coded), cargo)

    def _load_reply(self, packing: Packing, to: Peer, asked: Mark | None) -> Cargo:
        tensors: Tensors = packing.tensors
        mark = None
        if asked is not None:
            mark, tensors = self._answers(asked, tensors, packing, to)
        elif tensors:
            mark = self.recording.leaving(tensors)
        return self._load(mark, tensors, packing, to)

    def _cross_back(self, crossing: Crossing, tree: Any, packing: Packing, to: Peer, asked: Mark | None) -> Cargo:
        """`_load_reply`, for a peer with an edge."""
        leaving = crossing.values(tree, packing.tensors)
        if to.broken:  # as in `_cross`
            crossing.feedback.clear()
        mark, recorded = None, leaving.tensors
        if asked is not None:
            mark, recorded = self._answers(asked, recorded, packing, to)
        tensors, coded = leaving.wired(recorded)
        return self._load(mark, tensors, packing, to, coded)

    def _answers(self, asked: Mark, tensors: Tensors, packing: Packing, to: Peer) -> tuple[Mark | None, Tensors]:
        """The mark and the tensors of the reply to a recorded request."""
        if packing.unrecorded is not None and asked.grad:
            raise without_history(packing.unrecorded)
        recorded = self.recording.answering(asked, tensors, to.peer)
        if self.observers:
            self.observers.emit(SendRecorded())
        return recorded

    def failure(self, id: int, error: BaseException, to: Peer) -> Frame:
        """The frame that answers request ``id`` of ``to`` with an exception. Never raises."""
        self.accounts.count_error("served", error)
        return self.tell_failure(lambda *what: Failure(id, *what), error, to)

    def tell_failure(self, make: Callable[..., Any], error: BaseException, to: Peer) -> Frame:
        """The frame of a message about an exception. Never raises.

        The message is ``make(worker, type name, text, traceback, tree, refs)``. The last two are left out if the
        exception itself cannot be sent.
        """
        if isinstance(error, NotInitializedError) and self.closing.is_set():
            error = WorkerLostError(f"worker {self._me.name!r} has left the group", self._me.name)
        text = "".join(traceback.format_exception(type(error), error, user_frames(error.__traceback__)))
        if self.on_failure is not None:
            error = self.on_failure(error, text)
        kind = type(error)
        texts = (self._me.name, f"{kind.__module__}.{kind.__qualname__}", safe_str(error), text)
        if self.edges is not None and (crossing := self.edges.to(to.peer.name)) is not None and crossing.transforms:
            _log.warning("a call of worker %s failed:\n%s", to.peer.name, text)
            texts = (*texts[:2], crossing.text_of(error, texts[2]), "")
            if not crossing.may_tell(error):
                return encode(make(*texts))
            error = type(error)(texts[2])  # without its attributes, notes and cause
        try:
            tree, packing = self._codec.pack(error)
            cargo = self._load(None, packing.tensors, packing, to)
            return self.frame(make(*texts, tree, cargo.refs), cargo)
        except Exception:  # the exception cannot be sent, but its texts can
            return encode(make(*texts))

    # Both.

    def _load(
        self,
        mark: Mark | None,
        tensors: Tensors,
        packing: Packing,
        to: Peer,
        coded: tuple[Coded, ...] = (),
        *,
        reply: bool = True,
    ) -> Cargo:
        staging = None
        if self.devices is not None:
            # The message may refer to results of work that this thread has enqueued on a stream.
            self.devices.streams.leave_word()
        if self.devices is not None and tensors:
            staging = self.devices.staging(to.peer.name, to.channel.device_lending, tensors, reply=reply)
        elif reply and any(tensor.is_cuda for tensor in tensors):
            raise UnsendableError(no_map(to.peer.name, reply=True))
        refs = self.traffic.departing(packing.attached, to.peer, to) if packing.attached else ()
        return Cargo(mark, refs, tensors, staging, coded)

    def frame(self, message: Any, cargo: Cargo) -> Frame:
        """The frame of a message that was made with this cargo. If this raises, its references are unpinned."""
        try:
            return self._checked(encode(message, cargo.tensors, cargo.staging))
        except BaseException as error:
            if cargo.refs:
                self.traffic.stayed(cargo.refs)
            if isinstance(error, RuntimeError) and _are_functorch_transforms_active():
                raise inside_a_transform() from error
            raise

    def _checked(self, frame: Frame) -> Frame:
        """The frame. Raises if it is over the size limit: the peer would refuse it, or even close the connection."""
        if frame.size > self._max_message_bytes:
            raise UnsendableError(
                f"a message of {frame.size} bytes is over the limit of {self._max_message_bytes}: send it in parts, or "
                "set the option max_message_bytes on all workers"
            )
        return frame


def _stands_for_another(tensor: torch.Tensor) -> bool:
    """Whether ``torch.func`` has wrapped a tensor. A wrapped tensor has no memory, or that of another tensor."""
    return torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def inside_a_transform() -> UnsendableError:
    """The error for a call with tensors that torch.func has wrapped."""
    return UnsendableError(
        "a remote call inside torch.func.grad, vmap, jvp or another transform of torch.func: the tensors there "
        "stand for others and cannot be sent. Make the call outside the transform, or apply the transform in the "
        "called function; for gradients use backhaul.autograd"
    )


def without_history(kind: str) -> UnsendableError:
    """The error for a tensor that requires grad but would lose its history, in a message of an autograd context."""
    return UnsendableError(
        f"a {kind} requires grad, and would arrive without its history: it is neither a plain subclass of torch.Tensor "
        "nor a wrapper that has __tensor_flatten__ and __tensor_unflatten__. Send a plain tensor, send it detached "
        "(.detach()), or make the call under torch.no_grad()"
    )


def safe_str(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} whose str() raises>"
