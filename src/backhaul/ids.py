"""Ids of things that cross the wire. All are frozen."""

from __future__ import annotations

import msgspec

_LIFE_DIGITS = 8

GUEST = -1
"""The rank of a guest: a process that is not a member of the group and may only look (`seeing.guest`)."""


class RefId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names a value that lives on one worker: its owner, the reference's creator, and the creator's count."""

    owner: int
    creator: int
    number: int
    life: int = 0
    """Tells the owner's process from earlier and later ones of the same rank (`life_of`); 0 if unknown."""

    def __str__(self) -> str:
        return f"{self.owner}/{self.creator}.{self.number}"


def life_of(incarnation: str) -> int:
    """The part of an incarnation that references carry."""
    try:
        return int(incarnation[:_LIFE_DIGITS], 16)
    except ValueError:
        return 0


class ShareId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names one transfer of a reference: the sender and its count."""

    sharer: int
    number: int


_PID_DIGITS = 10


class Addresses(msgspec.Struct, frozen=True):
    """The addresses of a worker, as it announces them to the others."""

    host: str = ""
    """Names the machine, so that peers know whether they can use a unix path."""
    unix: str | None = None
    tcp: tuple[str, int] | None = None
    memory: str | None = None
    process: str = ""
    """Names the worker's process, for peers on the same machine: see `transport.processes`."""

    @property
    def pid(self) -> int:
        """The process id on the worker's machine; 0 if unknown."""
        parts = self.process.split("/")
        return int(parts[2]) if len(parts) == 4 and parts[2].isdecimal() and len(parts[2]) <= _PID_DIGITS else 0


class WorkerInfo(msgspec.Struct, frozen=True, order=True):
    """A worker: ``id`` is its rank, ``name`` the name that users give it."""

    id: int
    name: str
