"""How a transport admits or refuses peers; run once for each transport."""

from __future__ import annotations

import os
import select
import time

import msgspec
import pytest
from transport_group import HELLO, SOON, WELCOME, Group, is_readable, receive, run, send, soon, welcome_all

from backhaul.errors import AuthenticationError
from backhaul.security.handshake import Hello, Welcome
from backhaul.transport.base import Addresses, Channel, ChannelClosed
from backhaul.wire.messages import Ping
from greetings import admit as admit_visitor


def test_both_sides_learn_the_other_s_name(group: Group) -> None:
    transport, door = group.door()
    channel, welcome = group.transport().connect(transport.addresses, HELLO, soon())
    assert (welcome.id, welcome.name) == (WELCOME.id, WELCOME.name)
    there = door.outcomes.get(timeout=SOON)
    assert not isinstance(there, Exception)
    assert msgspec.structs.replace(there[1], checks=False, fabric=HELLO.fabric) == HELLO
    channel.close()
    there[0].close()


def test_one_transport_listens_and_connects(group: Group) -> None:
    transport, door = group.door()
    channel, _ = transport.connect(transport.addresses, Hello("group", 0, WELCOME.name, 0), soon())
    send(channel, Ping(1))
    there = door.channel()
    assert receive(there).message == Ping(1)
    channel.close()
    there.close()


def test_many_clients_connect_at_once(group: Group) -> None:
    transport, door = group.door()
    count = 40
    channels: list[Channel] = []
    run(*[lambda: channels.append(group.connect(transport)) for _ in range(count)])
    for number, channel in enumerate(channels):
        send(channel, Ping(number))
    there = [door.channel() for _ in range(count)]
    assert sorted(receive(channel).message.id for channel in there) == list(range(count))
    for channel in there:
        channel.close()


def test_a_peer_that_the_judge_refuses_is_told_why(group: Group) -> None:
    transport, door = group.door(lambda hello: Welcome(0, "worker0", "it is shutting down"))
    with pytest.raises(AuthenticationError, match="refused the connection: it is shutting down"):
        group.transport().connect(transport.addresses, HELLO, soon())
    refusal = door.outcomes.get(timeout=SOON)
    assert isinstance(refusal, AuthenticationError)
    assert str(refusal) == "refused worker 'worker1': it is shutting down"


def test_a_peer_of_another_group_is_refused_and_a_good_one_is_not(group: Group) -> None:
    def judge(hello: Hello) -> Welcome:
        return Welcome(0, "worker0", "" if hello.group == "group" else "it belongs to another group")

    transport, door = group.door(judge)
    with pytest.raises(AuthenticationError, match="another group"):
        group.transport().connect(transport.addresses, Hello("other", 1, "worker1", 0), soon())
    assert isinstance(door.outcomes.get(timeout=SOON), AuthenticationError)
    group.connect(transport)
    door.channel().close()


def test_connecting_to_a_closed_address_fails(group: Group) -> None:
    transport, door = group.door()
    addresses = transport.addresses
    door.close()
    transport.close()
    with pytest.raises(ChannelClosed, match="nobody"):
        group.transport().connect(addresses, HELLO, soon())


def test_is_listening_tells_whether_a_worker_listens(group: Group) -> None:
    transport, door = group.door()
    asking = group.transport()
    assert asking.is_listening(transport.addresses, soon())
    door.close()
    transport.close()
    assert not asking.is_listening(transport.addresses, soon())
    assert not asking.is_listening(Addresses(), soon())


def test_no_address_at_all(group: Group) -> None:
    with pytest.raises(ChannelClosed):
        group.transport().connect(Addresses(), HELLO, soon())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_failed_connections_leave_no_descriptor(group: Group) -> None:
    transport, door = group.door(lambda hello: Welcome(0, "worker0", "no"))
    asking = group.transport()
    before = descriptors()
    for _ in range(5):
        with pytest.raises(AuthenticationError):
            asking.connect(transport.addresses, HELLO, soon())
        assert isinstance(door.outcomes.get(timeout=SOON), AuthenticationError)
    assert descriptors() == before
    door.close()
    transport.close()
    before = descriptors()
    for _ in range(5):
        with pytest.raises(ChannelClosed):
            asking.connect(transport.addresses, HELLO, soon())
    assert descriptors() == before


def test_a_visitor_that_is_turned_away_is_told_nothing(group: Group) -> None:
    transport = group.transport()
    (listener,) = transport.listen()

    def turn_away() -> None:
        poll = select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        poll.poll()
        visitor = listener.accept()
        assert visitor is not None
        visitor.turn_away()

    def connect() -> None:
        with pytest.raises(ChannelClosed):
            group.transport().connect(transport.addresses, HELLO, soon())

    run(turn_away, connect)


def test_a_worker_that_does_not_answer_is_a_timeout_and_not_a_loss(group: Group) -> None:
    """If the timeout counted as a loss, the agent would remove the worker from a dynamic group."""
    transport = group.transport()
    transport.listen()  # and no thread accepts visitors
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        group.transport().connect(transport.addresses, HELLO, began + 0.2)
    assert 0.1 < time.monotonic() - began < 2


def test_a_deadline_that_has_passed(group: Group) -> None:
    transport = group.transport()
    transport.listen()
    with pytest.raises(TimeoutError):
        group.transport().connect(transport.addresses, HELLO, time.monotonic() - 1)


def test_listeners_are_readable_when_a_visitor_has_come(group: Group) -> None:
    transport = group.transport(WELCOME.name)
    (listener,) = transport.listen()
    assert listener.accept() is None
    assert not is_readable(listener)

    def admit() -> None:
        poll = select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        assert poll.poll(SOON * 1000)
        visitor = listener.accept()
        assert visitor is not None
        admit_visitor(visitor, welcome_all, soon())[0].close()

    run(admit, lambda: group.connect(transport).close())
    assert listener.accept() is None
    assert not is_readable(listener)
