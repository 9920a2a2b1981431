"""Options of a worker, checked when they are set."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from backhaul.devices.names import DeviceMaps, index_of, name_of, parse_map
from backhaul.edges.edge import Edge, check_edges
from backhaul.errors import OptionError
from backhaul.security.keys import KEY_BYTES, KEY_FILE_VARIABLE, read_key_file
from backhaul.security.tls import TLS
from backhaul.trust.policy import POLICIES, Trust

DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_MAX_MESSAGE_BYTES = 64 << 30
SECRET_BYTES = KEY_BYTES
SECRET_VARIABLE = "BACKHAUL_SECRET"
"""Where a launcher leaves the group's secret, in hexadecimal, for the workers it starts."""

HOST_VARIABLE = "BACKHAUL_HOST"
"""What workers listen on that are not given it as an option."""

METRICS_PORT_VARIABLE = "BACKHAUL_METRICS_PORT"
"""What ``metrics_port`` is for workers that are not given it as an option."""

LOG_LEVEL_VARIABLE = "BACKHAUL_LOG_LEVEL"
"""How much a worker logs, one of `LOG_LEVELS`; ``backhaul run --log-level`` sets it."""
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

MAX_BUSY_POLL = 0.1
"""Longer than that, nobody should keep a processor for what may not come."""

Transport = Literal["auto", "unix", "tcp"]
TrustName = Literal["cluster", "federation"]
Fabric = Literal["tls", "plain"]


class BackendType(enum.Enum):
    """The backends `init_rpc` knows. There is one; torch's name for its own is accepted too."""

    BACKHAUL = "backhaul"
    TENSORPIPE = "tensorpipe"


@dataclasses.dataclass(frozen=True)
class Quotas:
    """How much one peer may have of a worker at a time. What goes beyond it is refused.

    - ``message_bytes``: the size of a message, and of the tensors in it. A larger one ends the connection.
    - ``value_bytes``: what a message has besides the elements of its tensors. A larger one ends the connection.
    - ``calls``: calls of that peer that this worker is at.
    - ``request_bytes``: what came with these calls, tensors included.
    - ``contexts``: distributed autograd contexts that this worker knows from that peer.
    - ``references``: values here that this peer has references to, and values there that it has given references to;
      and recorded tensors of a context that wait for their gradients from it.
    """

    message_bytes: int = 256 << 20
    value_bytes: int = 1 << 20
    calls: int = 64
    request_bytes: int = 512 << 20
    contexts: int = 64
    references: int = 10_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"quota {field.name}: {value!r} must be a whole number of at least 1")


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


def _keepalive(value: Any) -> float:
    seconds = _positive(value)
    if not 3 <= seconds <= 120:
        raise OptionError("must be between 3 and 120 s: the network may lose some packets and send them again")
    return seconds


def _moment(value: Any) -> float | None:
    if value is None:
        return None
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


def _connections(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 16):
        raise OptionError("must be between 1 and 16, or None, which means that it depends on the processors")
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


def _trust(value: Any) -> TrustName:
    if value not in [*POLICIES]:  # it may be of a type that has no hash
        raise OptionError("must be 'cluster' or 'federation'")
    return value  # type: ignore[no-any-return]


def _fabric(value: Any) -> Fabric:
    if value not in ("tls", "plain"):
        raise OptionError("must be 'tls', or 'plain' for a network whose every machine and cable you trust")
    return value  # type: ignore[no-any-return]


def _quotas(value: Any) -> Quotas | None:
    if value is not None and not isinstance(value, Quotas):
        raise OptionError("must be Quotas(...), or None")
    return value


def _secret(value: Any) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, bytes) or len(value) < SECRET_BYTES:
        raise OptionError(f"must be at least {SECRET_BYTES} random bytes, e.g. secrets.token_bytes(32)")
    return value


