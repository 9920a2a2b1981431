"""Names for things that cross the wire. All are frozen."""

from __future__ import annotations

import msgspec

_LIFE_DIGITS = 8

GUEST = -1
"""The rank of a visitor that is not a member of the group and may only look (`seeing.guest`)."""


class RefId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A value that lives on one worker: its owner, who made the reference, and that one's count."""

    owner: int
    creator: int
    number: int
    life: int = 0
    """Tells the owner's process from others that have its rank (`life_of`); 0 if the creator does not know it."""

    def __str__(self) -> str:
        return f"{self.owner}/{self.creator}.{self.number}"


def life_of(incarnation: str) -> int:
    """The part of an incarnation that references carry."""
    try:
        return int(incarnation[:_LIFE_DIGITS], 16)
    except ValueError:
        return 0


class ShareId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One sending of a reference: the sender and its count."""

    sharer: int
    number: int


_PID_DIGITS = 10


class Addresses(msgspec.Struct, frozen=True):
    """Where a worker can be reached, as it tells the others."""

    host: str = ""
    """Names the machine, so that peers know whether a unix path means anything to them."""
    unix: str | None = None
    tcp: tuple[str, int] | None = None
    memory: str | None = None
    process: str = ""
    """Names the worker's process, for peers on the same machine: see `transport.processes`."""

    @property
    def pid(self) -> int:
        """The id of that process, on its machine; 0 if the worker does not tell."""
        parts = self.process.split("/")
        return int(parts[2]) if len(parts) == 4 and parts[2].isdecimal() and len(parts[2]) <= _PID_DIGITS else 0


class WorkerInfo(msgspec.Struct, frozen=True, order=True):
    """A worker: ``id`` is its rank, ``name`` what users call it by."""

    id: int
    name: str
