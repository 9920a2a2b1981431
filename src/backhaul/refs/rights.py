"""Rights: which values and references a peer may name, in a federation, and how many it may have. Pure.

It only looks: the driver asks under the lock that guards the state machine, and acts on the answer.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from backhaul.refs.counting import Counting
from backhaul.wire.messages import Create, Fetch, Refs

_MAX_FRAGMENTS = 10_000
_MAX_NOTICES = 100_000
_MAX_NUMBER = 1 << 63


class Rights:
    """``limit`` is how many references a peer may have, or None. Without ``strict``, peers may name what they know."""

    def __init__(self, counting: Counting, limit: int | None, *, strict: bool, ranks: Container[int] = ()) -> None:
        """``ranks`` are those of the members of the group, if it is known."""
        self.strict = strict
        self._ranks = ranks
        self.limit = limit
        self._counting = counting

    def complaint(self, request: Any, peer: int) -> str | None:
        """What is wrong with a request, if something is: with the value that it asks for, or what it brings."""
        return self._about_value(request, peer) or self.objection(getattr(request, "refs", ()), peer)

    def objection(self, refs: Refs, peer: int) -> str | None:
        """What is wrong with the references that a message of that worker brings, if something is."""
        if not self.strict:
            return None
        me = self._counting.me
        if self.limit is not None and self._counting.used_of(peer) + len(refs) > self.limit:
            return f"references to more than {self.limit} values of its own"
        if self.limit is not None and self._counting.unconfirmed_of(peer) + len(refs) > self.limit:
            return f"more than {self.limit} shares of values that it has not confirmed"
        for ref, share in refs:
            if share.sharer != peer:
                return f"a share of rank {share.sharer}"
            # Ranks and numbers as any worker makes them: others can be chosen so that their hashes collide.
            if (
                ref.creator not in self._ranks
                or not 0 <= ref.number < _MAX_NUMBER
                or not 0 <= share.number < _MAX_NUMBER
            ):
                return f"{ref}, which no worker has made"
            if ref.owner not in (me, peer):
                return f"{ref}, whose owner has to give it"
            if ref.owner == me and not self._counting.may_use(peer, ref):
                return f"{ref}, which was not given to it"
        return None

    def is_full(self, peer: int, more: int) -> bool:
        """Whether so many more references to values of ours are too many for that worker."""
        return self.limit is not None and self._counting.held_by(peer) + more > self.limit

    def is_modest(self, peer: int, unsent: int) -> bool:
        """Whether a peer does not make this worker remember ever more. ``unsent`` are notices that wait for it."""
        if not self.strict:
            return True
        return self._counting.fragments(peer) <= _MAX_FRAGMENTS and unsent <= _MAX_NOTICES

    def _about_value(self, request: Any, peer: int) -> str | None:
        if not self.strict:
            return None
        if type(request) is Fetch and not self._counting.may_use(peer, request.ref):
            return f"it was not given {request.ref}"
        if type(request) is Create:
            ref, me = request.ref, self._counting.me
            known = peer != me and not self._counting.is_new(ref)  # one's own has been noted already
            if ref.owner != me or ref.creator != peer or known:
                return f"{ref} is not its to make"
            if self._counting.fragments(peer) > _MAX_FRAGMENTS:
                return f"{ref} leaves yet another gap in its numbers"
        return None
