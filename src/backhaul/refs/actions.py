"""Actions: the decisions of `counting`, for its driver to carry out. Pure."""

from __future__ import annotations

from typing import NamedTuple

from backhaul.ids import RefId
from backhaul.wire.messages import Notice


class Send(NamedTuple):
    """Send this notice to that worker."""

    to: int
    notice: Notice


class Free(NamedTuple):
    """Free this value of ours: no worker can reach it any more."""

    ref: RefId


class Void(NamedTuple):
    """This value of ours will never be made: fail the threads that may wait for it."""

    ref: RefId


class Confirm(NamedTuple):
    """The owner has listed us or, if ``exists`` is False, the value is gone."""

    ref: RefId
    exists: bool


class Seek(NamedTuple):
    """Look for the process with this life, which has replaced a dead worker: we have a reference to a value of it.

    Call `Counting.revived` when it is found, and `Counting.died` with its life if it is dead, too.
    """

    worker: int
    life: int


Action = Send | Free | Void | Confirm | Seek
