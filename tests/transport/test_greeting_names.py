"""The name that a peer says must be one that its certificate is for, on both sides. Greetings without a socket."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from backhaul.errors import AuthenticationError
from backhaul.security import handshake
from backhaul.security.handshake import Hello, Welcome
from backhaul.transport.greeting import receive_visitor, visit

HELLO = Hello("group", 1, "worker1", 0)
WELCOME = Welcome(0, "worker0", fabric=HELLO.fabric)


class Line:
    """The peer's certificate is for ``names``, and it says ``data``."""

    def __init__(self, names: frozenset[str] | None, data: bytes) -> None:
        self._names = names
        self._data = data
        self.said: list[bytes] = []
        self.checks = False

    def open(self) -> Generator[str, None, frozenset[str] | None]:
        yield from ()
        return self._names

    def say(self, data: bytes) -> Generator[str, None, None]:
        yield from ()
        self.said.append(data)

    def hear(self, size: int) -> Generator[str, None, bytes]:
        yield from ()
        heard, self._data = self._data[:size], self._data[size:]
        return heard


def outcome(steps: Generator[Any, None, Any]) -> Any:
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value


@pytest.mark.parametrize("names", [None, frozenset({"worker0"}), frozenset({"worker0", "worker7"})])
def test_a_server_of_the_right_name(names: frozenset[str] | None) -> None:
    line: Any = Line(names, handshake.encode(WELCOME))
    assert outcome(visit(line, HELLO)).name == "worker0"


@pytest.mark.parametrize(("names", "listed"), [({"worker7"}, "'worker7'"), (set(), "nobody")])
def test_a_server_with_the_certificate_of_another(names: set[str], listed: str) -> None:
    line: Any = Line(frozenset(names), handshake.encode(WELCOME))
    with pytest.raises(AuthenticationError, match=f"says that it is 'worker0', and its certificate is for {listed}"):
        next(visit(line, HELLO))


@pytest.mark.parametrize("names", [None, frozenset({"worker1"})])
def test_a_visitor_of_the_right_name(names: frozenset[str] | None) -> None:
    line: Any = Line(names, handshake.encode(HELLO))
    assert outcome(receive_visitor(line, lambda hello: WELCOME, HELLO.fabric)).name == "worker1"


def test_a_visitor_with_the_certificate_of_another_is_not_even_judged() -> None:
    line: Any = Line(frozenset({"worker7"}), handshake.encode(HELLO))

    def judge(hello: Hello) -> Welcome:
        raise AssertionError("it was judged")

    with pytest.raises(AuthenticationError, match="says that it is 'worker1', and its certificate is for 'worker7'"):
        next(receive_visitor(line, judge, HELLO.fabric))
    assert len(line.said) == 1, "the visitor is told"
