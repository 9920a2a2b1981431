"""Where a worker listens for TCP, and what it tells the others."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transport_group import (
    HELLO,
    SOON,
    WELCOME,
    Made,
    admit_one,
    only_listener,
    receive,
    send,
    soon,
    welcome_all,
)

from backhaul.errors import OptionError
from backhaul.options import HOST_VARIABLE, RpcOptions
from backhaul.transport import hosts
from backhaul.transport.hosts import choose_site
from backhaul.wire.messages import Ping

SECRET = os.urandom(32)


def own_addresses() -> list[str]:
    """This machine's addresses other than loopback, as its interfaces have them."""
    found = []
    for text in Path("/proc/net/fib_trie").read_text().split("|--")[1:]:
        address, rest = text.split(maxsplit=1)
        if "host LOCAL" in rest and not address.startswith("127."):
            found.append(address)
    return sorted(set(found))


def test_a_worker_listens_on_one_loopback_address_only(make: Made) -> None:
    listener = only_listener(make(transport="tcp", secret=SECRET))
    host, port = listener._socket.getsockname()
    assert host == "127.0.0.1"
    for other in ("127.0.0.2", "::1", *own_addresses()):
        with pytest.raises(OSError), socket.create_connection((other, port), timeout=SOON):
            pass
    with socket.create_connection((host, port), timeout=SOON):
        pass


@pytest.mark.parametrize("wanted", ["auto", "unix"])
def test_without_a_secret_there_is_no_tcp(make: Made, wanted: str) -> None:
    transport = make(transport=wanted)
    assert only_listener(transport)._socket.family == socket.AF_UNIX
    assert transport.addresses.tcp is None


def test_with_a_secret_auto_offers_both_and_each_alone_only_itself(make: Made) -> None:
    for wanted, unix, tcp in (("auto", True, True), ("unix", True, False), ("tcp", False, True)):
        transport = make(transport=wanted, secret=SECRET)
        assert len(transport.listen()) == unix + tcp
        assert (transport.addresses.unix is not None, transport.addresses.tcp is not None) == (unix, tcp)


def test_tcp_without_a_secret_is_refused(make: Made) -> None:
    transport = make(transport="tcp")
    with pytest.raises(OptionError, match=r"transport 'tcp' needs a secret .* `backhaul run`.* `backhaul keygen"):
        transport.listen()
    assert transport.addresses.tcp is None


@pytest.mark.parametrize("wanted", ["auto", "tcp"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_needs_a_key(make: Made, wanted: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for options in ({"host": host}, {}):
        if not options:
            monkeypatch.setenv(HOST_VARIABLE, host)
        with pytest.raises(OptionError, match=r"`backhaul keygen cluster.key`, copy .*--key-file.*RpcOptions\(tls="):
            make(transport=wanted, **options).listen()


def test_a_host_and_a_port(make: Made, threads: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.3", 0)) as probe:
        port = probe.getsockname()[1]
    server = make(WELCOME.name, transport="tcp", secret=SECRET, host="127.0.0.3", port=port)
    there = threads.submit(admit_one, only_listener(server), welcome_all)
    assert server.addresses.tcp == ("127.0.0.3", port)
    channel, _ = make(transport="tcp", secret=SECRET).connect(server.addresses, HELLO, soon())
    channel.close()
    there.result()[0].close()
    with pytest.raises(OptionError, match=f"cannot listen on 127.0.0.3, port {port}: Address already in use"):
        make(transport="tcp", secret=SECRET, host="127.0.0.3", port=port).listen()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6(make: Made, threads: ThreadPoolExecutor) -> None:
    server = make(WELCOME.name, transport="tcp", secret=SECRET, host="::1")
    there = threads.submit(admit_one, only_listener(server), welcome_all)
    assert server.addresses.tcp is not None
    assert server.addresses.tcp[0] == "::1"
    channel, _ = make(transport="tcp", secret=SECRET).connect(server.addresses, HELLO, soon())
    send(channel, Ping(1))
    far = there.result()[0]
    assert receive(far).message == Ping(1)
    channel.close()
    far.close()


def test_an_address_of_another_machine_is_refused(make: Made) -> None:
    with pytest.raises(OptionError, match=r"cannot listen on 192\.0\.2\.7, .*must be an address of this machine"):
        make(transport="tcp", secret=SECRET, host="192.0.2.7").listen()
    with pytest.raises(OptionError, match=r"host 'no such host' \(the option host\) is not a name or address"):
        make(transport="tcp", secret=SECRET, host="no such host").listen()


def test_unix_sockets_have_no_host(make: Made) -> None:
    for options in ({"host": "127.0.0.1"}, {"port": 1}):
        with pytest.raises(OptionError, match="transport 'unix' has no host and no port"):
            make(transport="unix", **options).listen()


# What it tells the others.


def test_the_announced_address_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    site = choose_site(RpcOptions())
    assert (site.announced, site.is_loopback) == ("127.0.0.1", True)
    assert site.why == "no host is given, so only this machine can call"
    site = choose_site(RpcOptions(host="localhost"))
    assert site.is_loopback
    assert site.why.startswith("the option host says 'localhost', which is ")
    monkeypatch.setenv(HOST_VARIABLE, "127.0.0.9")
    site = choose_site(RpcOptions())
    assert (site.announced, site.why) == ("127.0.0.9", "BACKHAUL_HOST says '127.0.0.9'")
    assert choose_site(RpcOptions(host="127.0.0.8")).announced == "127.0.0.8"


STORES = [
    ("tcp://127.0.0.1:29500", {}, "127.0.0.1"),
    ("env://", {"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
    ("env://", {"BACKHAUL_INIT_METHOD": "tcp://127.0.0.1:1", "MASTER_ADDR": "192.0.2.1"}, "127.0.0.1"),
    ("env://", {"BACKHAUL_INIT_METHOD": "file:///tmp/x", "MASTER_ADDR": "192.0.2.1"}, None),
    ("file:///tmp/x", {"MASTER_ADDR": "192.0.2.1"}, None),
    ("env://", {}, None),
]


@pytest.mark.parametrize(("method", "environment", "store"), STORES)
def test_all_interfaces_announce_the_one_on_the_way_to_the_store(
    monkeypatch: pytest.MonkeyPatch, method: str, environment: dict[str, str], store: str | None
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    options = RpcOptions(init_method=method, host="0.0.0.0")
    assert hosts.meeting_host(options) == store
    if store is not None:
        site = choose_site(options)
        assert site.announced == "127.0.0.1"
        assert not site.is_loopback
        assert (
            site.why
            == "the option host says '0.0.0.0', all addresses; this one is on the way to the store at 127.0.0.1"
        )


def test_without_a_store_s_host_the_default_route_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    # The routes of this machine are unknown, but the route to loopback is always loopback.
    monkeypatch.setattr(hosts, "_ANYWHERE", ("127.0.0.1",))
    site = choose_site(RpcOptions(init_method="file:///tmp/x", host="0.0.0.0"))
    assert site.announced == "127.0.0.1"
    assert site.why.endswith("this one is on the way to anywhere else")
    monkeypatch.setattr(hosts, "_ANYWHERE", ("no address",))
    with pytest.raises(OptionError, match="no route tells which of them others can reach"):
        choose_site(RpcOptions(init_method="file:///tmp/x", host="0.0.0.0"))
