"""Fixtures: a group for each transport, and for each that has sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport_group import Group


@pytest.fixture(params=["memory", "unix", "tcp"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    made.close()


@pytest.fixture(params=["unix", "tcp"])
def sockets(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    made.close()
