"""Fixtures that the tests of calls share."""

from __future__ import annotations

import threading

import pytest
from callees import gates


@pytest.fixture
def gate() -> str:
    name = f"gate-{len(gates)}"
    gates[name] = threading.Event()
    return name
