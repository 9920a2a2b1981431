"""Permissions: what the peers of a worker in a federation may do, and what is said when they may not.

Whoever is refused gets one text, for what does not exist as for what is not for it. The log of this worker has the rest
(logger ``backhaul.security``): who, what, and why. What a peer has sent stands there in bounds and without control
characters, and a peer that is refused all the time does not fill the log.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable

from backhaul.errors import QuotaError, RefusedError
from backhaul.trust.exposure import PeerNames, Table, registry
from backhaul.trust.penalties import Penalties

_log = logging.getLogger("backhaul.security")

_MAX_TEXT = 300
_LINES = 10
_SECONDS = 1.0
_REFUSALS = 100
_REFUSAL_SECONDS = 0.02
_SIMPLE_SECONDS = 0.0002
_BYTES_A_SECOND = 1e9
_SMALL_THINGS = 50


def printable(text: str, limit: int = _MAX_TEXT, *, lines: bool = False) -> str:
    """Text of a peer's that can be shown: so many characters at most, and none that a terminal acts on."""
    cut = text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
    if cut.isprintable():
        return cut
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in cut
    )


def refusal(me: str) -> RefusedError:
    """What a peer is told, whatever was refused."""
    return RefusedError(
        f"worker {me!r} refused this: it names something that is not exposed to this peer, or is not given to it, or "
        f"does not exist. The log of {me!r} says more"
    )


class Stamps:
    """Numbers that stand for values, and tell nobody else than this worker which."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, value: object) -> int:
        """The number of a value; the same for values that look the same."""
        digest = hashlib.blake2b(repr(value).encode(), key=self._key, digest_size=7).digest()
        return int.from_bytes(digest, "big")


class _Lines:
    """How many lines one peer has had in the log lately."""

    __slots__ = ("count", "since")

    def __init__(self) -> None:
        self.since = 0.0
        self.count = 0


class Permissions:
    """Thread-safe."""

    def __init__(self, me: str, message_bytes: int) -> None:
        """``message_bytes`` is the most that a message may have."""
        self._me = me
        self._message_bytes = message_bytes
        self.exposed = Table(below=registry)
        """What this worker exposes to its peers, besides what the process does."""
        self._names: dict[str, PeerNames] = {}
        self._lock = threading.Lock()
        self._lines: dict[str, _Lines] = {}
        self.refusals = Penalties(_REFUSALS, _REFUSAL_SECONDS)
        """A peer that is refused all the time has to wait."""

    def names(self, peer: str) -> PeerNames:
        """What that peer may name."""
        found = self._names.get(peer)
        if found is None:
            found = self._names[peer] = PeerNames(peer, self._message_bytes, self.exposed)
        return found

    def refuse(self, peer: str, what: str, why: object, seconds: float = 0.0, size: int = 0) -> RefusedError:
        """Log that something was refused; the exception for the peer. See `note`."""
        self.note(peer, what, why, seconds, size)
        return refusal(self._me)

    def over_quota(self, peer: str, what: str, why: str) -> QuotaError:
        """The same for what goes beyond a quota, whose text the peer may see."""
        self.note(peer, what, why)
        return QuotaError(f"worker {self._me!r} refused this: {why}")

    def note(self, peer: str, what: str, why: object, seconds: float = 0.0, size: int = 0) -> None:
        """Log that something was refused: a message of ``size`` bytes, on which ``seconds`` of a processor were spent.

        What takes long to read and to refuse counts as often as simple things that would have taken as long.
        """
        spent = seconds + size / _BYTES_A_SECOND
        self.refusals.wrong(peer, time.monotonic(), 1 + int(spent / _SIMPLE_SECONDS))
        if self._may_log(peer):
            _log.warning("refused worker %s %s: %s", printable(peer), printable(what), printable(str(why)))

    def count(self, peer: str, things: int) -> None:
        """So many small things of a request were refused, or were of no use: fifty are as bad as one that is."""
        self.refusals.wrong(peer, time.monotonic(), things // _SMALL_THINGS)

    def note_failure(self, peer: str, describe: Callable[[], str]) -> None:
        """Log that a call of that peer's has failed; the peer itself is not told where."""
        if self._may_log(peer):
            _log.warning("a call of worker %s failed:\n%s", printable(peer), describe())

    def _may_log(self, peer: str) -> bool:
        with self._lock:
            lines = self._lines.setdefault(peer, _Lines())
            now = time.monotonic()
            suppressed = 0
            if now - lines.since > _SECONDS:
                suppressed = max(0, lines.count - _LINES)
                lines.since, lines.count = now, 0
            lines.count += 1
            fits = lines.count <= _LINES
        if suppressed:
            _log.warning("%s more lines about worker %s are left out", suppressed, printable(peer))
        return fits
