"""Guests: they may only ask, they delay no worker, and they find the clusters of this machine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import watched

from backhaul.errors import AuthenticationError, MisuseError, ProtocolError, RemoteError, WorkerLostError
from backhaul.ids import GUEST, Addresses
from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello
from backhaul.seeing.guest import Guest, find_cluster, members, transport_for
from backhaul.testing import InProcessCluster
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.transport.memory import MemoryTransport
from backhaul.wire.frames import encode
from backhaul.wire.messages import Call, Goodbye, Inspect, Result, Tally
from backhaul.worker import Worker

RAN: list[str] = []


def ran(text: str) -> None:
    RAN.append(text)


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(2, sockets=True) as made:
        yield made


def addresses(worker: Worker) -> Addresses:
    found: Addresses = worker.agent.membership.find(worker.info).addresses
    return found


def visit(worker: Worker) -> Guest:
    return Guest(addresses(worker), transport_for())


@pytest.fixture
def guest(cluster: InProcessCluster) -> Iterator[Guest]:
    made = visit(cluster[0])
    yield made
    made.close()


def test_a_guest_gets_an_answer(cluster: InProcessCluster, guest: Guest) -> None:
    cluster[0].rpc_sync("worker1", watched.double, (torch.ones(1),))
    assert guest.info == cluster[0].info
    snapshot = guest.ask("snapshot")
    assert snapshot["worker"]["name"] == "worker0"
    assert snapshot["calls"]["calls_sent"] == 1
    assert [each["name"] for each in snapshot["peers"]] == ["worker1"]  # and not the guest
    assert snapshot["running"] == []  # not its own question either
    assert guest.ask("meter")["on"] is True
    assert guest.ask("clock").keys() == {"monotonic", "time"}
    assert any(frame["function"] == "describe_threads" for each in guest.ask("threads") for frame in each["stack"])
    assert [member.info for member in members(guest)] == [cluster[0].info, cluster[1].info]


def test_an_invalid_question_is_an_error(guest: Guest) -> None:
    with pytest.raises(RemoteError, match="'nothing' is not a topic of inspection"):
        guest.ask("nothing")
    with pytest.raises(RemoteError, match="TypeError"):
        guest.ask("snapshot", what=1)
    assert guest.ask("snapshot")["errors"] == []  # nor is it a call that failed


def connect(worker: Worker) -> Channel:
    """A guest's connection, for frames that no guest sends."""
    hello = Hello("", GUEST, "guest", GUEST)
    channel, _ = transport_for().connect(addresses(worker), hello, time.monotonic() + watched.PATIENCE)
    return channel


def receive(channel: Channel) -> Any:
    while (envelope := channel.next()) is None:
        assert channel.read(watched.PATIENCE)
    return envelope.message


@pytest.mark.parametrize("message", [Tally(1), Goodbye(), "call"], ids=str)
def test_a_guest_may_do_nothing_else(cluster: InProcessCluster, message: Any, caplog: pytest.LogCaptureFixture) -> None:
    if message == "call":
        tree, _ = cluster[0].codec.pack_call(ran, ("by a guest",), {})
        message = Call(1, tree)
    channel = connect(cluster[0])
    with contextlib.closing(channel):
        assert channel.write(encode(Inspect(1, "clock")))
        assert isinstance(receive(channel), Result)
        assert channel.write(encode(message))
        with pytest.raises(ChannelClosed):
            receive(channel)
    assert RAN == []
    assert f"a {type(message).__name__} where requests are expected" in caplog.text
    assert cluster[1].rpc_sync("worker0", int) == 0
    assert cluster[0].inspection.snapshot()["calls"]["calls_received"] == 1


def test_a_member_may_make_the_call_that_is_refused_to_guests(cluster: InProcessCluster) -> None:
    """A member's call runs the function; otherwise the test above would prove nothing."""
    cluster[1].rpc_sync("worker0", ran, ("by a member",))
    assert RAN == ["by a member"]
    RAN.clear()


