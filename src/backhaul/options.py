"""The options of a worker. Each option is checked when it is set."""

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
"""The variable through which a launcher hands the group's secret, in hexadecimal, to the workers it starts."""

HOST_VARIABLE = "BACKHAUL_HOST"
"""The address that a worker listens on if its option ``host`` is not set."""

METRICS_PORT_VARIABLE = "BACKHAUL_METRICS_PORT"
"""The port for metrics if a worker's option ``metrics_port`` is not set."""

LOG_LEVEL_VARIABLE = "BACKHAUL_LOG_LEVEL"
"""The log level of a worker, one of `LOG_LEVELS`; ``backhaul run --log-level`` sets it."""
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

MAX_BUSY_POLL = 0.1
"""The upper bound of ``busy_poll``: a thread must not hold a processor longer for a message that may not come."""

Transport = Literal["auto", "unix", "tcp"]
TrustName = Literal["cluster", "federation"]
Fabric = Literal["tls", "plain"]


class BackendType(enum.Enum):
    """The backends that `init_rpc` accepts. Both names mean Backhaul; ``TENSORPIPE`` is torch's name, for old code."""

    BACKHAUL = "backhaul"
    TENSORPIPE = "tensorpipe"


@dataclasses.dataclass(frozen=True)
class Quotas:
    """Limits on what one peer may use of this worker at a time. A request beyond a limit is refused.

    - ``message_bytes``: the size of a message, tensors included. A larger message ends the connection.
    - ``value_bytes``: the size of a message without the elements of its tensors. A larger message ends the connection.
    - ``calls``: the peer's calls that this worker is serving.
    - ``request_bytes``: the size of the requests of these calls, tensors included.
    - ``contexts``: distributed autograd contexts that this worker knows from the peer.
    - ``references``: references that the peer holds to values here, plus references to its own values that the peer
      has given to this worker. Recorded tensors of a context that wait for gradients from the peer have the same limit.
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
        raise OptionError("must be between 3 and 120 s: the network needs time to send lost packets again")
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
        raise OptionError("must be between 1 and 16, or None, which chooses by the number of processors")
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
        raise OptionError("must be a port below 65536; 0 means any free port")
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
    """Options of `init_rpc`. Each is checked when it is set; a bad value raises `OptionError`.

    - ``rpc_timeout``: seconds that a call may take by default; 0 means no limit.
    - ``init_method``: where workers find each other: ``env://``, ``tcp://host:port`` (or several
      addresses, ``tcp://a:1,b:2``) or ``file:///path``.
    - ``num_worker_threads``: how many requests may run at once before new ones wait a little for a
      thread. It is not a hard limit: requests that block each other get more threads.
    - ``transport``: ``"unix"``, ``"tcp"`` (which is TLS and needs a secret or certificates), or ``"auto"``, which
      uses unix sockets between workers of one host, and also TCP if there is a secret or a certificate.
    - ``secret``: bytes that all workers of the group know, and nobody else. The workers derive their TLS certificates
      from the secret. The launcher makes one.
    - ``connect_timeout``: seconds to reach a peer and finish the greeting.
    - ``unresponsive_after``: seconds after which a peer that owes an answer and sends nothing at
      all counts as lost; None means never.
    - ``lost_after``: seconds after which this worker gives up a peer that is unreachable but not known to be dead. It
      then frees the values that the peer refers to, and treats the peer's own values as gone. Until then, calls to
      the peer fail and references stay valid. None means never.
    - ``probe_timeout``: seconds within which a peer must answer after its connection broke; then it is suspected.
    - ``keepalive``: seconds, 3 to 120, after which a TCP connection breaks if nothing arrives from the peer's machine,
      or the peer acknowledges none of the bytes sent to it.
    - ``max_message_bytes``: the receiver refuses larger messages.
    - ``max_unsent_bytes``: how many bytes may wait to be sent to one peer, besides the message being sent. Beyond
      that, threads that send to the peer wait, and its next requests wait to start. In a federation, replies are
      refused instead.
    - ``busy_poll``: the longest time, in seconds, that a thread polls for the next message in an exchange of short
      messages. The actual time adapts to recent waits. 0 means never. None chooses by the number of processors: 1 ms
      for each processor except one, up to 3 ms.
    - ``segment_pool_bytes``: how much shared memory this worker may keep for sending large tensors to workers of the
      same host; 0 sends them through the socket.
    - ``checksum``: add checksums to data on unix sockets; a mismatch ends the connection. The option takes effect if
      either worker of a pair sets it. TLS always checks data on TCP.
    - ``forbid_leaks``: a graceful shutdown raises `LeakError` if references to values of this worker are left.
    - ``key_file``: a file with the secret, made by ``backhaul keygen`` and copied to every host.
    - ``tls``: your own certificates, as `TLS`, instead of a secret.
    - ``host``: the address to listen on for TCP: a name or an address of this machine that the others can reach, or
      ``"0.0.0.0"`` or ``"::"`` for all addresses. None means ``BACKHAUL_HOST`` if that is set, else loopback.
    - ``port``: the port to listen on; 0 means any free port.
    - ``trust``: ``"cluster"``, in which peers may call any function; or ``"federation"``, in which peers may call only
      functions marked with `backhaul.rpc.expose`, and no value is pickled.
    - ``quotas``: limits on what one peer may use of this worker at a time. None means no limits, except in a
      federation, where it means ``Quotas()``.
    - ``device_maps``: for each worker to call, by name, which of its devices receives the tensors of a device of this
      worker, as in ``{"worker1": {0: 1}}``; ``"same"`` maps equal indices to every worker. A tensor on a
      GPU that is not in the map cannot be sent; CPU tensors always can. Replies use the map in reverse, and
      gradients return to the device that their tensor came from.
    - ``device_pool_bytes``: how much GPU memory this worker may keep, for each connection with a worker of
      the same host, for sending tensors there; 0 sends them through host memory.
    - ``devices``: more GPUs of this worker that take part, besides those in the maps, as in torch's option.
    - ``metrics_port``: serve metrics for Prometheus on loopback, on this port plus the worker's rank on its host; 0
      means any free port, which is logged. None means ``BACKHAUL_METRICS_PORT`` if that is set, else no metrics.
    - ``tracing``: make OpenTelemetry spans for calls and passes; see `backhaul.seeing.spans`.
    - ``edges``: how tensors and gradients change before they leave for a peer. The keys are names of peers, in which
      ``*`` matches anything: see `backhaul.federation.Edge`.
    - ``fabric``: ``"tls"``, which encrypts all TCP; or ``"plain"``, which encrypts only the greeting and runs at the
      speed of TCP, for a network that you trust. All workers need the same value. A federation must use ``"tls"``.
    - ``connections``: how many connections, 1 to 16, one large tensor may use between two hosts, each with a thread;
      a pair of workers uses the smaller of their two numbers. None means 1 with TLS, and one for every four
      processors, up to 4, with ``fabric="plain"``. A federation uses 1.
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
    devices: Sequence[Any] = ()
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
        """The largest message, in bytes, that this worker sends or accepts."""
        limits = self.limits
        return self.max_message_bytes if limits is None else min(self.max_message_bytes, limits.message_bytes)

    @property
    def most_connections(self) -> int:
        """How many connections a channel between two hosts may have."""
        if not self.policy.believes:  # what comes on one connection is bounded
            return 1
        if self.connections is not None:
            return self.connections
        # OpenSSL hands Python one record of 16 KiB at a time, so threads that decrypt compete for the GIL.
        return 1 if self.fabric == "tls" else max(1, min(4, len(os.sched_getaffinity(0)) // 4))

    @property
    def head_limit(self) -> int:
        """The limit for a message without the elements of its tensors. One such byte may take 64 bytes of memory."""
        limits = self.limits
        return self.message_limit if limits is None else min(self.message_limit, limits.value_bytes)

    def secret_or_inherited(self) -> bytes | None:
        """The secret from the option, the key file or the environment, in this order; None if there is none."""
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
        """The address to listen on, from the option or the environment, or None."""
        return self.host or os.environ.get(HOST_VARIABLE) or None

    def metrics_port_or_inherited(self) -> int | None:
        """The first port for metrics, from the option or the environment, or None."""
        text = os.environ.get(METRICS_PORT_VARIABLE)
        if self.metrics_port is not None or not text:
            return self.metrics_port
        try:
            return _port(int(text))
        except (ValueError, OptionError):
            raise OptionError(f"environment variable {METRICS_PORT_VARIABLE}: {text!r} must be a port") from None
