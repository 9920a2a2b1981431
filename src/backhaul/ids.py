"""Names for things that cross the wire. All are frozen."""

from __future__ import annotations

from typing import NewType

import msgspec

CallId = NewType("CallId", int)
"""Numbers a call among those of one direction between two workers; never reused."""


class RefId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A value that lives on one worker: its owner, who made the reference, and that one's count."""

    owner: int
    creator: int
    number: int

    def __str__(self) -> str:
        return f"{self.owner}/{self.creator}.{self.number}"


class ShareId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One sending of a reference: the sender and its count."""

    sharer: int
    number: int


class WorkerInfo(msgspec.Struct, frozen=True, order=True):
    """A worker: ``id`` is its rank, ``name`` what users call it by."""

    id: int
    name: str
