"""One flipped bit on the way: the connection ends or the frame is refused, and no value is wrong."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import load
import pytest
import torch
from measuring import Measure
from network import Hosts, needs_hosts
from relay import Relay

from backhaul import rpc
from backhaul.worker import current
from crew import Crew

pytestmark = pytest.mark.timeout(600)

SIZE = 16  # the elements of a tensor that is sent and comes back
_REFUSED = (rpc.BackhaulError, TypeError, ValueError, RuntimeError, AttributeError, LookupError)


def there_and_back(x: torch.Tensor, number: int) -> tuple[torch.Tensor, int]:
    load.note_run(f"flip {number}")
    return x, number


def try_call(to: str, number: int) -> str:
    """The outcome of a call: None, the error's type, or "wrong"."""
    x = torch.arange(SIZE) + number
    try:
        back, same = rpc.rpc_sync(to, there_and_back, args=(x, number), timeout=1.0)
    except _REFUSED as error:
        return type(error).__name__
    right = torch.equal(back, x) and back.dtype == x.dtype and same == number
    return "" if right else "wrong"


def socket_path() -> str:
    path = current().agent.transport.addresses.unix
    assert path is not None
    return str(path)


def drop_connections() -> None:
    for line in current().agent.calling():
        line.lose(rpc.WorkerLostError("the test starts again", line.peer.name))


class Outcomes(dict[str, int]):
    def note(self, found: str) -> None:
        key = found or "as sent"
        self[key] = self.get(key, 0) + 1

    def __str__(self) -> str:
        return ", ".join(f"{count} {key}" for key, count in sorted(self.items()))


def flip_over_tls(runs: int, measure: Measure) -> None:
    chance = random.Random(runs)
    outcomes = Outcomes()
    with Hosts(2, mtu=1500) as hosts:
        hosts[0].run(load.call_until_good, "worker1", 20.0)
        for number in range(runs):
            pair = chance.choice([(0, 1), (1, 0)])
            hosts.switch.flip(pair, chance.randrange(1 << 16))
            found = hosts[0].run(try_call, "worker1", number)
            assert found != "wrong", f"run {number}: a wrong value"
            outcomes.note(found)
            while hosts.switch.counts().get("flipped", 0) <= number:  # no packet with data has come yet
                hosts[0].run(try_call, "worker1", number)
            # Longer than the allowed silence: see the test of lengths.
            hosts[0].run(load.call_until_good, "worker1", 50.0)
    measure.note(f"{runs} flips: {outcomes}")
    assert outcomes.get("as sent", 0) < runs / 2, "the flips have no effect"


@pytest.mark.slow
@needs_hosts
@pytest.mark.fault("one flipped bit in transit over TLS, 1,000 runs", "the link dies or the frame is refused")
def test_a_flipped_bit_over_tls(measure: Measure) -> None:
    flip_over_tls(1000, measure)


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("pair", [(0, 1), (1, 0)], ids=["request", "reply"])
@pytest.mark.fault("a flipped bit in the length of a TLS record", "the link dies as if the peer were silent")
def test_a_flipped_bit_in_a_length_over_tls(pair: tuple[int, int], measure: Measure) -> None:
    """The receiver waits for 8 KiB that are never sent, and swallows everything that comes meanwhile."""
    # The timeouts of the calls are shorter than the intervals at which a waiting thread checks its peer.
    with Hosts(2, mtu=1500, unresponsive_after=8.0) as hosts:
        hosts[0].run(load.call_until_good, "worker1", 20.0)
        hosts.switch.flip(pair, 8 * 3 + 5)  # the first byte of the length
        begun = time.monotonic()
        while found := hosts[0].run(try_call, "worker1", 1):
            assert found in ("RpcTimeoutError", "WorkerLostError", "WorkerUnresponsiveError"), found
            assert time.monotonic() - begun < 40, "no call works any more"
        measure.seconds("calls work after", time.monotonic() - begun, within=30.0)


@pytest.mark.slow
@pytest.mark.fault("one flipped bit in transit over a unix socket, 1,000 runs", "the link dies or the frame is refused")
def test_a_flipped_bit_over_unix(measure: Measure) -> None:
    flip_over_unix(1000, measure)


@pytest.mark.fault("one flipped bit in transit over a unix socket, 15 runs", "the link dies or the frame is refused")
def test_a_flipped_bit_over_unix_sampled(measure: Measure) -> None:
    flip_over_unix(15, measure)


def flip_over_unix(runs: int, measure: Measure) -> None:
    chance = random.Random(runs)
    outcomes = Outcomes()
    with Crew(2, transport="unix", segment_pool_bytes=1 << 20, checksum=True) as crew:
        relay = Relay(Path(crew[1].run(socket_path)))
        try:
            for number in range(runs):
                crew[0].run(load.call_until_good, "worker1", 20.0)
                relay.flip(chance.randrange(2), chance.randrange(8 * 300))
                found: Any = ""
                while not relay.flipped.is_set():
                    found = crew[0].run(try_call, "worker1", number)
                outcomes.note(found)
                if found not in ("", "wrong"):
                    crew[0].run(drop_connections)
            measure.note(f"{runs} flips: {outcomes}")
            assert not outcomes.get("wrong"), str(outcomes)
            assert outcomes.get("as sent", 0) < runs / 2, "the flips have no effect"
        finally:
            relay.close()
