"""The attacks of `attacks`, each for a moment instead of half a minute: the worker lives, and answers the good peer.

`make attacks` has the figures (how much slower the good peer is, memory, threads), because a moment says little about a
99th percentile. These tests assert only what a moment can show.
"""

from __future__ import annotations

import ssl

import pytest
from attacks import ATTACKS, ROOM, run
from intruder import Besieged

from backhaul.options import Quotas


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack(federation: Besieged, mine: ssl.SSLContext, name: str) -> None:
    figures = run(federation, mine, name, 0.25)
    assert figures.alive
    assert figures.calls >= 2
    assert figures.attacked < 5
    assert figures.grown < Quotas().message_bytes + ROOM
    assert figures.left == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_of_half_a_minute(federation: Besieged, mine: ssl.SSLContext, name: str) -> None:
    figures = run(federation, mine, name, 30)
    assert not figures.wrong, figures.line()
