"""What `backhaul top` shows, and what its keys do. Pure."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from backhaul.seeing.screen import Screen, clean, number, seconds, size
from backhaul.seeing.stuck import explain
from backhaul.seeing.top import keys_of
from backhaul.seeing.view import Row


def row(name: str, rank: int, **more: Any) -> Row:
    return Row(name, rank, more.pop("state", "live"), **more)


ROWS = [
    row("a", 0, calls_sent=5, memory=2000, running=[{"what": "m.f", "peer": "b", "seconds": 2.0}]),
    row("b", 1, calls_sent=90, memory=1000, gates=3),
    row("c", 2, state="lost", since=0.0, reason="gone", bytes_sent=7),
]


def text(screen: Screen, rows: list[Row] = ROWS, detail: Any = None, height: int | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(screen.draw(rows, detail, height))
    return out.getvalue()


@pytest.mark.parametrize(
    ("wait", "shown"),
    [
        ({"kind": "reply", "what": "m.f", "peer": "b"}, "waits: m.f"),
        ({"kind": "gate", "peer": "b"}, "waits: gate"),
        ({"kind": "value", "ref": "1/2"}, "waits: the value 1/2"),
        ({"kind": "connection", "peer": "b"}, "waits: a connection to b"),
        ({"kind": "room", "peer": "b", "bytes": 4096}, "waits: b to take 4.0 KiB"),
    ],
)
def test_a_worker_that_waits_is_not_idle(wait: dict[str, Any], shown: str) -> None:
    assert shown in text(Screen(), [row("a", 0, waiting=[wait])])


def test_all_workers_are_shown() -> None:
    shown = text(Screen())
    assert "3 workers, 1 lost" in shown
    assert "m.f 2.0 s, from b" in shown
    assert "lost since" in shown
    assert "gone" in shown


@pytest.mark.parametrize(
    ("key", "order"), [("n", "abc"), ("c", "bac"), ("b", "cab"), ("m", "abc"), ("r", "abc"), ("p", "abc")]
)
def test_keys_sort(key: str, order: str) -> None:
    screen = Screen()
    screen.press(key, ROWS)
    assert "".join(each.name for each in screen.sorted(ROWS)) == order


def test_arrows_and_enter_open_a_worker_and_escape_goes_back() -> None:
    screen = Screen("calls")
    for key in ("down", "down", "enter"):
        screen.press(key, ROWS)
    assert (screen.mode, screen.selected) == ("worker", "a")
    screen.press("escape", ROWS)
    assert screen.mode == "workers"
    screen.press("up", ROWS)
    assert screen.selected == "b"


def test_a_number_and_enter_open_a_worker() -> None:
    screen = Screen("calls")
    for key in ("3", "enter"):
        screen.press(key, ROWS)
    assert (screen.mode, screen.selected) == ("worker", "c")


def test_a_number_that_is_too_high_opens_nothing() -> None:
    screen = Screen()
    for key in ("9", "enter"):
        screen.press(key, ROWS)
    assert screen.mode == "workers"


def test_q_quits_in_every_view() -> None:
    for before in ("", "s", "enter"):
        screen = Screen()
        if before:
            screen.press(before, ROWS)
        screen.press("q", ROWS)
        assert screen.over


def test_the_threads_of_a_worker() -> None:
    frames = [
        {"file": "/lib/threading.py", "line": 1, "function": "bootstrap", "code": "", "whose": "installed"},
        {"file": "/me/x.py", "line": 7, "function": "step", "code": "go()", "whose": "user"},
    ]
    handled = {"kind": "Call", "what": "m.step", "peer": "b", "seconds": 3.0}
    threads = [
        {"name": "pool", "handles": [handled], "waits": [], "stack": frames},
        {"name": "looks", "handles": [{**handled, "kind": "Inspect"}], "waits": [], "stack": frames},
    ]
    screen = Screen()
    screen.press("enter", ROWS)
    assert "asking" in text(screen)
    shown = text(screen, detail=threads)
    assert "handles m.step for b 3.0 s" in shown
    assert "step  /me/x.py:7  go()" in shown
    assert "bootstrap" not in shown
    assert "looks" not in shown
    for _ in range(3):
        screen.press("down", ROWS)
    assert "handles" not in text(screen, detail=threads)
    screen.press("s", ROWS)
    assert screen.mode == "stuck"


def test_the_stuck_view() -> None:
    screen = Screen()
    screen.press("s", ROWS)
    assert "asking all workers" in text(screen)
    assert "c: gone" in text(screen, detail=explain({"c": {"error": "gone", "lost": True}}))


def test_names_cannot_steer_the_terminal() -> None:
    evil = row("x\x1b[2J", 0, running=[{"what": "f\x07\x1b]0;", "peer": "p\n", "seconds": 1.0}])
    shown = text(Screen(), [evil])
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert clean("a\tb") == "a\N{REPLACEMENT CHARACTER}b"


def test_a_narrow_terminal_has_fewer_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(Screen().draw([row("worker0", 0, calls_sent=5)], None, width=80))
    assert "worker0" in out.getvalue()
    assert "calls/s →" in out.getvalue()
    assert "refs" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_the_screen_never_exceeds_its_height() -> None:
    threads = [{"name": f"t{n}", "handles": [], "waits": [], "stack": []} for n in range(100)]
    screen = Screen()
    screen.press("enter", ROWS)
    assert "t40" not in text(screen, detail=threads, height=20)


def test_numbers_for_people() -> None:
    assert [number(value) for value in (0, 0.5, 12.3, 1234, 5.6e6)] == ["0", "0.5", "12", "1.2k", "5.6M"]
    assert [size(value) for value in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
    assert [seconds(value) for value in (0.0123, 1.25, 240, 7200)] == ["12 ms", "1.2 s", "4 min", "2.0 h"]


def test_keys_that_terminals_send() -> None:
    assert keys_of("c\x1b[A\x1b[B\r12\x1b\x1b[5~") == ["c", "up", "down", "enter", "1", "2", "escape", "page up"]
