"""What workers say to each other: one frozen struct per kind of message.

A message travels as a msgpack array of its fields; the frame's header carries its
kind, so there is no tag inside. A *tree* is what `values.Codec` made of the user's
values: plain msgpack, with tensors as indices into the frame's tensor table.

A **request** has an ``id`` and is answered by one `Result` or `Failure` of that id, on
the same channel. The rest are one-way.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backhaul.ids import RefId, ShareId

VERSION = 1
"""The version of the frames that carry messages. The greeting contains it."""

Refs = tuple[tuple[RefId, ShareId], ...]
"""The references that a message brings, each with the id of its share."""


class Mark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The autograd data of a message that belongs to a distributed autograd context.

    The recorded tensors of a message are those that require grad. ``message`` is the id of the first one, and the
    others have the ids that follow. It is 0 if there are none. A request with ``grad`` False was made under
    ``no_grad``: its reply is not recorded either.

    ``reach`` lists, for each recorded tensor, the ids of the tensors of earlier messages, of all workers, that it
    depends on. If the recorded tensor takes part in a pass, those tensors take part too. ``()`` means that no recorded
    tensor depends on an earlier one. None means that the sender does not know.

    In a reply outside any context (``context`` is 0), ``reach`` holds the places of the tensors that were computed.
    """

    context: int
    message: int = 0
    grad: bool = True
    reach: tuple[tuple[int, ...], ...] | None = None


class Coded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that travels compressed, as one or more smaller parts: see `edges.compression`.

    The first part takes the ``place`` of the tensor. Further parts follow all tensors of the message.
    """

    place: int
    code: str
    dtype: str
    shape: tuple[int, ...]
    grad: bool = False


class Call(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Run ``function(*args, **kwargs)``; the tree holds ``(function, args, kwargs)``.

    ``autocast`` lists the device types for which the caller has autocast on, each with the name of its dtype.
    """

    id: int
    tree: Any
    refs: Refs = ()
    mark: Mark | None = None
    autocast: tuple[tuple[str, str], ...] = ()
    coded: tuple[Coded, ...] = ()


