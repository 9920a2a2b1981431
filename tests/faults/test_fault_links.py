"""Connections that are reset, hosts that are cut off in random order, links that are slow or lose packets."""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import Future

import baseline
import load
import pytest
import training
from measuring import Measure
from network import Hosts, address_of, needs_hosts
from switch import both

pytestmark = [needs_hosts, pytest.mark.timeout(300)]

REFERENCES = 20
NUMBERS = list(range(REFERENCES))


def reset_while_training(resets: int, longest_pause: float, measure: Measure) -> None:
    chance = random.Random(resets)
    with Hosts(3) as hosts:
        baseline.note_all(hosts)
        hosts[0].run(load.hold, "worker1", REFERENCES)
        hosts[2].run(load.hold, "worker0", REFERENCES)
        hosts[0].run(training.make_trainer, ["worker1", "worker2", "worker1"])
        hosts[0].run(training.train, 1, 60.0)
        hosts[0].run(training.start_training, 240.0)
        hosts[2].run(load.start_calls, ["worker0", "worker1"])
        for _ in range(resets):
            time.sleep(chance.random() * longest_pause)
            hosts.switch.reset()
        progress = hosts[0].run(training.stop_training, 100.0, timeout=45)
        assert not progress.error, progress
        assert progress.steps > 1, progress
        measure.note(f"{progress.steps} steps, {progress.failures} failed and were repeated")
        hosts[0].run(training.check_parameters)
        made = load.assert_sound(hosts[2].run(load.stop_calls), [hosts[rank].run(load.runs) for rank in (0, 1)])
        measure.note(f"{made} calls beside it")
        assert hosts[0].run(load.read_all) == NUMBERS
        assert hosts[2].run(load.read_all) == NUMBERS
        for hand in hosts:
            hand.run(load.let_go)
            hand.run(training.forget_trainers)
        baseline.await_all_back(hosts, seconds=20.0)


@pytest.mark.fault("TCP reset of all connections, 5 times", "every step right, or failed as a whole and repeated")
def test_resets_during_training_sampled(measure: Measure) -> None:
    reset_while_training(5, 0.2, measure)


@pytest.mark.slow
@pytest.mark.fault("TCP reset of all connections, 100 times", "every step right, or failed as a whole and repeated")
def test_100_resets_during_training(measure: Measure) -> None:
    reset_while_training(100, 0.5, measure)


@pytest.mark.slow
@pytest.mark.fault("TCP reset of everything for 0.3 s, with a call under way", "the call fails; no reference is lost")
def test_a_reset_that_lasts_keeps_references(measure: Measure) -> None:
    with Hosts(2) as hosts:
        hosts[0].run(load.hold, "worker1", REFERENCES)
        hosts[1].run(load.hold, "worker0", REFERENCES)
        running = hosts[0].start(load.call, "worker1", load.block, "under way")
        hosts[1].run(load.await_entered, "under way")
        reset_at = time.time()
        hosts.switch.change(refused=True)
        hosts.switch.reset()
        time.sleep(0.3)
        hosts.switch.heal()
        found = running.result(30)
        assert found.worker == "worker1", found
        measure.seconds("the call failed after", found.at - reset_at, within=2.0)
        hosts[1].run(load.open_gate, "under way")
        hosts[0].run(load.call_until_good, "worker1", 10.0)
        hosts[1].run(load.call_until_good, "worker0", 10.0)
        assert [hand.run(load.read_all) for hand in hosts] == [NUMBERS, NUMBERS]
        assert [hand.run(load.values) for hand in hosts] == [REFERENCES, REFERENCES]


def cut_at_random(cuts: int, longest: float, measure: Measure) -> None:
    """Four hosts. Each cut separates a host or a pair, in both directions or in one, and cuts overlap."""
    chance = random.Random(cuts)
    with Hosts(4) as hosts:
        names = [f"worker{rank}" for rank in range(4)]
        baseline.note_all(hosts)
        for rank, hand in enumerate(hosts):
            hand.run(load.hold, names[(rank + 1) % 4], REFERENCES)
            hand.run(load.start_calls, [name for name in names if name != names[rank]], 8, 0.005, 30.0)
        for _ in range(cuts):
            a, b = chance.sample(range(4), 2)
            ways = both(a, b) if chance.random() < 0.5 else [(a, b)]
            hosts.switch.change(ways, cut=True)
            time.sleep(chance.random() * longest)
            if chance.random() < 0.7:
                hosts.switch.change(ways, cut=False)
        hosts.switch.heal()
        healed = time.monotonic()
        books = [book for hand in hosts for book in hand.run(load.stop_calls, 40.0)]
        made = load.assert_sound(books, [hand.run(load.runs) for hand in hosts])
        for hand, name in zip(hosts, names, strict=True):
            for other in names:
                if other != name:
                    hand.run(load.call_until_good, other, 10.0)
        measure.seconds("all resolved and connected after", time.monotonic() - healed, within=10.0)
        failed = sum(len(book.failed) for book in books)
        measure.note(f"{made} calls, {failed} failed")
        for hand in hosts:
            assert hand.run(load.read_all) == NUMBERS
            hand.run(load.let_go)
        baseline.await_all_back(hosts, seconds=20.0)


