"""Fixtures that several suites of attacks share. A worker takes seconds to start, and must survive all attacks."""

from __future__ import annotations

import secrets
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from intruder import Besieged
from mallory import ask_federation, give, hold, set_up_federation

from backhaul.options import RpcOptions
from backhaul.transport.stream import StreamTransport
from mint import Mint

SECRET = secrets.token_bytes(32)


@pytest.fixture(scope="session")
def besieged() -> Iterator[Besieged]:
    """A worker that processes of the same user reach by unix socket, and holders of the secret by TCP."""
    made = Besieged(lambda rank: {"secret": SECRET, "rpc_timeout": 60, "lost_after": 3})
    try:
        # The first TCP connection makes the worker import modules, so make one now.
        transport = StreamTransport(RpcOptions(secret=SECRET, transport="tcp"))
        transport.introduce("worker2")
        transport.connect(made.addresses, made.hello(), time.monotonic() + 30)[0].close()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def secret() -> bytes:
    return SECRET


@pytest.fixture(scope="session")
def certificates() -> Iterator[Mint]:
    with tempfile.TemporaryDirectory() as directory:
        yield Mint(Path(directory))


@pytest.fixture(scope="session")
def federation(certificates: Mint) -> Iterator[Besieged]:
    def options(rank: int) -> dict[str, Any]:
        return {"tls": certificates.tls(f"worker{rank}"), "trust": "federation"}

    made = Besieged(options, setup=set_up_federation, ask=ask_federation)
    try:
        # The first call back to a peer makes the attacked worker import modules. Let a good peer cause that.
        made.peer.run(hold)
        made.peer.run(give)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def mine(certificates: Mint) -> ssl.SSLContext:
    return certificates.tls("worker2").contexts()[1]
