"""Role: a task that one thread at a time does, and how it passes from one thread to the next.

Three tasks in a worker are done by one thread at a time: reading the replies of a peer, leading a connection that a
peer has opened, and working off the queue of completions. Each of them is a role::

        take()                      pass_on()  (from a holder that is busy)
    free ─────► held by token 1 ───────────────► held by token 2 ── release(2) ─► free, or offered to a candidate

- A thread that takes the role gets a **token**. With the token, the thread can check later whether it still holds the
  role.
- A holder calls `begin` and `finish` around work that may take long. In between, the role can be passed on to a
  successor without the holder's consent. The holder notices when `finish` returns False.
- A thread that finds the role taken can line up as a **candidate**. `release` names the next candidate, and the caller
  wakes it. A candidate has no claim: it tries to take the role when it wakes up, as any other thread may.

A role is never lost while a thread wants it. A holder first releases the role, and then wakes the candidate that
`release` returned. A candidate lines up only if the role is taken, in one step. A candidate that leaves without having
taken the role calls `leave`, which names the next candidate in case this candidate was the one that was woken.

Pure: no lock, no thread, no clock. The driver serialises the calls, except for `begin`, which only a holder calls.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

C = TypeVar("C")

NOBODY = 0


class Role(Generic[C]):
    """See the module's docstring. ``C`` is the type that represents a candidate."""

    __slots__ = ("_candidates", "_holder", "_last", "busy", "turn")

    def __init__(self) -> None:
        self._holder = NOBODY
        self._last = NOBODY
        self._candidates: deque[C] = deque()
        self.turn = 0
        """How often holders have called `begin`."""
        self.busy = False
        """The holder is between `begin` and `finish`."""

    @property
    def free(self) -> bool:
        return self._holder == NOBODY

    @property
    def holder(self) -> int:
        """The holder's token, or `NOBODY`."""
        return self._holder

    def take(self) -> int:
        """Take the role. Returns the token of the new holder, or `NOBODY` if the role is taken."""
        if self._holder != NOBODY:
            return NOBODY
        self._last += 1
        self._holder = self._last
        return self._last

    def holds(self, token: int) -> bool:
        return self._holder == token

    def begin(self) -> None:
        """Note that the holder begins work that may take long."""
        self.turn += 1
        self.busy = True

    def finish(self, token: int) -> bool:
        """Note that this work is over. False if the role has been passed on meanwhile."""
        if self._holder != token:
            return False
        self.busy = False
        return True

    def pass_on(self, turn: int | None = None) -> int:
        """Take the role from a busy holder. Returns the successor's token, or `NOBODY` if the holder is not busy.

        With ``turn``, takes the role only if the holder is still at that turn.
        """
        if self._holder == NOBODY or not self.busy or turn not in (None, self.turn):
            return NOBODY
        self.busy = False
        self._last += 1
        self._holder = self._last
        return self._last

    def undo(self, successor: int, before: int) -> None:
        """Undo `pass_on` because the successor could not be started. The old holder is busy again."""
        if self._holder == successor:
            self._holder, self.busy = before, True

    def end(self) -> None:
        """Take the role from its holder for good. No thread can take it any more."""
        self._last += 1
        self._holder = self._last

    def release(self, token: int) -> C | None:
        """Give up the role. Returns the candidate to wake, if there is one."""
        if self._holder != token:
            return None
        self._holder = NOBODY
        self.busy = False
        return self._candidates.popleft() if self._candidates else None

    def line_up(self, candidate: C) -> bool:
        """Line up for the role. False if the role is free: call `take` instead."""
        if self._holder == NOBODY:
            return False
        self._candidates.append(candidate)
        return True

    def leave(self, candidate: C) -> C | None:
        """Withdraw a candidate. Returns another candidate to wake, if the role is free and one waits."""
        try:
            self._candidates.remove(candidate)
        except ValueError:
            pass
        if self._holder == NOBODY and self._candidates:
            return self._candidates.popleft()
        return None

    @property
    def wanted(self) -> bool:
        """Whether a candidate waits."""
        return bool(self._candidates)