def _key_file(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise OptionError("must be the path of a file that `backhaul keygen` made")
    path = os.path.abspath(os.fspath(value))
    try:
        read_key_file(path)
    except OptionError as error:
        raise OptionError(f"cannot be used: {error}") from None
    return path


def _tls(value: Any) -> TLS | None:
    if value is not None and not isinstance(value, TLS):
        raise OptionError("must be TLS(ca=..., cert=..., key=...), with the paths of PEM files")
    return value


def _host(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value or value != value.strip()):
        raise OptionError("must be a name or an address of this machine; None means loopback")
    return value


def _port(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 16:
        raise OptionError("must be a port below 65536; 0 means any that is free")
    return value


def _device_maps(value: Any) -> DeviceMaps:
    if value is None or value == "same":
        return value  # type: ignore[no-any-return]
    if not isinstance(value, Mapping) or not all(isinstance(each, Mapping) for each in value.values()):
        raise OptionError("must be a dict of dicts, as in {'worker1': {0: 1}}, or 'same'")
    return {str(to): parse_map(map) for to, map in value.items()}


def _devices(value: Any) -> Sequence[int]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise OptionError("must be a list of GPUs, as in ['cuda:0']")
    found = [index_of(name_of(each)) for each in value]
    if None in found:
        raise OptionError(f"`set_devices` expect a list of CUDA devices, but got {value!r}")
    return tuple(index for index in found if index is not None)


def _port_or_none(value: Any) -> int | None:
    return None if value is None else _port(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "rpc_timeout": _seconds,
    "init_method": _init_method,
    "num_worker_threads": _count,
    "transport": _transport,
    "secret": _secret,
    "connect_timeout": _positive,
    "unresponsive_after": _seconds_or_none,
    "lost_after": _seconds_or_none,
    "probe_timeout": _positive,
    "keepalive": _keepalive,
    "max_message_bytes": _count,
    "max_unsent_bytes": _count,
    "busy_poll": _moment,
    "segment_pool_bytes": _bytes,
    "forbid_leaks": _flag,
    "key_file": _key_file,
    "tls": _tls,
    "host": _host,
    "port": _port,
    "trust": _trust,
    "quotas": _quotas,
    "device_maps": _device_maps,
    "device_pool_bytes": _bytes,
    "devices": _devices,
    "metrics_port": _port_or_none,
    "checksum": _flag,
    "tracing": _flag,
    "edges": check_edges,
    "fabric": _fabric,
    "connections": _connections,
}


@dataclasses.dataclass
class RpcOptions:
    """Options of `init_rpc`. Each is checked when it is set; a bad one raises `OptionError`.

    - ``rpc_timeout``: seconds a call may take unless it says otherwise; 0 means no limit.
    - ``init_method``: where workers find each other: ``env://``, ``tcp://host:port`` (or several of
      them, ``tcp://a:1,b:2``) or ``file:///path``.
    - ``num_worker_threads``: requests that may run at once before new ones wait a little for a
      thread. It is no hard limit: requests that block each other get more threads.
    - ``transport``: ``"unix"``, ``"tcp"`` (which is TLS, and needs a secret or certificates), or ``"auto"``, which
      takes unix sockets between workers of one host, and offers TCP too when there is a secret or are certificates.
    - ``secret``: what all workers of the group know, and nobody else; their certificates for TLS follow from it. The
      launcher makes one.
    - ``connect_timeout``: seconds to reach a peer and to greet it.
    - ``unresponsive_after``: seconds after which a peer that owes an answer and sends nothing at
      all counts as lost; None means never.
    - ``lost_after``: seconds after which a peer that cannot be reached, and is not known to be dead, is given up: what
      it holds is freed, and what it owns counts as gone. Until then calls to it fail, and references stay. None
      means never.
    - ``probe_timeout``: seconds that a peer whose connection has broken has to answer before it is suspected.
    - ``keepalive``: seconds, 3 to 120, after which a TCP connection breaks if the network brings nothing from the
      peer's machine, or the peer takes nothing of what was sent.
    - ``max_message_bytes``: larger messages are refused on receipt.
    - ``max_unsent_bytes``: how much may wait to be sent to one peer, besides the message under way. Beyond that,
      threads that send to the peer wait, and its next requests wait to begin; in a federation replies are refused.
    - ``busy_poll``: seconds that a thread in the middle of an exchange of short messages stays awake for the next one
      at the most; how long it really does follows from the last waits. 0 means never, None that it depends
      on the number of processors: 1 ms for each but one, up to 3 ms.
    - ``segment_pool_bytes``: how much shared memory this worker may keep for sending large tensors to workers of the
      same host; 0 means that they go through the socket.
    - ``checksum``: what goes through unix sockets has checksums, and a connection with a wrong bit ends. One of two
      workers that wants it is enough. TLS checks what goes over TCP in any case.
    - ``forbid_leaks``: a graceful shutdown raises `LeakError` if references to values of this worker are left.
    - ``key_file``: a file that has the secret, made by ``backhaul keygen`` and copied to every host.
    - ``tls``: certificates of your own, as `TLS`, instead of a secret.
    - ``host``: what to listen on for TCP, a name or an address of this machine that the others can reach;
      ``"0.0.0.0"`` or ``"::"`` for all. None means what ``BACKHAUL_HOST`` says, or else loopback.
    - ``port``: the port to listen on; 0 means any that is free.
    - ``trust``: ``"cluster"``, in which peers may call any function; or ``"federation"``, in which they may call only
      what is marked with `backhaul.rpc.expose`, and no value is pickled.
    - ``quotas``: how much one peer may have of this worker at a time. None means no limits, and in a federation those
      of ``Quotas()``.
    - ``device_maps``: for each worker that is called, by name, which of its devices a tensor on a device of this one
      goes to, as in ``{"worker1": {0: 1}}``; ``"same"`` maps equal indices to every worker. A tensor on a
      GPU that is not in the map cannot be sent; CPU tensors always can. The reply goes the same way back, and
      gradients to where their tensor came from.
    - ``device_pool_bytes``: how much memory of its GPUs this worker may keep, for each connection with a worker of
      the same host, for sending tensors there; 0 means that they go through the memory of the host.
    - ``devices``: the GPUs of this worker that take part, besides those in the maps; upstream's option of that name.
    - ``metrics_port``: serve metrics for Prometheus on loopback, on this port plus the worker's rank on its host; 0
      means any port, which is logged. None means what ``BACKHAUL_METRICS_PORT`` says, or else not at all.
    - ``tracing``: make OpenTelemetry spans for calls and passes; see `backhaul.seeing.spans`.
    - ``edges``: what happens to tensors and gradients before they leave for a peer, by the name of the peer, in which
      ``*`` stands for anything: see `backhaul.federation.Edge`.
    - ``fabric``: ``"tls"``, which encrypts all TCP; or ``"plain"``, which encrypts the greeting and nothing after it,
      for a network that you trust, at the speed of TCP. All workers have the same; a federation cannot have it.
    - ``connections``: how many connections, 1 to 16, one large tensor may use between two hosts, each with a thread;
      the smaller number of both workers counts. None means 1 with TLS, and one for every four processors, up to 4,
      with ``fabric="plain"``. A federation has 1.
    """

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    init_method: str = "env://"
    num_worker_threads: int = 16
    transport: Transport = "auto"
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    connect_timeout: float = 10.0
    unresponsive_after: float | None = 30.0
    lost_after: float | None = 600.0
    probe_timeout: float = 2.0
    keepalive: float = 10.0
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_unsent_bytes: int = 64 << 20
    busy_poll: float | None = None
    segment_pool_bytes: int = 512 << 20
    checksum: bool = False
    forbid_leaks: bool = False
    key_file: str | None = None
    tls: TLS | None = None
    host: str | None = None
    port: int = 0
    trust: TrustName = "cluster"
    quotas: Quotas | None = None
    device_maps: DeviceMaps = None
    device_pool_bytes: int = 1 << 30
    devices: Sequence[int] = ()
    metrics_port: int | None = None
    tracing: bool = False
    edges: Mapping[str, Edge] | None = None
    fabric: Fabric = "tls"
    connections: int | None = None

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Add entries to the device map for calls to worker ``to``; see ``device_maps``."""
        known = self.device_maps
        if known == "same":
            raise OptionError("option device_maps is 'same': set it to None before you give maps of your own")
        found = {**({} if known is None else known)}
        before = found.get(to, {})
        new = parse_map(device_map)
        for source, target in new.items():
            if before.get(source, target) != target or target in (
                other for other_source, other in before.items() if other_source != source
            ):
                raise OptionError(f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target}")
        found[to] = {**before, **new}
        self.device_maps = found

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

    @property
    def policy(self) -> Trust:
        """The policy that ``trust`` names."""
        return POLICIES[self.trust]

    @property
    def limits(self) -> Quotas | None:
        """The quotas that apply, if any."""
        return Quotas() if self.quotas is None and not self.policy.believes else self.quotas

    @property
    def message_limit(self) -> int:
        """Larger messages are neither sent nor taken."""
        limits = self.limits
        return self.max_message_bytes if limits is None else min(self.max_message_bytes, limits.message_bytes)

    @property
    def most_connections(self) -> int:
        """How many connections a channel between two hosts may have."""
        if not self.policy.believes:  # what comes on one connection is bounded
            return 1
        if self.connections is not None:
            return self.connections
        # OpenSSL gives Python one record of 16 KiB at a time, so threads that decrypt wait for the interpreter.
        return 1 if self.fabric == "tls" else max(1, min(4, len(os.sched_getaffinity(0)) // 4))

    @property
    def head_limit(self) -> int:
        """The same for what a message has besides the elements of its tensors: a byte of that may take 64 of memory."""
        limits = self.limits
        return self.message_limit if limits is None else min(self.message_limit, limits.value_bytes)

    def secret_or_inherited(self) -> bytes | None:
        """The secret, or the one in the key file, or the one that the environment tells, or None."""
        if self.secret is not None:
            return self.secret
        path = self.key_file or os.environ.get(KEY_FILE_VARIABLE)
        if path:
            return read_key_file(path)
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

    def host_or_inherited(self) -> str | None:
        """What to listen on, from here or from the environment, or None."""
        return self.host or os.environ.get(HOST_VARIABLE) or None

    def metrics_port_or_inherited(self) -> int | None:
        """The first of the ports for metrics, from here or from the environment, or None."""
        text = os.environ.get(METRICS_PORT_VARIABLE)
        if self.metrics_port is not None or not text:
            return self.metrics_port
        try:
            return _port(int(text))
        except (ValueError, OptionError):
            raise OptionError(f"environment variable {METRICS_PORT_VARIABLE}: {text!r} must be a port") from None