def test_a_worker_accepts_at_most_16_guests(cluster: InProcessCluster) -> None:
    guests = [visit(cluster[0]) for _ in range(16)]
    try:
        for guest in guests:
            guest.ask("clock")
        with pytest.raises(AuthenticationError, match="it already has 16 guests"):
            visit(cluster[0])
        visit(cluster[1]).close()
        guests.pop().close()
        deadline = time.monotonic() + watched.PATIENCE
        again = None
        while again is None:
            try:
                again = visit(cluster[0])
            except AuthenticationError:  # the worker has not noticed yet that one guest has gone
                assert time.monotonic() < deadline
        assert again.ask("clock")
        again.close()
    finally:
        for guest in guests:
            guest.close()


def test_a_federation_refuses_guests() -> None:
    with InProcessCluster(2, options=RpcOptions(trust="federation")) as cluster:
        transport = MemoryTransport(cluster.network, RpcOptions())
        with pytest.raises(AuthenticationError, match="a member of a federation does not let guests inspect it"):
            Guest(addresses(cluster[0]), transport)


def test_a_member_of_a_federation_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with InProcessCluster(2, options=RpcOptions(trust="federation")) as cluster:
        question = cluster[1].agent.ask_later(
            cluster[0].info, lambda id: Inspect(id, "snapshot"), "its figures", time.monotonic() + watched.PATIENCE
        )
        with pytest.raises(WorkerLostError):
            question.wait()
        assert "a Inspect, in a federation" in caplog.text


def test_a_graceful_shutdown_does_not_wait_for_guests(cluster: InProcessCluster, guest: Guest) -> None:
    cluster[0].rpc_sync("worker1", int)
    guest.ask("clock")
    threads = [threading.Thread(target=worker.shutdown) for worker in cluster]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(watched.PATIENCE)
    assert all(worker.closed for worker in cluster)
    with pytest.raises(WorkerLostError, match="worker 'worker0' is lost"):
        guest.ask("clock")


def test_visiting_an_address_without_a_worker_fails(tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match="no worker answers"):
        Guest(Addresses(host=addresses_host(), unix=str(tmp_path / "nobody")), transport_for())


def addresses_host() -> str:
    from backhaul.transport.stream import host_id

    return host_id()


class Trap:
    """A value whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return ran, ("by an answer",)


@pytest.mark.parametrize(
    "answer", [Trap(), ran, [torch.load], {"a": Trap}], ids=["object", "function", "list", "class"]
)
def test_an_answer_that_is_not_plain_data_is_refused(cluster: InProcessCluster, guest: Guest, answer: Any) -> None:
    """A hijacked worker cannot run anything where its answers are read, not even an import."""
    cluster[0].inspection.topics["trap"] = lambda: answer
    with pytest.raises(ProtocolError):
        guest.ask("trap")
    assert RAN == []
    assert guest.ask("clock")


# Finding clusters.


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for the sockets of the next cluster."""
    path = Path("/tmp") / f"backhaul-{tmp_path.name[:20]}-{threading.get_native_id()}"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("BACKHAUL_RUNTIME_DIR", str(path))
    yield path
    for each in path.iterdir():
        each.unlink()
    path.rmdir()


def test_a_cluster_is_found_by_its_directory(place: Path) -> None:
    with InProcessCluster(3, sockets=True) as cluster:
        found = find_cluster(str(place))
        assert [member.info for member in found] == [worker.info for worker in cluster]
        guest = Guest(found[2].addresses, transport_for())
        assert guest.ask("snapshot")["worker"]["name"] == "worker2"
        guest.close()
    with pytest.raises(MisuseError, match=f"you have no running cluster on this machine in {place}"):
        find_cluster(str(place))


def test_several_clusters_are_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with InProcessCluster(2, sockets=True):
        monkeypatch.delenv("BACKHAUL_RUNTIME_DIR")
        with InProcessCluster(1, sockets=True), pytest.raises(MisuseError) as caught:
            find_cluster(None)
    assert "you have several running clusters on this machine" in str(caught.value)
    assert f"  {place}: worker0, worker1" in str(caught.value).splitlines()


def test_a_place_that_is_neither_a_directory_nor_an_address_is_refused() -> None:
    with pytest.raises(MisuseError, match="'nowhere' is neither a directory nor the host:port of a worker"):
        find_cluster("nowhere")
