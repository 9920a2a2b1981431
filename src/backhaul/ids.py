"""Names for things that cross the wire. All are frozen."""

from __future__ import annotations

from typing import NewType

import msgspec

CallId = NewType("CallId", int)
"""Numbers a call among those of one direction between two workers; never reused."""


class WorkerInfo(msgspec.Struct, frozen=True, order=True):
    """A worker: ``id`` is its rank, ``name`` what users call it by."""

    id: int
    name: str
