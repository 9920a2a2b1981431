"""Member: the record of a worker in the group's store. Its contents are not trusted, so records are decoded by type."""

from __future__ import annotations

import msgspec

from backhaul.devices.maps import Devices
from backhaul.ids import WorkerInfo
from backhaul.transport.base import Addresses

ENDED = "ended"
"""Takes the place of a record once the worker has shut a fixed group down."""


class Member(msgspec.Struct, frozen=True):
    """The store's record of a worker."""

    id: int
    name: str
    addresses: Addresses
    devices: Devices = Devices()
    incarnation: str = ""
    """Distinguishes this process from other processes that have had its name and rank."""

    def __str__(self) -> str:
        process = f", process {self.addresses.pid}" if self.addresses.pid else ""
        return f"worker {self.name!r} (incarnation {self.incarnation or '?'}{process})"

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.id, self.name)


# Made once, at import: msgspec crashes if two threads decode a type for the first time at once.
_member_decoder = msgspec.json.Decoder(Member)


def encoded(member: Member) -> str:
    return msgspec.json.encode(member).decode()


def decoded(record: bytes) -> Member | None:
    """The member of a record. None if there is none in it."""
    try:
        return _member_decoder.decode(record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