@pytest.mark.slow
@pytest.mark.fault("four hosts cut and healed in random order, 50 times", "all resolves within 10 s after healing")
def test_four_hosts_cut_and_healed_at_random(measure: Measure) -> None:
    cut_at_random(50, 2.0, measure)


def send_slowly(elements: int, settle: float, measure: Measure) -> None:
    """A large tensor over 1 Mbit/s, and small calls beside it."""
    with Hosts(2, mtu=1500) as hosts:
        hosts[0].run(load.call, "worker1", load.who)
        hosts.switch.change(rate=125_000.0, queue=32 << 10)
        started = time.monotonic()
        hosts[0].run(load.start_large, "worker1", elements)
        time.sleep(settle)
        took = []
        while not hosts[0].run(load.large_done):
            took.append(hosts[0].run(load.time_call, "worker1", 60.0, timeout=90))
            time.sleep(0.2)
        assert not hosts[0].run(load.large_outcome).error
        measure.note(f"arrived after {time.monotonic() - started:.0f} s")
        measure.note(f"{len(took)} small calls, median {statistics.median(took):.2f} s")
        measure.seconds("the slowest small call took", max(took), within=1.0)


@pytest.mark.slow
@pytest.mark.fault("1 Mbit/s with 4 MiB", "the tensor arrives; small calls beside it take less than 1 s")
def test_a_link_of_1_mbit_sampled(measure: Measure) -> None:
    send_slowly(1 << 20, 2.0, measure)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault("1 Mbit/s with 64 MiB", "the tensor arrives; small calls beside it take less than 1 s")
def test_a_link_of_1_mbit(measure: Measure) -> None:
    send_slowly(16 << 20, 5.0, measure)


@pytest.mark.slow
@pytest.mark.fault("20 % of the packets are lost, at 100 ms", "no death: everything arrives")
def test_a_fifth_of_the_packets_lost(measure: Measure) -> None:
    """Each loss costs a timeout of TCP. So small calls are compared with bare echoes of a byte at the same time."""
    with Hosts(3, mtu=1500) as hosts:
        hosts[0].run(load.hold, "worker1", REFERENCES)
        baseline.note_all(hosts)
        hosts.switch.change(loss=0.2, delay=0.05)
        port = hosts[1].run(load.serve_echoes, address_of(1))
        bare: Future[list[float]] = hosts[2].start(load.time_echoes, address_of(1), port, 60.0)
        hosts[0].run(load.start_large, "worker1", 1 << 18)
        took = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            begun = time.monotonic()
            found = hosts[0].run(load.call_within, 60.0, "worker1", load.who, timeout=90)
            took.append(time.monotonic() - begun)
            assert not found.error, found
        quick = {}
        for what, times in (("calls", took), ("bare echoes", bare.result(90))):
            quick[what] = sum(seconds < 1.0 for seconds in times) / len(times)
            median, slowest = statistics.median(times), max(times)
            measure.note(f"{len(times)} {what}, median {median:.2f} s, slowest {slowest:.2f} s")
            measure.note(f"{quick[what]:.0%} of the {what} in less than 1 s")
        assert quick["calls"] > quick["bare echoes"] - 0.1
        hosts.switch.change(loss=0.0, delay=0.0)
        found = hosts[0].run(load.large_outcome, timeout=90)
        assert not found.error, found
        assert hosts[0].run(load.read_all) == NUMBERS
        baseline.await_all_back(hosts)


@pytest.mark.slow
@pytest.mark.fault("packets that overtake each other", "TCP puts them in order; no value is wrong")
def test_reordered_packets(measure: Measure) -> None:
    with Hosts(2, mtu=1500) as hosts:
        hosts[0].run(load.start_calls, ["worker1"], 20_000)
        hosts.switch.change(jitter=0.02)
        time.sleep(5.0)
        hosts.switch.heal()
        books = hosts[0].run(load.stop_calls)
        measure.note(f"{load.assert_sound(books, [hosts[1].run(load.runs)])} calls of 80 kB")
        assert not books[0].failed
