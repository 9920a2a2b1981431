"""Rights: which values and references a peer may name, and how many it may have. Pure.

In a cluster, `Rights` apply: peers may name everything that they know of, and only the quota limits them. In a
federation, `GivenRights` apply: a peer may name only what was given to it, and send only notices that concern it.

Both classes only read the state machine. The driver asks them under the lock that guards it, and acts on the answer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from backhaul.ids import RefId
from backhaul.wire.messages import Create, Fetch, Notice, Recall, Refs, Register, Registered, Release, Unpin

if TYPE_CHECKING:
    from backhaul.refs.counting import Counting

_MAX_FRAGMENTS = 10_000
_MAX_NOTICES = 100_000
_MAX_NUMBER = 1 << 63


class Rights:
    """The rights of peers that are believed. ``limit``: the most references of a peer, or None for no limit."""

    def __init__(self, counting: Counting, limit: int | None) -> None:
        self.limit = limit
        self._counting = counting

    def complaint(self, request: Any, peer: int) -> str | None:
        """What is wrong with the value that a request asks for, or with the references that it brings, or None."""
        return None

    def objection(self, refs: Refs, peer: int) -> str | None:
        """What is wrong with the references that a message of that worker brings, or None."""
        return None

    def excess(self, peer: int, refs: Sequence[RefId]) -> str | None:
        """Why a peer may not get these references, or make these values, in addition to those it has. None if it may.

        References to the peer's own values go back to it. They have a limit of their own: until they have arrived, this
        worker keeps something for each, and a peer that lies need not say that they have.
        """
        if self.limit is None:
            return None
        returning = sum(ref.owner == peer for ref in refs)
        if self._counting.held_by(peer) + len(refs) - returning > self.limit:
            return f"has references to {self.limit} values"
        if returning and self._counting.returning_to(peer) + returning > self.limit:
            return f"has not confirmed {self.limit} references to its own values"
        return None

    def is_modest(self, peer: int, unsent: int) -> bool:
        """Whether a peer makes this worker remember only a bounded amount. ``unsent`` notices to the peer wait."""
        return True

    def may_say(self, peer: int, notice: Notice) -> bool:
        """Whether this peer may send this notice."""
        return True

    def misdirected(self, refs: Iterable[RefId], to: int) -> RefId | None:
        """The first of these references that this worker may not send to worker ``to``; None if it may send all."""
        return None


class GivenRights(Rights):
    """The rights of peers that may lie."""

    def __init__(self, counting: Counting, limit: int | None, ranks: Container[int]) -> None:
        """``ranks`` are the ranks of all members of the group."""
        super().__init__(counting, limit)
        self._ranks = ranks

    def complaint(self, request: Any, peer: int) -> str | None:
        return self._about_value(request, peer) or self.objection(getattr(request, "refs", ()), peer)

    def objection(self, refs: Refs, peer: int) -> str | None:
        me = self._counting.me
        if self.limit is not None:
            theirs = sum(ref.owner != me for ref, _ in refs)
            if theirs and self._counting.used_of(peer) + theirs > self.limit:
                return f"references to more than {self.limit} values of its own"
            if theirs and self._counting.unconfirmed_of(peer) + theirs > self.limit:
                return f"more than {self.limit} shares of values that it has not confirmed"
        for ref, share in refs:
            if share.sharer != peer:
                return f"a share of rank {share.sharer}"
            # Accept only ranks and numbers that a worker can make: a peer could choose others whose hashes collide.
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

    def is_modest(self, peer: int, unsent: int) -> bool:
        return self._counting.fragments(peer) <= _MAX_FRAGMENTS and unsent <= _MAX_NOTICES

    def may_say(self, peer: int, notice: Notice) -> bool:
        counting = self._counting
        if isinstance(notice, Register):
            return counting.may_use(peer, notice.ref)
        if isinstance(notice, Release):
            return notice.ref.owner == counting.me
        if isinstance(notice, Registered):
            return notice.ref.owner == peer
        if isinstance(notice, Unpin):
            return counting.shared_with(notice.share) in (None, peer)
        if isinstance(notice, Recall):
            return all(share.sharer == peer for share in notice.shares)
        return False  # a Sweep or an Obituary, which no peer has a reason to send: see `counting`

    def misdirected(self, refs: Iterable[RefId], to: int) -> RefId | None:
        return next((ref for ref in refs if ref.owner not in (self._counting.me, to)), None)

    def _about_value(self, request: Any, peer: int) -> str | None:
        if type(request) is Fetch and not self._counting.may_use(peer, request.ref):
            return f"it was not given {request.ref}"
        if type(request) is Create:
            ref, me = request.ref, self._counting.me
            known = peer != me and not self._counting.is_new(ref)  # a creation of this worker has its entry already
            if ref.owner != me or ref.creator != peer or known:
                return f"{ref} is not its to make"
            if self._counting.fragments(peer) > _MAX_FRAGMENTS:
                return f"{ref} leaves yet another gap in its numbers"
        return None
