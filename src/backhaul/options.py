"""Options of a worker, checked when they are set."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Callable
from typing import Any, Literal

from backhaul.errors import OptionError

DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_MAX_MESSAGE_BYTES = 64 << 30
SECRET_BYTES = 32
SECRET_VARIABLE = "BACKHAUL_SECRET"
"""Where a launcher leaves the group's secret, in hexadecimal, for the workers it starts."""

MAX_BUSY_POLL = 0.1
"""Longer than that, nobody should keep a processor for what may not come."""

Transport = Literal["auto", "unix", "tcp"]


class BackendType(enum.Enum):
    """The backends `init_rpc` knows. There is one; torch's name for its own is accepted too."""

    BACKHAUL = "backhaul"
    TENSORPIPE = "tensorpipe"


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError("must be a number of seconds")
    if math.isnan(value) or value < 0:
        raise OptionError("must not be negative; 0 means no limit")
    return float(value)


def _seconds_or_none(value: Any) -> float | None:
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds == 0:
        raise OptionError("must be positive; None means never")
    return seconds


def _positive(value: Any) -> float:
    seconds = _seconds(value)
    if seconds == 0 or math.isinf(seconds):
        raise OptionError("must be a positive number of seconds")
    return seconds


def _moment(value: Any) -> float:
    seconds = _seconds(value)
    if seconds > MAX_BUSY_POLL:
        raise OptionError(f"must be at most {MAX_BUSY_POLL} s; 0 means never")
    return seconds


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError("must be True or False")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError("must be a whole number of at least 1")
    return value


def _bytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError("must be a whole number of bytes; 0 means none")
    return value


def _init_method(value: Any) -> str:
    schemes = ("env://", "tcp://", "file://")
    if not isinstance(value, str) or not value.startswith(schemes):
        raise OptionError(f"must be a string that starts with one of {', '.join(schemes)}")
    return value


def _transport(value: Any) -> Transport:
    if value not in ("auto", "unix", "tcp"):
        raise OptionError("must be 'auto', 'unix' or 'tcp'")
    return value  # type: ignore[no-any-return]


def _secret(value: Any) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, bytes) or len(value) < SECRET_BYTES:
        raise OptionError(f"must be at least {SECRET_BYTES} random bytes, e.g. secrets.token_bytes(32)")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "rpc_timeout": _seconds,
    "init_method": _init_method,
    "num_worker_threads": _count,
    "transport": _transport,
    "secret": _secret,
    "connect_timeout": _positive,
    "unresponsive_after": _seconds_or_none,
    "max_message_bytes": _count,
    "busy_poll": _moment,
    "segment_pool_bytes": _bytes,
    "forbid_leaks": _flag,
}


@dataclasses.dataclass
class RpcOptions:
    """Options of `init_rpc`. Each is checked when it is set; a bad one raises `OptionError`.

    - ``rpc_timeout``: seconds a call may take unless it says otherwise; 0 means no limit.
    - ``init_method``: where workers find each other: ``env://``, ``tcp://host:port`` or ``file:///path``.
    - ``num_worker_threads``: requests that may run at once before new ones wait a little for a
      thread. It is no hard limit: requests that block each other get more threads.
    - ``transport``: ``"unix"``, ``"tcp"`` (loopback only, needs a secret), or ``"auto"``, which
      takes unix sockets and offers TCP too when there is a secret.
    - ``secret``: what peers on TCP have to prove that they know. The launcher makes one.
    - ``connect_timeout``: seconds to reach a peer and to greet it.
    - ``unresponsive_after``: seconds after which a peer that owes an answer and sends nothing at
      all counts as lost; None means never.
    - ``max_message_bytes``: larger messages are refused on receipt.
    - ``busy_poll``: seconds that a thread in the middle of an exchange of short messages looks for the next one
      before it goes to sleep; 0 means never.
    - ``segment_pool_bytes``: how much shared memory this worker may keep for sending large tensors to workers of the
      same host; 0 means that they go through the socket.
    - ``forbid_leaks``: a graceful shutdown raises `LeakError` if references to values of this worker are left.
    """

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    init_method: str = "env://"
    num_worker_threads: int = 16
    transport: Transport = "auto"
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    connect_timeout: float = 10.0
    unresponsive_after: float | None = 30.0
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    busy_poll: float = 0.0004
    segment_pool_bytes: int = 512 << 20
    forbid_leaks: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        check = _CHECKS.get(name)
        if check is None:
            raise OptionError(f"there is no option {name!r}; the options are {', '.join(_CHECKS)}")
        try:
            value = check(value)
        except OptionError as error:
            shown = "the given value" if name == "secret" else repr(value)
            raise OptionError(f"option {name}: {shown} {error}") from None
        object.__setattr__(self, name, value)

    def secret_or_inherited(self) -> bytes | None:
        """The secret, or the one that the launcher left in the environment, or None."""
        if self.secret is not None:
            return self.secret
        text = os.environ.get(SECRET_VARIABLE)
        if not text:
            return None
        try:
            return _secret(bytes.fromhex(text))
        except ValueError:
            raise OptionError(
                f"the environment variable {SECRET_VARIABLE} must hold at least {SECRET_BYTES} bytes in "
                "hexadecimal; let the launcher set it, or unset it"
            ) from None