class Result(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """The request ``id`` is done; the tree holds its value."""

    id: int
    tree: Any
    refs: Refs = ()
    mark: Mark | None = None
    coded: tuple[Coded, ...] = ()


class Failure(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The request ``id`` raised.

    ``tree`` holds the exception if it can travel, else None. The texts are always there.
    """

    id: int
    worker: str
    type_name: str
    text: str
    traceback: str
    tree: Any = None
    refs: Refs = ()


class Ping(msgspec.Struct, frozen=True, array_like=True):
    """A request that does nothing: the answer shows that the peer is alive."""

    id: int


class AwaitReady(msgspec.Struct, frozen=True, array_like=True):
    """A request that is answered once the worker has asked for this stage of a graceful shutdown."""

    id: int
    stage: int


class AwaitEnd(msgspec.Struct, frozen=True, array_like=True):
    """A request that the leader of a shutdown answers once all work of this stage is over."""

    id: int
    stage: int


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """A request for `(idle, calls sent by peer, calls finished by peer)`."""

    id: int


class Goodbye(msgspec.Struct, frozen=True, array_like=True):
    """The sender leaves the group in good order and makes no more calls. One-way."""


class Create(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request to run a function and keep its value under ``ref``. The owner answers before the function runs."""

    id: int
    ref: RefId
    tree: Any
    refs: Refs = ()
    mark: Mark | None = None
    autocast: tuple[tuple[str, str], ...] = ()
    coded: tuple[Coded, ...] = ()


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """A request for the value of a reference. The owner answers once the value exists."""

    id: int
    ref: RefId
    mark: Mark | None = None


class Register(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """User to owner: list me as a user of this value."""

    ref: RefId


class Registered(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Owner to user: you are listed or, if ``exists`` is False, the value is gone."""

    ref: RefId
    exists: bool = True


class Unpin(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Receiver to sharer: I have the reference that you sent, and the owner has listed me."""

    share: ShareId


class Release(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """User to owner: strike me off the list."""

    ref: RefId


class Sweep(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Have you handled everything that these dead workers sent you?"""

    dead: tuple[int, ...]


class Swept(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The answer to `Sweep`: I have handled everything that these dead workers sent me."""

    dead: tuple[int, ...]


class Recall(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Sharer to receiver: the connection that carried these shares has ended; unpin those that you do not have."""

    shares: tuple[ShareId, ...]


class Obituary(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """This incarnation of a worker has ended. The sender knows this for certain: see `agent.fate`."""

    rank: int
    incarnation: str
    reason: str


Notice = Register | Registered | Unpin | Release | Sweep | Swept | Recall | Obituary
"""What workers tell each other about references. `refs.counting` explains when."""


class Notices(msgspec.Struct, frozen=True, array_like=True):
    """A request to handle these notices in order. ``number`` counts such requests from one ``process``."""

    id: int
    process: int
    number: int
    notices: tuple[Notice, ...]


class Pass(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The description of a backward pass. Every message of the pass carries it.

    The high bits of ``id`` name the worker that started the pass, the *starter*. Passes of that worker in this context
    with ids below ``floor`` are over.
    """

    id: int
    context: int
    floor: int
    retain_graph: bool
    into_grad: bool


class Shortcut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that the starter of a pass passed on unchanged, so its gradient need not go through the starter.

    The gradient for ``source``, a tensor that the starter sent, can go straight to worker ``to``, as the gradient for
    its tensor ``message``.
    """

    source: int
    to: int
    message: int


class Gradients(msgspec.Struct, frozen=True, array_like=True):
    """The gradients of a message. They go to the worker that sent it, or where a `Shortcut` leads. One-way.

    ``sources`` are the ids of the recorded tensors of that message that take part in the pass. The tensors of the frame
    are the gradients of the sources at the places ``present``. The gradients of the other sources are undefined.

    The last gradients of a run may carry the `Report` of that run: then ``consumed`` is not empty. A receiver that is
    not the starter passes the report on with its own. Gradients to such a receiver also bring the shortcuts that the
    rest of the pass may take.
    """

    backward: Pass
    sources: tuple[int, ...]
    present: tuple[int, ...]
    consumed: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()
    coded: tuple[Coded, ...] = ()
    shortcuts: tuple[Shortcut, ...] = ()


class TakePart(msgspec.Struct, frozen=True, array_like=True):
    """These tensors, which the receiver sent, take part in the pass. One-way."""

    backward: Pass
    sources: tuple[int, ...]


class Resolve(msgspec.Struct, frozen=True, array_like=True):
    """To the starter of the pass: find out which tensors take part in the pass, and tell me. One-way."""

    backward: Pass


class Resolved(msgspec.Struct, frozen=True, array_like=True):
    """The sender of every tensor that takes part in the pass knows that it does. One-way."""

    backward: Pass


class Report(msgspec.Struct, frozen=True, array_like=True):
    """To the starter of the pass: a run, or a step of resolving the pass, is over. One-way.

    ``consumed`` are the sources that the run or step handled. ``emitted`` are the sources that it passed on to.
    """

    backward: Pass
    resolving: bool
    consumed: tuple[int, ...]
    emitted: tuple[int, ...]


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """The pass has failed: stop waiting for it, and tell the other workers of the context. One-way.

    The fields are those of `Failure`.
    """

    backward: Pass
    worker: str
    type_name: str
    text: str
    traceback: str
    tree: Any = None
    refs: Refs = ()


class Check(msgspec.Struct, frozen=True, array_like=True):
    """A request that is answered at once: check that the workers to which you gave work of this pass are alive."""

    id: int
    backward: Pass
    round: int


class Leave(msgspec.Struct, frozen=True, array_like=True):
    """The context is over: forget it, and tell its other workers. One-way."""

    context: int


class Inquire(msgspec.Struct, frozen=True, array_like=True):
    """A request to the worker that made these contexts: which of them are over?"""

    id: int
    contexts: tuple[int, ...]


class Inspect(msgspec.Struct, frozen=True, array_like=True):
    """A request for what a worker knows about itself. It changes nothing there. ``arguments`` are plain data."""

    id: int
    topic: str
    arguments: dict[str, Any] = {}


Message = (
    Call
    | Result
    | Failure
    | Ping
    | AwaitReady
    | AwaitEnd
    | Tally
    | Goodbye
    | Create
    | Fetch
    | Notices
    | Gradients
    | TakePart
    | Resolve
    | Resolved
    | Report
    | Failed
    | Check
    | Leave
    | Inquire
    | Inspect
)

KINDS: dict[int, type[Any]] = {
    1: Call,
    2: Result,
    3: Failure,
    4: Ping,
    5: AwaitReady,
    6: AwaitEnd,
    7: Tally,
    8: Goodbye,
    9: Create,
    10: Fetch,
    11: Notices,
    12: Gradients,
    13: TakePart,
    14: Resolve,
    15: Resolved,
    16: Report,
    17: Failed,
    18: Check,
    19: Leave,
    20: Inquire,
    21: Inspect,
}
"""The kind byte of a frame -> the message in it. Numbers are never reused."""

KIND_OF: dict[type[Any], int] = {message: kind for kind, message in KINDS.items()}

REPLIES = (Result, Failure)
"""The messages that answer a request."""
