"""Networks that lose everything for a while, both ways or one way: a short silence is not a death, and all heals."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any, NamedTuple

import baseline
import load
import pytest
import torch
from measuring import Measure
from network import Hosts, needs_hosts
from switch import Pair, both

pytestmark = [needs_hosts, pytest.mark.timeout(600)]

HEALED_WITHIN = 10.0
REFERENCES = 20
LARGE = 16 << 20  # elements of 4 bytes: 64 MiB
_SLOWLY = 20e6


class Scene(NamedTuple):
    """Two hosts, the ways between them that are cut, and whether a large tensor is on its way from the first."""

    hosts: tuple[int, int]
    cut: list[Pair]
    busy: bool = False

    @property
    def name(self) -> str:
        lost = "both ways" if len(self.cut) == 2 else "one way" if self.cut == [self.hosts] else "the way back"
        return f"{lost}, {'64 MiB in flight' if self.busy else 'idle'}"


ALL = [
    Scene((0, 1), both(0, 1)),
    Scene((2, 3), [(2, 3)]),
    Scene((4, 5), both(4, 5), busy=True),
    Scene((6, 7), [(6, 7)], busy=True),
    Scene((8, 9), [(9, 8)], busy=True),
]


def run_scenes(scenes: list[Scene], seconds: float, measure: Measure, *, dies: bool) -> None:
    """Cut, wait, heal. Afterwards calls work in both directions, and no reference is lost. ``dies``: calls may fail."""
    assert len({scene.name for scene in scenes}) == len(scenes)  # large tensors are looked up by the scene's name
    with Hosts(max(max(scene.hosts) for scene in scenes) + 1) as hosts:
        for a, b in (scene.hosts for scene in scenes):
            hosts[a].run(load.hold, f"worker{b}", REFERENCES)
            hosts[b].run(load.hold, f"worker{a}", REFERENCES)
            hosts[a].run(baseline.note)
            hosts[b].run(baseline.note)
        sending: dict[str, Future[Any]] = {}
        for scene in scenes:
            if scene.busy:
                a, b = scene.hosts
                hosts.switch.change([(a, b)], rate=_SLOWLY)
                carried = hosts.switch.counts().get("carried", 0)
                sending[scene.name] = hosts[a].start(load.send_large, f"worker{b}", LARGE)
                while hosts.switch.counts()["carried"] < carried + 100:
                    time.sleep(0.01)
        for scene in scenes:
            hosts.switch.change(scene.cut, cut=True)
        time.sleep(seconds)
        hosts.switch.heal()
        healed = time.monotonic()
        for scene in scenes:
            check_healed(hosts, scene, healed, sending.get(scene.name), measure, dies=dies)


def check_healed(
    hosts: Hosts, scene: Scene, healed: float, sending: Future[Any] | None, measure: Measure, *, dies: bool
) -> None:
    a, b = scene.hosts
    if sending is not None:
        found = sending.result(90)
        assert dies or not found.error, f"{scene.name}: {found}"
        assert not found.error or found.worker == f"worker{b}", f"{scene.name}: {found}"
        measure.note(f"{scene.name}: the tensor {'failed' if found.error else 'arrived'}")
    start = time.monotonic()
    hosts[b].run(load.call_until_good, f"worker{a}", HEALED_WITHIN)
    hosts[a].run(load.call_until_good, f"worker{b}", HEALED_WITHIN)
    measure.seconds(f"{scene.name}: calls after", time.monotonic() - start, within=HEALED_WITHIN)
    numbers = list(range(REFERENCES))
    assert hosts[a].run(load.read_all) == numbers, scene.name
    assert hosts[b].run(load.read_all) == numbers, scene.name
    baseline.await_all_back(hosts, scene.hosts)
    for rank in scene.hosts:
        hosts[rank].run(load.let_go)
    for rank in scene.hosts:
        hosts[rank].run(load.await_values, 0, 10.0)


@pytest.mark.fault("silent loss both ways for 3 s, idle", "no false death; calls and references work after healing")
def test_silence_of_3_seconds_when_idle(measure: Measure) -> None:
    run_scenes(ALL[:1], 3.0, measure, dies=False)


@pytest.mark.slow
@pytest.mark.fault("silent loss for 3 s, all kinds", "no false death: the 64 MiB arrive, references stay")
def test_silence_of_3_seconds(measure: Measure) -> None:
    run_scenes(ALL, 3.0, measure, dies=False)


@pytest.mark.slow
@pytest.mark.fault("silent loss for 30 s, all kinds", "calls and references work 10 s after healing")
def test_silence_of_30_seconds(measure: Measure) -> None:
    run_scenes(ALL, 30.0, measure, dies=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault("silent loss for 5 min, all kinds", "calls and references work 10 s after healing")
def test_silence_of_5_minutes(measure: Measure) -> None:
    run_scenes(ALL, 300.0, measure, dies=True)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [both(0, 1), [(0, 1)], [(1, 0)]], ids=["both", "requests", "replies"])
@pytest.mark.fault("silent loss with a call under way", "the call fails with the worker's name within 10 s")
def test_silence_is_noticed_in_a_call(measure: Measure, cut: list[Pair]) -> None:
    with Hosts(2) as hosts:
        baseline.note_all(hosts)
        running = hosts[0].start(load.call_within, 0, "worker1", load.block, "under way")
        hosts[1].run(load.await_entered, "under way")
        cut_at = time.time()
        hosts.switch.change(cut, cut=True)
        found = running.result(60)
        assert found.worker == "worker1", found
        measure.seconds("heard after", found.at - cut_at, within=10.0)
        hosts.switch.heal()
        hosts[1].run(load.open_gate, "under way")
        hosts[0].run(load.call_until_good, "worker1", HEALED_WITHIN)
        assert hosts[1].run(load.runs)["under way"] == 1
        baseline.await_all_back(hosts)


@pytest.mark.slow
def test_the_switch_cuts_one_way_only() -> None:
    """A test of the switch, on which the tests above rely."""
    with Hosts(2) as hosts:
        assert not hosts[0].run(load.call, "worker1", load.who).error
        hosts.switch.change([(1, 0)], cut=True)
        found = hosts[0].start(load.call_within, 2.0, "worker1", load.once, "x", torch.zeros(1)).result(30)
        assert found.error.startswith("RpcTimeoutError"), found
        hosts[1].run(load.await_runs, "x", 1)
        hosts.switch.heal()
