"""Permissions: what the peers of a worker in a federation may do, and what they are told when it is refused.

A refused peer always gets the same text, whether the thing does not exist or is not for that peer. The log of this
worker (logger ``backhaul.security``) says who was refused, what, and why. Text of a peer appears there shortened and
without control characters, and a peer that is refused all the time cannot fill the log.
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
    """Text of a peer, safe to show: at most ``limit`` characters, and none that a terminal acts on.

    With ``lines``, line breaks and tabs are kept.
    """
    cut = text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
    if cut.isprintable():
        return cut
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in cut
    )


def refusal(me: str) -> RefusedError:
    """The error that a peer gets, whatever was refused."""
    return RefusedError(
        f"worker {me!r} refused this: it names something that is not exposed to this peer, or is not given to it, or "
        f"does not exist. The log of {me!r} says more"
    )


class Stamps:
    """Numbers that represent values. Only this worker can tell which number belongs to which value."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, value: object) -> int:
        """The number of a value. Values with the same ``repr`` have the same number."""
        digest = hashlib.blake2b(repr(value).encode(), key=self._key, digest_size=7).digest()
        return int.from_bytes(digest, "big")


class _Lines:
    """The number of recent log lines about one peer."""

    __slots__ = ("count", "since")

    def __init__(self) -> None:
        self.since = 0.0
        self.count = 0


class Permissions:
    """The permissions of all peers of one worker, and the log of refusals. Thread-safe."""

    def __init__(self, me: str, message_bytes: int) -> None:
        """A message may have at most ``message_bytes`` bytes."""
        self._me = me
        self._message_bytes = message_bytes
        self.exposed = Table(below=registry)
        """What this worker exposes to its peers, in addition to what the process exposes."""
        self._names: dict[str, PeerNames] = {}
        self._lock = threading.Lock()
        self._lines: dict[str, _Lines] = {}
        self.refusals = Penalties(_REFUSALS, _REFUSAL_SECONDS)
        """Makes a peer wait that is refused all the time."""

    def names(self, peer: str) -> PeerNames:
        """The names that a peer may use."""
        found = self._names.get(peer)
        if found is None:
            found = self._names[peer] = PeerNames(peer, self._message_bytes, self.exposed)
        return found

    def refuse(self, peer: str, what: str, why: object, seconds: float = 0.0, size: int = 0) -> RefusedError:
        """Log that something was refused, and return the exception for the peer. See `note`."""
        self.note(peer, what, why, seconds, size)
        return refusal(self._me)

    def over_quota(self, peer: str, what: str, why: str) -> QuotaError:
        """Like `refuse`, for a request that exceeds a quota. The peer may see ``why``."""
        self.note(peer, what, why)
        return QuotaError(f"worker {self._me!r} refused this: {why}")

    def note(self, peer: str, what: str, why: object, seconds: float = 0.0, size: int = 0) -> None:
        """Log that something was refused: a message of ``size`` bytes that took ``seconds`` of processor time.

        A message that takes long to read and refuse counts as many refusals as simple messages that take as long in
        all.
        """
        spent = seconds + size / _BYTES_A_SECOND
        self.refusals.wrong(peer, time.monotonic(), 1 + int(spent / _SIMPLE_SECONDS))
        if self._may_log(peer):
            _log.warning("refused worker %s %s: %s", printable(peer), printable(what), printable(str(why)))

    def count(self, peer: str, things: int) -> None:
        """Note that this many small parts of a request were refused or useless. Fifty count as one refused request."""
        self.refusals.wrong(peer, time.monotonic(), things // _SMALL_THINGS)

    def note_failure(self, peer: str, describe: Callable[[], str]) -> None:
        """Log that a call of that peer has failed. The peer itself is not told where."""
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
