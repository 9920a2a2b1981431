"""Rejoining: whether a worker joins the fixed group that is in a store, or waits for the next one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from backhaul.agent.member import ENDED, decoded
from backhaul.transport.base import Addresses
from backhaul.transport.processes import own_name

if TYPE_CHECKING:
    from torch.distributed import Store

_PAUSE = 0.1

Look = Callable[[Addresses], bool | None]
"""Returns whether a worker listens at its addresses, or None if its host does not answer."""


def goes_on(
    store: Store,
    rank: int,
    world_size: int,
    look: Look,
    moved_on: Callable[[], bool],
    patience: float,
    *,
    restarted: bool = False,
) -> bool:
    """Whether a worker of this rank should join the fixed group in this store.

    It should not if a worker has shut the group down, or if this rank and all others have died. A host that does not
    answer may be cut off only for a moment. A worker that gave up on it would wait in a new group while the others wait
    in the old one. So this keeps looking until ``patience`` seconds have passed, or until ``moved_on`` says that others
    have left this group.

    ``restarted``: the launcher restarts workers only all together. Then a record of another process at this rank is
    enough to say no: the processes that listen at the addresses of that group may already be the next group, on the
    same ports.
    """
    deadline = time.monotonic() + patience
    while True:
        found = _look_at(store, rank, world_size, look, restarted=restarted)
        if found is not None:
            return found
        if time.monotonic() >= deadline or moved_on():
            return False
        time.sleep(_PAUSE)


def _look_at(store: Store, rank: int, world_size: int, look: Look, *, restarted: bool) -> bool | None:
    """One look of `goes_on`. None if no member answers but some host may only be cut off."""
    came = store.check([f"member/{rank}"])
    mine = store.get(f"member/{rank}") if came else b""
    if mine == ENDED.encode():
        return False
    before = decoded(mine) if restarted else None
    if before is not None and before.addresses.process != own_name():
        return False
    found = silent = False
    for id in range(world_size):
        record = store.get(key) if store.check([key := f"member/{id}"]) else b""
        member = decoded(record)
        if member is not None:
            there = look(member.addresses)
            if there:
                return True  # nearly always at the first member
            silent = silent or (there is None and id != rank)
        if record == ENDED.encode():
            return False
        found = found or member is not None
    if silent:
        return None
    return not came and not found
