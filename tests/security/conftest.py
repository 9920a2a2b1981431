"""Fixtures that several suites of attacks share: a worker takes seconds to start, and must survive all of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pytest
from intruder import Besieged

from backhaul.options import RpcOptions
from backhaul.transport.stream import StreamTransport

SECRET = secrets.token_bytes(32)


@pytest.fixture(scope="session")
def besieged() -> Iterator[Besieged]:
    """Reachable by unix socket, for processes of the same user, and by TCP, for who knows the secret."""
    made = Besieged(lambda rank: {"secret": SECRET, "rpc_timeout": 60, "lost_after": 3})
    try:
        # The first who comes by TCP has the worker load what it needs for that.
        transport = StreamTransport(RpcOptions(secret=SECRET, transport="tcp"))
        transport.introduce("worker2")
        transport.connect(made.addresses, made.hello(), time.monotonic() + 30)[0].close()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def secret() -> bytes:
    return SECRET
