"""Workers on two hosts that share only a key: network namespaces with a cable between them."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul import rpc
from backhaul.security.keys import make_key_file
from backhaul.worker import current
from crew import Crew
from hosts import become_host
from mint import Mint

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces")

ADDRESSES = ["10.77.0.1", "10.77.0.2"]
PORT = 29555
LONE = f"tcp://{ADDRESSES[0]}:29556"  # for workers that fail to join: a store counts how often each rank has come


# Functions that run on the hosts.


def plug_in(address: str) -> None:
    subprocess.run(["ip", "address", "add", f"{address}/24", "dev", "cable"], check=True)
    subprocess.run(["ip", "link", "set", "cable", "up"], check=True)


def join(rank: int, **options: Any) -> str | tuple[str, int]:
    """The address that this worker announces, or what is wrong."""
    options = {"init_method": f"tcp://{ADDRESSES[0]}:{PORT}", "rpc_timeout": 20, "connect_timeout": 5, **options}
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.RpcOptions(**options))
    except rpc.BackhaulError as error:
        return f"{type(error).__name__}: {error}"
    address = current().agent.transport.addresses.tcp
    assert address is not None
    return address


def add(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor + number


def call_back(to: str, tensor: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, add, (tensor, 1))


def call(to: str, function: Any, *args: Any) -> Any:
    try:
        return rpc.rpc_sync(to, function, args)
    except rpc.BackhaulError as error:
        return f"{type(error).__name__}: {error}"


def leave(graceful: bool) -> None:
    rpc.shutdown(graceful)


def channel_kinds() -> set[str]:
    return {type(line.channel).__name__ for line in current().agent.calling()}


def can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


records: list[str] = []
written = threading.Condition()


def record() -> None:
    """Record log messages from now on."""

    class Notes(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            with written:
                records.append(entry.getMessage())
                written.notify_all()

    logging.getLogger("backhaul").addHandler(Notes())


def recorded(text: str = "") -> str:
    """The log, once it contains this text: the two ends of a connection notice events at different times."""
    with written:
        assert written.wait_for(lambda: any(text in record for record in records) or not text, 20), records
    return "\n".join(records)


# The tests.


@pytest.fixture(scope="module")
def hosts() -> Iterator[Crew]:
    with Crew(2, setup=become_host, group=False) as crew:
        ends = [f"netns {hand.process.pid}" for hand in crew]
        command = f"ip link add name cable {ends[0]} type veth peer name cable {ends[1]}"
        subprocess.run(command.split(), check=True)
        for hand, address in zip(crew, ADDRESSES, strict=True):
            hand.run(plug_in, address)
            hand.run(record)
        yield crew


def join_all(hosts: Crew, *options: dict[str, Any]) -> list[Any]:
    joining = [hosts[rank].start(join_with, rank, given) for rank, given in enumerate(options)]
    return [each.result(60) for each in joining]


def join_with(rank: int, options: dict[str, Any]) -> str | tuple[str, int]:
    return join(rank, **options)


def leave_all(hosts: Crew, graceful: bool = True) -> None:
    for each in [hand.start(leave, graceful) for hand in hosts]:
        each.result(60)


@pytest.fixture
def key(tmp_path: Path) -> str:
    make_key_file(str(tmp_path / "cluster.key"))
    return str(tmp_path / "cluster.key")


def test_two_hosts_with_one_key(hosts: Crew, key: str) -> None:
    announced = join_all(hosts, *({"host": address, "key_file": key} for address in ADDRESSES))
    assert [address for address, _ in announced] == ADDRESSES
    large = torch.arange(1_000_000)
    assert torch.equal(hosts[0].run(call, "worker1", add, large, 5), large + 5)
    assert torch.equal(hosts[1].run(call, "worker0", call_back, "worker1", large), large + 1)
    assert hosts[0].run(channel_kinds) == hosts[1].run(channel_kinds) == {"TlsChannel"}
    # The store and the worker listen where they were told to, and nowhere else.
    assert hosts[1].run(can_connect, ADDRESSES[0], PORT)
    assert not hosts[0].run(can_connect, "127.0.0.1", PORT)
    assert not hosts[0].run(can_connect, "127.0.0.1", announced[0][1])
    leave_all(hosts)


def test_all_interfaces_announce_the_one_that_the_store_is_reached_by(hosts: Crew, key: str) -> None:
    announced = join_all(hosts, *({"host": "0.0.0.0", "key_file": key},) * 2)
    assert [address for address, _ in announced] == ADDRESSES
    assert hosts[1].run(call, "worker0", add, torch.zeros(2), 5).sum() == 10
    leave_all(hosts)


def test_certificates_of_two_parties(hosts: Crew, tmp_path: Path) -> None:
    mint = Mint(tmp_path)
    given = [{"host": address, "tls": mint.tls(f"worker{rank}")} for rank, address in enumerate(ADDRESSES)]
    join_all(hosts, *given)
    assert hosts[0].run(call, "worker1", add, torch.zeros(2), 5).sum() == 10
    leave_all(hosts)
    refused = hosts[0].run(join_with, 0, {"host": ADDRESSES[0], "tls": given[1]["tls"], "init_method": LONE})
    assert refused.startswith("OptionError: this worker is 'worker0', and its certificate")


def test_both_hosts_learn_that_their_keys_differ(hosts: Crew, key: str, tmp_path: Path) -> None:
    make_key_file(str(tmp_path / "other.key"))
    keys = [key, str(tmp_path / "other.key")]
    join_all(hosts, *({"host": address, "key_file": each} for address, each in zip(ADDRESSES, keys, strict=True)))
    told = hosts[0].run(call, "worker1", add, torch.zeros(2), 5)
    assert told.startswith(
        "AuthenticationError: no connection to worker 'worker1': the peer's certificate is refused: "
    )
    assert "it comes from another cluster" in told
    hosts[1].run(recorded, "the peer does not accept this worker's certificate: it comes from another cluster")
    for each in keys:
        assert Path(each).read_text().strip() not in told + hosts[0].run(recorded) + hosts[1].run(recorded)
    leave_all(hosts, graceful=False)


def test_without_a_key_no_worker_listens_beyond_loopback(hosts: Crew) -> None:
    told = hosts[0].run(join_with, 0, {"host": ADDRESSES[0], "init_method": LONE})
    assert told.startswith("OptionError: listening on 10.77.0.1, beyond this machine, needs a key or certificates")
    assert "backhaul keygen" in told
