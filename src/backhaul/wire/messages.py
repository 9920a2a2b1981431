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
"""The version of the frames that carry them; the greeting tells it."""

Refs = tuple[tuple[RefId, ShareId], ...]
"""The references that a message brings; its trees refer to them by index."""


class Mark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a message of a distributed autograd context says about itself.

    ``message`` is the id of the first of its tensors that are recorded, those that require grad; the others have the
    ids that follow. It is 0 if there are none. A request with ``grad`` False was made under ``no_grad``: nothing of its
    reply is to be recorded either.

    ``reach`` has, for each recorded tensor, the ids of the tensors of earlier messages, of all workers, that it depends
    on: they take part in a pass if it does. ``()`` means that none depends on any, None that the sender does not know.

    A reply of no context, with ``context`` 0, has in ``reach`` the places of its tensors that were computed.
    """

    context: int
    message: int = 0
    grad: bool = True
    reach: tuple[tuple[int, ...], ...] | None = None


class Coded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of a message that travels in parts, which are smaller than it: see `edges.compression`.

    The first part is at the ``place`` of the tensor, further ones follow all tensors of the message.
    """

    place: int
    code: str
    dtype: str
    shape: tuple[int, ...]
    grad: bool = False


class Call(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Run ``function(*args, **kwargs)``; the tree holds ``(function, args, kwargs)``.

    ``autocast`` has the types of devices for which the caller has it on, each with the name of a dtype.
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

    ``tree`` holds the exception if it can travel, else None. The texts are there in
    any case.
    """

    id: int
    worker: str
    type_name: str
    text: str
    traceback: str
    tree: Any = None
    refs: Refs = ()


class Ping(msgspec.Struct, frozen=True, array_like=True):
    """A request without a purpose: whoever answers is alive."""

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
    """The sender leaves on purpose and makes no more calls. One-way."""


class Create(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request to run a function and keep its value under ``ref``. Answered before it runs."""

    id: int
    ref: RefId
    tree: Any
    refs: Refs = ()
    mark: Mark | None = None
    autocast: tuple[tuple[str, str], ...] = ()
    coded: tuple[Coded, ...] = ()


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """A request for the value of a reference; answered when there is one."""

    id: int
    ref: RefId
    mark: Mark | None = None


class Register(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """User to owner: list me."""

    ref: RefId


class Registered(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Owner to user: you are listed; or the value is gone."""

    ref: RefId
    exists: bool = True


class Unpin(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Receiver to sharer: I have what you sent, and the owner knows it."""

    share: ShareId


class Release(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """User to owner: strike me off."""

    ref: RefId


class Sweep(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Have you dealt with all that these dead workers sent you?"""

    dead: tuple[int, ...]


class Swept(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Yes."""

    dead: tuple[int, ...]


class Recall(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Sharer to receiver: the connection that these went over has ended; unpin what you do not have."""

    shares: tuple[ShareId, ...]


class Obituary(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """This incarnation of a worker has ended: that is known, not guessed. See `agent.fate`."""

    rank: int
    incarnation: str
    reason: str


Notice = Register | Registered | Unpin | Release | Sweep | Swept | Recall | Obituary
"""What workers tell each other about references; `refs.counting` says when."""


class Notices(msgspec.Struct, frozen=True, array_like=True):
    """A request to take note of these, in order; ``number`` counts such requests from one ``process``."""

    id: int
    process: int
    number: int
    notices: tuple[Notice, ...]


class Pass(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A backward pass, as every message of it says.

    The high bits of ``id`` name the worker that started it. Passes of that worker in this context with ids
    below ``floor`` are over.
    """

    id: int
    context: int
    floor: int
    retain_graph: bool
    into_grad: bool


class Shortcut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that the starter of a pass has sent on as it came: its gradient need not go through the starter.

    The gradient for ``source``, a tensor of the starter's, can go to worker ``to`` instead, for ``message`` there.
    """

    source: int
    to: int
    message: int


class Gradients(msgspec.Struct, frozen=True, array_like=True):
    """The gradients of a message, to the worker that sent it, or where a `Shortcut` leads. One-way.

    ``sources`` are its recorded tensors that take part in the pass, by id; the frame's tensors are the gradients of
    those at the places ``present``. Those of the others are undefined.

    The last gradients of a run may take the `Report` of that run along: then ``consumed`` is not empty. A worker other
    than the starter passes such a report on with its own. To those workers the gradients also bring the shortcuts that
    the rest of the pass may take.
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
    """To who started the pass: find out what takes part in it, and tell me. One-way."""

    backward: Pass


class Resolved(msgspec.Struct, frozen=True, array_like=True):
    """All that takes part in the pass has been told so. One-way."""

    backward: Pass


class Report(msgspec.Struct, frozen=True, array_like=True):
    """To who started the pass: a run, or a step of resolving it, is over. One-way.

    ``consumed`` are the sources that it was about, ``emitted`` those that it has passed on to.
    """

    backward: Pass
    resolving: bool
    consumed: tuple[int, ...]
    emitted: tuple[int, ...]


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """The pass has failed, as in `Failure`: stop waiting for it, and tell the other workers of the context. One-way."""

    backward: Pass
    worker: str
    type_name: str
    text: str
    traceback: str
    tree: Any = None
    refs: Refs = ()


class Check(msgspec.Struct, frozen=True, array_like=True):
    """A request that is answered at once: see that those whom you gave work of this pass are alive."""

    id: int
    backward: Pass
    round: int


class Leave(msgspec.Struct, frozen=True, array_like=True):
    """The context is over: forget it, and tell the other workers of it. One-way."""

    context: int


class Inquire(msgspec.Struct, frozen=True, array_like=True):
    """A request to who made these contexts: which of them are over?"""

    id: int
    contexts: tuple[int, ...]


class Inspect(msgspec.Struct, frozen=True, array_like=True):
    """A request for what a worker knows about itself; it changes nothing there. ``arguments`` are plain data."""

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
