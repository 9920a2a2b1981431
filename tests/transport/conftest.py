"""Fixtures: a group for each transport, and one for each transport with sockets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transport_group import HELLO, Group, Made

from backhaul.options import HOST_VARIABLE, SECRET_VARIABLE, RpcOptions
from backhaul.security.keys import KEY_FILE_VARIABLE
from backhaul.transport.stream import StreamTransport


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (SECRET_VARIABLE, KEY_FILE_VARIABLE, HOST_VARIABLE, "MASTER_ADDR", "BACKHAUL_INIT_METHOD"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(params=["memory", "unix", "checked", "tcp", "plain"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    made.close()


@pytest.fixture(params=["unix", "tcp", "plain"])
def sockets(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    made.close()


@pytest.fixture
def make() -> Iterator[Made]:
    """Makes transports with sockets for a worker."""
    made: list[StreamTransport] = []

    def transport(name: str = HELLO.name, **options: Any) -> StreamTransport:
        made.append(StreamTransport(RpcOptions(**options)))
        made[-1].introduce(name)
        return made[-1]

    yield transport
    for each in made:
        each.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor
