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


class Call(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Run ``function(*args, **kwargs)``; the tree holds ``(function, args, kwargs)``."""

    id: int
    tree: Any


class Result(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The request ``id`` is done; the tree holds its value."""

    id: int
    tree: Any


class Failure(msgspec.Struct, frozen=True, array_like=True):
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


class Ping(msgspec.Struct, frozen=True, array_like=True):
    """A request without a purpose: whoever answers is alive."""

    id: int


class AwaitReady(msgspec.Struct, frozen=True, array_like=True):
    """A request that is answered once the worker has asked for a graceful shutdown."""

    id: int


class AwaitEnd(msgspec.Struct, frozen=True, array_like=True):
    """A request that the leader of a shutdown answers once all work is over."""

    id: int


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """A request for `(idle, calls sent by peer, calls finished by peer)`."""

    id: int


class Goodbye(msgspec.Struct, frozen=True, array_like=True):
    """The sender leaves on purpose and makes no more calls. One-way."""


Message = Call | Result | Failure | Ping | AwaitReady | AwaitEnd | Tally | Goodbye

KINDS: dict[int, type[Any]] = {
    1: Call,
    2: Result,
    3: Failure,
    4: Ping,
    5: AwaitReady,
    6: AwaitEnd,
    7: Tally,
    8: Goodbye,
}
"""The kind byte of a frame -> the message in it. Numbers are never reused."""

KIND_OF: dict[type[Any], int] = {message: kind for kind, message in KINDS.items()}
