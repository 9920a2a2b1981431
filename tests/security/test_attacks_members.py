"""What `attacks` does for half a minute each, for a moment: the worker lives, and the good peer is answered.

The figures (how much slower the good peer is, memory, threads) are those of `make attacks`: a moment says little of a
99th percentile. What is asserted here is what a moment can tell.
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
