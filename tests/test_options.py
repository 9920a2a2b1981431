"""Options: each is checked when it is set, and the error says what would be right."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import secrets
from typing import Any

import pytest

from backhaul.edges.edge import Edge
from backhaul.errors import OptionError
from backhaul.options import DEFAULT_RPC_TIMEOUT, SECRET_VARIABLE, BackendType, Quotas, RpcOptions

SECRET = bytes(range(32))
OPEN = Edge(on_send=[], on_gradient=[])

GOOD: dict[str, list[Any]] = {
    "rpc_timeout": [0, 0.0, 1, 0.5, 1e9, math.inf],
    "init_method": ["env://", "tcp://127.0.0.1:29500", "file:///tmp/x"],
    "num_worker_threads": [1, 16, 100_000],
    "transport": ["auto", "unix", "tcp"],
    "secret": [None, SECRET, bytes(100)],
    "connect_timeout": [0.001, 1, 3600],
    "unresponsive_after": [None, 0.1, 30, math.inf],
    "lost_after": [None, 0.1, 600, math.inf],
    "probe_timeout": [0.1, 2],
    "keepalive": [3, 10.5, 120],
    "max_message_bytes": [1, 1 << 40],
    "max_unsent_bytes": [1, 1 << 40],
    "busy_poll": [None, 0, 0.0004, 0.1],
    "segment_pool_bytes": [0, 1, 512 << 20],
    "checksum": [True, False],
    "forbid_leaks": [True, False],
    "trust": ["cluster", "federation"],
    "quotas": [None, Quotas(), Quotas(calls=1)],
    "key_file": [None],
    "tls": [None],
    "host": [None, "127.0.0.1", "0.0.0.0", "::", "host.example.org"],
    "port": [0, 29500, 65535],
    "device_maps": [None, "same", {"b": {"cuda:0": "cuda:1"}}],
    "device_pool_bytes": [0, 1 << 30],
    "devices": [(), (0, 1)],
    "metrics_port": [None, 0, 9400, 65535],
    "tracing": [True, False],
    "edges": [None, {}, {"bank": OPEN, "shop-*": OPEN}],
    "fabric": ["tls", "plain"],
    "connections": [None, 1, 16],
}

BAD: list[tuple[str, Any, str]] = [
    ("rpc_timeout", -1, "-1 must not be negative; 0 means no limit"),
    ("rpc_timeout", -0.001, "must not be negative"),
    ("rpc_timeout", math.nan, "must not be negative"),
    ("rpc_timeout", "60", "'60' must be a number of seconds"),
    ("rpc_timeout", None, "None must be a number of seconds"),
    ("rpc_timeout", True, "True must be a number of seconds"),
    ("init_method", "http://x", "'http://x' must be a string that starts with one of env://, tcp://, file://"),
    ("init_method", "", "must be a string that starts with"),
    ("init_method", None, "must be a string that starts with"),
    ("init_method", b"env://", "must be a string that starts with"),
    ("num_worker_threads", 0, "0 must be a whole number of at least 1"),
    ("num_worker_threads", -4, "must be a whole number of at least 1"),
    ("num_worker_threads", 2.0, "must be a whole number of at least 1"),
    ("num_worker_threads", True, "must be a whole number of at least 1"),
    ("num_worker_threads", None, "must be a whole number of at least 1"),
    ("transport", "udp", "'udp' must be 'auto', 'unix' or 'tcp'"),
    ("transport", None, "must be 'auto', 'unix' or 'tcp'"),
    ("transport", ["unix"], "must be 'auto', 'unix' or 'tcp'"),
    ("secret", b"short", "the given value must be at least 32 random bytes"),
    ("secret", "x" * 32, "the given value must be at least 32 random bytes"),
    ("secret", bytearray(32), "the given value must be at least 32 random bytes"),
    ("connect_timeout", 0, "must be a positive number of seconds"),
    ("connect_timeout", -1, "must not be negative"),
    ("connect_timeout", math.inf, "must be a positive number of seconds"),
    ("connect_timeout", None, "must be a number of seconds"),
    ("unresponsive_after", 0, "must be positive; None means never"),
    ("unresponsive_after", -5, "must not be negative"),
    ("unresponsive_after", "never", "must be a number of seconds"),
    ("unresponsive_after", False, "must be a number of seconds"),
    ("lost_after", 0, "must be positive; None means never"),
    ("lost_after", "never", "must be a number of seconds"),
    ("keepalive", 2.9, "must be between 3 and 120 s"),
    ("keepalive", 121, "must be between 3 and 120 s"),
    ("probe_timeout", 0, "must be a positive number of seconds"),
    ("probe_timeout", math.inf, "must be a positive number of seconds"),
    ("max_message_bytes", 0, "must be a whole number of at least 1"),
    ("max_message_bytes", 1e9, "must be a whole number of at least 1"),
    ("max_unsent_bytes", 0, "must be a whole number of at least 1"),
    ("busy_poll", 1, "1 must be at most 0.1 s; 0 means never"),
    ("busy_poll", -0.1, "must not be negative"),
    ("busy_poll", "1 ms", "must be a number of seconds"),
    ("segment_pool_bytes", -1, "must be a whole number of bytes; 0 means none"),
    ("segment_pool_bytes", 1.5, "must be a whole number of bytes"),
    ("segment_pool_bytes", True, "must be a whole number of bytes"),
    ("checksum", "crc32", "must be True or False"),
    ("forbid_leaks", 1, "1 must be True or False"),
    ("forbid_leaks", None, "must be True or False"),
    ("trust", "all", "'all' must be 'cluster' or 'federation'"),
    ("trust", None, "must be 'cluster' or 'federation'"),
    ("quotas", 64, "64 must be Quotas(...), or None"),
    ("quotas", {"calls": 64}, "must be Quotas(...), or None"),
    ("key_file", "", "must be the path of a file that `backhaul keygen` made"),
    ("key_file", 3, "3 must be the path of a file"),
    ("key_file", "/no/such/file", "cannot be used: there is no key file /no/such/file"),
    ("tls", "cert.pem", "must be TLS(ca=..., cert=..., key=...), with the paths of PEM files"),
    ("host", "", "'' must be a name or an address of this machine; None means loopback"),
    ("host", " ::1", "must be a name or an address of this machine"),
    ("host", 7, "must be a name or an address of this machine"),
    ("port", -1, "must be a port below 65536; 0 means any free port"),
    ("port", 65536, "65536 must be a port below 65536"),
    ("port", "80", "must be a port"),
    ("port", True, "must be a port"),
    ("device_maps", "other", "must be a dict of dicts, as in {'worker1': {0: 1}}, or 'same'"),
    ("device_maps", {"b": {0: "mps"}}, "'mps' is not a device"),
    ("device_pool_bytes", -1, "must be a whole number of bytes"),
    ("devices", "cuda:0", "must be a list of GPUs"),
    ("devices", ["cpu"], "expect a list of CUDA devices"),
    ("metrics_port", -1, "must be a port below 65536; 0 means any free port"),
    ("metrics_port", "9400", "must be a port"),
    ("tracing", 1, "1 must be True or False"),
    ("edges", OPEN, "must be a dict of edges by the names of peers"),
    ("edges", {"bank": []}, "must be a dict of edges by the names of peers"),
    ("edges", {"": OPEN}, "as in {'bank': Edge(...), '*': Edge(...)}"),
    ("fabric", "none", "'none' must be 'tls', or 'plain' for a network whose every machine and cable you trust"),
    ("fabric", None, "None must be 'tls', or 'plain'"),
    ("connections", 0, "0 must be between 1 and 16, or None, which chooses by the number of processors"),
    ("connections", 17, "must be between 1 and 16"),
    ("connections", True, "must be between 1 and 16"),
]


@pytest.fixture(autouse=True)
def _no_secret_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def test_the_tables_show_every_option() -> None:
    names = {field.name for field in dataclasses.fields(RpcOptions)}
    assert set(GOOD) == names
    assert {name for name, _, _ in BAD} == names


@pytest.mark.parametrize("name", GOOD)
def test_good_values_are_taken_as_they_are(name: str) -> None:
    for value in GOOD[name]:
        assert getattr(RpcOptions(**{name: value}), name) == value
        options = RpcOptions()
        setattr(options, name, value)
        assert getattr(options, name) == value


@pytest.mark.parametrize(("name", "value", "text"), BAD)
def test_bad_values_are_refused_whenever_they_are_set(name: str, value: Any, text: str) -> None:
    options = RpcOptions()
    before = getattr(options, name)
    for attempt in (lambda: RpcOptions(**{name: value}), lambda: setattr(options, name, value)):
        with pytest.raises(OptionError) as refusal:
            attempt()
        assert str(refusal.value).startswith(f"option {name}: ")
        assert text in str(refusal.value)
        assert isinstance(refusal.value, ValueError)
    assert getattr(options, name) == before


def test_the_defaults() -> None:
    options = RpcOptions()
    assert options.rpc_timeout == DEFAULT_RPC_TIMEOUT == 60.0
    assert options.init_method == "env://"
    assert options.unresponsive_after == 30.0
    assert options.transport == "auto"
    assert options.secret is None


def test_seconds_become_floats() -> None:
    assert type(RpcOptions(rpc_timeout=5).rpc_timeout) is float
    assert type(RpcOptions(connect_timeout=5).connect_timeout) is float


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(OptionError, match="there is no option 'rpc_timout'; the options are rpc_timeout, init_method"):
        RpcOptions().rpc_timout = 5  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        RpcOptions(gadgets=[0])  # type: ignore[call-arg]


def test_options_can_be_copied_and_pickled() -> None:
    options = RpcOptions(rpc_timeout=5, secret=SECRET, transport="tcp")
    for other in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert other == options
    assert dataclasses.replace(options, rpc_timeout=6) == RpcOptions(rpc_timeout=6, secret=SECRET, transport="tcp")
    with pytest.raises(OptionError):
        dataclasses.replace(options, rpc_timeout=-1)


def test_quotas_are_checked() -> None:
    for field in dataclasses.fields(Quotas):
        for value in (0, -1, 1.5, True, None, "64"):
            with pytest.raises(OptionError, match=f"quota {field.name}: .* must be a whole number of at least 1"):
                Quotas(**{field.name: value})


def test_which_limits_apply() -> None:
    assert RpcOptions().limits is None
    assert RpcOptions(trust="federation").limits == Quotas()
    assert RpcOptions(quotas=Quotas(calls=3)).limits == Quotas(calls=3)
    assert RpcOptions(max_message_bytes=1 << 40).message_limit == 1 << 40
    assert RpcOptions(trust="federation").message_limit == 256 << 20
    assert RpcOptions(trust="federation", max_message_bytes=1000).message_limit == 1000
    assert RpcOptions().head_limit == RpcOptions().message_limit
    assert RpcOptions(trust="federation").head_limit == 1 << 20
    assert RpcOptions(quotas=Quotas(value_bytes=5)).head_limit == 5
    assert RpcOptions(quotas=Quotas(message_bytes=7)).head_limit == 7
    assert RpcOptions(trust="federation", quotas=Quotas(message_bytes=1 << 40)).message_limit == 64 << 30


# The secret.


def test_a_secret_is_not_shown() -> None:
    secret = secrets.token_bytes(32)
    assert "secret" not in repr(RpcOptions(secret=secret))
    with pytest.raises(OptionError) as refusal:
        RpcOptions(secret=secret[:31])
    assert repr(secret[:8])[2:-1] not in str(refusal.value)


def test_the_secret_is_inherited_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RpcOptions().secret_or_inherited() is None
    monkeypatch.setenv(SECRET_VARIABLE, "")
    assert RpcOptions().secret_or_inherited() is None
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.hex())
    assert RpcOptions().secret_or_inherited() == SECRET
    other = bytes(40)
    assert RpcOptions(secret=other).secret_or_inherited() == other


@pytest.mark.parametrize("text", ["zz" * 32, "ab", "ab" * 31, "a" * 65])
def test_a_bad_secret_in_the_environment_is_not_shown_either(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, text)
    with pytest.raises(OptionError, match=f"the environment variable {SECRET_VARIABLE} must hold") as refusal:
        RpcOptions().secret_or_inherited()
    assert len(text) < 8 or text not in str(refusal.value)
    assert refusal.value.__suppress_context__


def test_the_backends() -> None:
    assert {backend.name for backend in BackendType} == {"BACKHAUL", "TENSORPIPE"}
