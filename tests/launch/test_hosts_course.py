"""The course of a launch over hosts, without hosts: messages to them, their loss, and the end."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from backhaul.launch import protocol
from backhaul.launch.course import Action, Connect, Course, Disconnect, Say, Send
from backhaul.launch.job import Outcome
from backhaul.launch.placement import Host, seats
from backhaul.launch.terms import Terms

VERSION = "0.9"
HELLO = {0: "10.0.0.1", 1: "10.0.0.2"}


class Play:
    """A launch of four workers on two hosts, event by event."""

    def __init__(self, hosts: Sequence[Host] = (Host("a", 2), Host("b", 2)), **terms: object) -> None:
        names = [f"worker{rank}" for rank in range(sum(host.slots for host in hosts))]
        given = {
            "version": VERSION,
            "argv": ["-u", "x.py"],
            "environment": {"BACKHAUL_SECRET": "s"},
            "workdir": "/w",
            "script": "x.py",
        }
        self.terms = Terms(hosts=hosts, seats=seats(hosts, names), **{**given, "host_timeout": 10.0, **terms})  # type: ignore[arg-type]
        self.course = Course(self.terms, {"10.0.0.2": "10.0.0.9"}.get)
        self.now = 1000.0
        self.did = self.course.begin(self.now)

    def hear(self, host: int, *messages: protocol.Message) -> list[Action]:
        self.did = [action for message in messages for action in self.course.received(host, message, self.now)]
        return self.did

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        self.did = self.course.tick(self.now)
        return self.did

    def drop(self, host: int, why: str = "the connection is gone") -> list[Action]:
        self.did = self.course.disconnected(host, why, self.now)
        return self.did

    def stop(self, signum: int) -> list[Action]:
        self.did = self.course.stop(signum, self.now)
        return self.did

    def pass_on(self, signum: int) -> list[Action]:
        self.did = self.course.pass_on(signum)
        return self.did

    def sent(self, kind: type[protocol.Message]) -> list[tuple[int, protocol.Message]]:
        found = [(each.host, each.message) for each in self.did if isinstance(each, Send)]
        return [(host, message) for host, message in found if isinstance(message, kind)]

    @property
    def said(self) -> str:
        return "\n".join(each.text for each in self.did if isinstance(each, Say))

    def greet(self, host: int) -> list[Action]:
        return self.hear(host, protocol.Hello(protocol.VERSION, VERSION, HELLO[host]), protocol.Ready())

    def run(self) -> Play:
        """Play until all workers run."""
        self.greet(0)
        self.greet(1)
        self.hear(0, protocol.Listening(4711))
        for host in (0, 1):
            self.hear(host, protocol.Reached(HELLO[host]))
        starts = [message.rank for _, message in self.sent(protocol.Start) if isinstance(message, protocol.Start)]
        assert starts == [seat.rank for seat in self.terms.seats]
        for seat in self.terms.seats:
            self.started(seat.rank)
        assert self.course.phase == "running"
        return self

    def started(self, rank: int, times: int = 0) -> None:
        self.hear(self.terms.seats[rank].host, protocol.Started(rank, 100 + rank, f"process{rank}.{times}"))

    def end(self, rank: int, code: int = 0) -> list[Action]:
        ending = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        return self.hear(self.terms.seats[rank].host, protocol.Ended(rank, code, ending))

    def over(self, *ranks: int) -> list[Action]:
        found = []
        for rank in ranks:
            found += self.hear(self.terms.seats[rank].host, protocol.Over(rank))
        return found

    def answer(self, host: int) -> list[Action]:
        return self.hear(host, protocol.Ask(1))


# The beginning.


def test_all_hosts_are_called_and_set_up() -> None:
    play = Play()
    assert play.did == [Connect(0), Connect(1)]
    play.hear(1, protocol.Hello(protocol.VERSION, VERSION, "10.0.0.2"))
    assert play.did == [Send(1, protocol.Setup("b", {"BACKHAUL_SECRET": "s"}, "/w", "x.py", 10.0))]


def test_workers_start_when_all_hosts_have_reached_the_first() -> None:
    play = Play(named=True)
    assert play.sent(protocol.Listen) == []
    play.greet(1)
    assert play.sent(protocol.Listen) == []  # the first host is not ready yet
    play.greet(0)
    assert play.did[-1] == Send(0, protocol.Listen("10.0.0.1", 0))
    play.hear(0, protocol.Listening(4711))
    assert play.did == [Send(host, protocol.Reach("10.0.0.1", 4711, 5.0)) for host in (0, 1)]
    assert play.hear(1, protocol.Reached("10.0.0.2")) == []
    play.hear(0, protocol.Reached("10.0.0.1"))
    (_, _, (host, start), _) = play.sent(protocol.Start)
    assert host == 1
    assert start == protocol.Start(
        2,
        "worker2",
        ["-u", "x.py"],
        {
            "RANK": "2",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "4711",
            "BACKHAUL_INIT_METHOD": "tcp://10.0.0.1:4711",
            "BACKHAUL_HOST": "10.0.0.2",
            "BACKHAUL_NAME": "worker2",
        },
    )


@pytest.mark.parametrize(
    ("hosts", "terms", "address"),
    [
        ((Host("a"), Host("b")), {"master_addr": "10.9.9.9", "master_port": 7}, "10.9.9.9"),
        ((Host("a", address="192.168.0.1"), Host("b")), {}, "192.168.0.1"),
        ((Host("localhost"), Host("b")), {}, "10.0.0.9"),  # this machine's address that faces b
        ((Host("localhost"),), {}, "127.0.0.1"),
    ],
)
def test_where_the_group_meets(hosts: Sequence[Host], terms: dict[str, object], address: str) -> None:
    play = Play(hosts, **terms)
    for number, host in enumerate(hosts):
        play.hear(number, protocol.Hello(protocol.VERSION, VERSION, "" if host.is_local else HELLO[number]))
        play.hear(number, protocol.Ready())
    assert play.did == [Send(0, protocol.Listen(address, int(str(terms.get("master_port", 0)))))]


def test_an_address_that_is_not_known_is_asked_for() -> None:
    play = Play()
    play.greet(1)
    play.hear(0, protocol.Hello(protocol.VERSION, VERSION, ""), protocol.Ready())
    assert play.course.phase == "listening"  # the address comes from towards("10.0.0.2")
    play = Play()
    for host in (0, 1):
        play.hear(host, protocol.Hello(protocol.VERSION, VERSION, ""), protocol.Ready())
    assert "give it with --master-addr, or as address= in a hostfile" in play.course.outcome.why


def test_each_host_listens_on_its_own_address() -> None:
    def listening(play: Play) -> list[str]:
        play.greet(0)
        play.greet(1)
        play.hear(0, protocol.Listening(1))
        play.hear(0, protocol.Reached("10.0.0.1"))
        play.hear(1, protocol.Reached("10.0.0.2"))
        starts = [message for _, message in play.sent(protocol.Start) if isinstance(message, protocol.Start)]
        return [start.environment["BACKHAUL_HOST"] for start in starts]

    assert listening(Play((Host("a"), Host("b", address="172.16.0.2")))) == ["10.0.0.1", "172.16.0.2"]
    assert listening(Play((Host("a"), Host("b")), listen_on="0.0.0.0")) == ["0.0.0.0"] * 2


def test_an_ipv6_address_is_quoted() -> None:
    terms = Play().terms
    given = terms.worker_environment(terms.seats[0], "fe80::1", "7", "::")
    assert given["BACKHAUL_INIT_METHOD"] == "tcp://[fe80::1]:7"
    assert given["MASTER_ADDR"] == "fe80::1"


def test_all_hosts_that_cannot_be_used_are_named_at_once() -> None:
    play = Play((Host("a"), Host("b"), Host("c")))
    assert play.drop(1, "host b: no key") == []  # the others may fail too
    play.greet(0)
    play.hear(2, protocol.Hello(protocol.VERSION, VERSION, "10.0.0.3"))
    play.hear(2, protocol.Refused("it has no directory /w"))
    assert play.course.done
    assert play.course.outcome == Outcome(255, "host b: no key\nhost c: it has no directory /w", stopped=False)
    assert Disconnect(0) in play.did
    assert Disconnect(1) not in play.did


def test_a_host_that_does_not_answer_in_time() -> None:
    play = Play(connect_timeout=60.0)
    play.greet(0)
    assert play.wait(59.0) == []
    assert play.course.next_time() == 1060.0
    play.wait(1.0)
    assert play.course.outcome.why == "host b has not answered within 60 s (--connect-timeout)"
    assert play.did == [Disconnect(1), Disconnect(0)]


def test_another_version_is_refused() -> None:
    play = Play((Host("a"),))
    play.hear(0, protocol.Hello(protocol.VERSION, "0.0.1", ""))
    assert play.course.outcome.code == 255
    assert "host a: it has Backhaul 0.0.1, but the launcher" in play.course.outcome.why


def test_a_port_that_is_taken() -> None:
    play = Play(master_port=80)
    play.greet(0)
    play.greet(1)
    play.hear(0, protocol.Listening(80, "Address already in use"))
    assert "host a cannot listen on 10.0.0.1 port 80" in play.course.outcome.why
    assert "Address already in use. Give an address of that host with --master-addr" in play.course.outcome.why


def test_a_firewall_between_the_hosts() -> None:
    play = Play()
    play.greet(0)
    play.greet(1)
    play.hear(0, protocol.Listening(4711))
    play.hear(0, protocol.Reached("10.0.0.1"))
    play.hear(1, protocol.Reached("10.0.0.2", "timed out"))
    assert "host b cannot reach 10.0.0.1 port 4711, where the group would meet on host a: timed out" in (
        play.course.outcome.why
    )
    assert play.did == [Disconnect(1), Disconnect(0)]


def test_a_first_host_that_does_not_listen_in_time() -> None:
    play = Play()
    play.greet(0)
    play.greet(1)
    for _ in range(2):
        play.answer(0)
        play.answer(1)
        assert play.wait(7.4) == []
    play.wait(0.3)
    assert play.course.outcome.why == "host a has not answered within 15 s"
    assert play.did == [Disconnect(0), Disconnect(1)]


def test_a_first_host_that_is_lost_before_it_listens() -> None:
    play = Play()
    play.greet(0)
    play.greet(1)
    assert play.drop(0, "the connection to a is gone") == [Disconnect(1)]
    assert play.course.outcome.why == "the connection to a is gone"


def test_a_steward_that_talks_like_a_launcher() -> None:
    play = Play((Host("a"),))
    play.hear(0, protocol.Grant(1))
    assert "said what only a launcher says" in play.course.outcome.why


# Workers that end.


def test_all_workers_end_with_success() -> None:
    play = Play().run()
    for rank in range(4):
        play.end(rank)
        assert len(play.sent(protocol.News)) == 2
    assert not play.course.done
    play.over(0, 1, 2, 3)
    assert play.did == [Disconnect(0), Disconnect(1)]
    assert play.course.outcome == Outcome(0)


def test_the_first_failure_stops_the_rest_on_all_hosts() -> None:
    play = Play().run()
    play.end(2, 3)
    news = protocol.News("process2.0", "exited with code 3 on host b", False)
    assert [message for _, message in play.sent(protocol.News)] == [news, news]
    assert play.sent(protocol.Stop) == [(host, protocol.Stop(signal.SIGTERM, 5.0)) for host in (0, 1)]
    for rank in (0, 1, 3):
        play.end(rank, -15)
        assert play.sent(protocol.Stop) == []
    play.over(0, 1, 2, 3)
    assert play.course.outcome.code == 3
    assert play.course.outcome.report == "worker2 exited with code 3 on host b; the other workers were stopped"


def test_a_restart_waits_for_the_process_group_and_is_told_to_all() -> None:
    play = Play(restarts=1).run()
    play.end(2, -9)
    assert "worker2 was killed by signal 9 on host b; it is restarted, and 0 restarts are left" in play.said
    news = protocol.News("process2.0", "was killed by signal 9 on host b", True)
    assert play.sent(protocol.News) == [(0, news), (1, news)]
    assert play.sent(protocol.Start) == []
    play.over(2)
    ((host, start),) = play.sent(protocol.Start)
    assert isinstance(start, protocol.Start)
    assert (host, start.rank, start.environment["BACKHAUL_RESTARTS"]) == (1, 2, "1")
    play.started(2, times=1)
    play.end(3, 5)  # no restart is left
    assert play.sent(protocol.Stop)
    assert play.course.outcome.code == 5


def test_with_rejoin_the_others_go_on() -> None:
    play = Play(rejoin=True).run()
    play.end(2, 3)
    assert play.sent(protocol.Stop) == []
    assert play.said == "worker2 exited with code 3 on host b; the other workers go on"
    play.over(2)
    for rank in (0, 1, 3):
        play.end(rank)
        play.over(rank)
    assert play.course.done
    assert play.course.outcome == Outcome(3, "worker2 exited with code 3 on host b", stopped=False)


def test_a_failure_that_a_restart_repaired_does_not_count() -> None:
    play = Play(restarts=1, rejoin=True).run()
    play.end(2, 3)
    play.over(2)
    for rank in range(4):
        play.end(rank)
        play.over(rank)
    assert play.course.outcome == Outcome(0)


def test_a_worker_that_is_not_restarted_since_all_stop() -> None:
    play = Play(restarts=5).run()
    play.end(2, 3)
    play.stop(signal.SIGINT)
    play.over(2)
    assert play.sent(protocol.Start) == []
    for rank in (0, 1, 3):
        play.end(rank, -2)
    play.over(0, 1, 3)
    assert play.course.outcome == Outcome(130, signum=signal.SIGINT)


# Signals.


def test_a_signal_is_passed_on_and_a_second_one_kills() -> None:
    play = Play().run()
    play.stop(signal.SIGINT)
    assert play.sent(protocol.Stop) == [(host, protocol.Stop(signal.SIGINT, 5.0)) for host in (0, 1)]
    play.stop(signal.SIGTERM)
    assert play.sent(protocol.Stop) == [(host, protocol.Stop(signal.SIGKILL, 0.0)) for host in (0, 1)]
    assert play.course.outcome.report == "stopped by SIGINT"
    assert play.course.next_time() <= play.now + 5.0


def test_a_signal_for_the_program_stops_nothing() -> None:
    play = Play()
    play.greet(0)
    assert play.pass_on(signal.SIGUSR1) == []  # there is no worker yet
    play = Play().run()
    for _ in range(2):
        play.pass_on(signal.SIGUSR1)
        assert play.did == [Send(host, protocol.Signal(signal.SIGUSR1)) for host in (0, 1)]
    assert play.course.phase == "running"
    play.stop(signal.SIGTERM)
    assert play.sent(protocol.Stop) == [(host, protocol.Stop(signal.SIGTERM, 5.0)) for host in (0, 1)]


def test_a_signal_before_the_workers_ends_all() -> None:
    play = Play()
    play.greet(0)
    assert play.stop(signal.SIGTERM) == [Disconnect(0), Disconnect(1)]
    assert play.course.done
    assert play.course.outcome.code == 143


def test_a_host_that_does_not_stop_is_left_to_its_lease() -> None:
    play = Play().run()
    play.stop(signal.SIGTERM)
    for rank in (0, 1):
        play.end(rank, -15)
        play.over(rank)
    assert play.wait(9.0) == []
    assert play.wait(1.0) == [Disconnect(0), Disconnect(1)]
    assert play.course.done


# Hosts that vanish.


def test_a_host_that_is_silent_is_doubted_and_then_lost() -> None:
    play = Play().run()
    play.wait(4.0)
    assert play.answer(0) == [Send(0, protocol.Grant(1))]
    play.wait(1.0)
    assert play.said == "host b has not answered for 5 s; it counts as lost after 10 s (--host-timeout)"
    assert play.wait(0.5) == []
    play.answer(1)
    assert play.said == "host b answers again"
    for _ in range(3):
        play.wait(3.5)
        play.answer(0)
    assert play.course.phase == "running"
    assert play.course.next_time() == 1005.5 + 12.0  # the lease, and time for the killing
    play.wait(1.5)
    assert play.did[0] == Disconnect(1)
    assert play.sent(protocol.Stop) == [(0, protocol.Stop(signal.SIGTERM, 5.0))]
    play.end(0, -15)
    play.end(1, -15)
    play.over(0, 1)
    assert play.course.outcome.report == "host b has not answered for 12 s; the other workers were stopped"
    assert play.course.outcome.code == 255


def test_a_connection_that_ends_stops_the_rest() -> None:
    play = Play().run()
    play.drop(1, "the connection with host b has ended")
    assert play.sent(protocol.Stop) == [(0, protocol.Stop(signal.SIGTERM, 5.0))]
    play.end(0, -15)
    play.end(1, 0)
    play.over(0, 1)
    assert play.course.done
    assert play.course.outcome.report == "the connection with host b has ended; the other workers were stopped"


def test_a_connection_that_ends_while_all_stop() -> None:
    play = Play().run()
    play.stop(signal.SIGTERM)
    play.drop(1)
    play.end(0, -15)
    play.end(1, -15)
    play.over(0, 1)
    assert play.course.done
    assert play.course.outcome.code == 143


def test_with_rejoin_a_lost_host_comes_back() -> None:
    play = Play(restarts=2, rejoin=True).run()
    play.drop(1, "the connection with host b has ended")
    assert play.sent(protocol.News) == []  # its workers may still run
    assert "count as lost once their lease is over" in play.said
    play.wait(11.9)
    play.answer(0)
    assert play.course.next_time() == 1012.0
    play.wait(0.1)
    how = "was lost with host b, which has not answered for 12 s"
    news = [(0, protocol.News(f"process{rank}.0", how, True)) for rank in (2, 3)]
    assert play.sent(protocol.News) == news
    assert f"worker3 {how}; it is restarted, and 0 restarts are left" in play.said
    assert play.wait(1.0) == [Connect(1)]
    play.drop(1, "host b: no route")
    assert play.said == "host b: no route\ntrying host b again"
    assert play.wait(1.9) == []
    assert play.wait(0.1) == [Connect(1)]
    assert play.drop(1, "host b: no route") == []  # reported only once
    play.answer(0)
    assert play.wait(4.0) == [Connect(1)]
    play.answer(0)
    play.greet(1)
    assert play.did[-1] == Send(1, protocol.Reach("10.0.0.1", 4711, 5.0))
    play.hear(1, protocol.Reached("10.0.0.2", "Connection refused"))  # the store may be gone, but the route works
    assert play.said == "host b is back"
    starts = [message for _, message in play.sent(protocol.Start) if isinstance(message, protocol.Start)]
    assert [(start.rank, start.environment["BACKHAUL_RESTARTS"]) for start in starts] == [(2, "1"), (3, "1")]
    for rank in range(4):
        play.end(rank)
        play.over(rank)
    assert play.course.outcome == Outcome(0)


def test_with_rejoin_and_no_restarts_a_lost_host_is_gone_for_good() -> None:
    play = Play(rejoin=True).run()
    for _ in range(3):
        play.wait(4.0)
        play.answer(0)
    assert play.course.phase == "running"
    assert play.wait(60.0) != [Connect(1)]
    play = Play(rejoin=True).run()
    play.drop(1)
    for _ in range(3):
        play.answer(0)
        play.wait(4.0)
    for rank in (0, 1):
        play.end(rank)
        play.over(rank)
    assert play.course.done
    assert play.course.outcome.code == 255
    assert play.course.outcome.why == "worker2 was lost with host b, which has not answered for 12 s"


def test_an_absent_host_is_not_waited_for_once_all_others_have_ended() -> None:
    play = Play(restarts=9, rejoin=True).run()
    play.drop(1)
    play.answer(0)
    play.wait(12.0)
    for rank in (0, 1):
        play.end(rank)
        play.over(rank)
    assert play.course.done
    assert play.course.outcome.code == 255


def test_a_host_that_is_lost_while_the_others_get_ready() -> None:
    play = Play(rejoin=True)
    play.greet(0)
    play.greet(1)
    play.hear(0, protocol.Listening(4711))
    play.hear(1, protocol.Reached("10.0.0.2"))
    play.drop(1)
    play.wait(12.0)
    assert play.course.done
    assert play.course.outcome.code == 255
