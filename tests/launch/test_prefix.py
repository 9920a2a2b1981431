"""Lines stay whole, and bytes unchanged."""

from __future__ import annotations

import io

import pytest

from backhaul.launch.prefix import ERR, OUT, LinePrefixer, PrefixedOutput, prefix, wants_colour


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("chunks", "lines", "last"),
    [
        ([b"one\n"], b"> one\n", b""),
        ([b"one\ntwo\n"], b"> one\n> two\n", b""),
        ([b"on", b"e\nt", b"wo"], b"> one\n", b"> two\n"),
        ([b"\n\n"], b"> \n> \n", b""),
        ([b"\xff\x00\xfe\n"], b"> \xff\x00\xfe\n", b""),
        ([b"10%\r20%\r\n"], b"> 10%\r20%\r\n", b""),
        ([], b"", b""),
    ],
)
def test_lines(chunks: list[bytes], lines: bytes, last: bytes) -> None:
    prefixer = LinePrefixer(b"> ")
    assert b"".join(map(prefixer.feed, chunks)) == lines
    assert prefixer.finish() == last
    assert prefixer.finish() == b""


def test_an_endless_line_is_cut() -> None:
    prefixer = LinePrefixer(b"> ")
    out = b"".join(prefixer.feed(b"x" * 50_000) for _ in range(20)) + prefixer.finish()
    assert out.count(b"x") == 1_000_000
    assert max(map(len, out.split(b"\n"))) < 150_000


def test_two_workers_do_not_mix_their_lines() -> None:
    out: list[bytes] = []
    err: list[bytes] = []
    output = PrefixedOutput(out.append, err.append)
    output("a", 0, OUT, b"first half, ")
    output("b", 1, OUT, b"whole\n")
    output("b", 1, ERR, b"no end")
    output("a", 0, OUT, b"second half\n")
    output("b", 1, ERR, b"")
    assert b"".join(out) == b"[b] whole\n[a] first half, second half\n"
    assert b"".join(err) == b"[b] no end\n"


def test_a_stream_that_ends_unused_prints_nothing() -> None:
    out: list[bytes] = []
    output = PrefixedOutput(out.append, out.append)
    output("a", 0, OUT, b"")
    assert out == []


def test_colours() -> None:
    assert prefix("w", 0, colour=False) == b"[w] "
    assert prefix("w", 0, colour=True) == b"\x1b[36m[w] \x1b[0m"
    assert prefix("w", 1, colour=True) != prefix("w", 0, colour=True)
    assert prefix("w", 10, colour=True) == prefix("w", 0, colour=True)


def test_when_to_colour() -> None:
    assert wants_colour(Terminal(), {})
    assert not wants_colour(Terminal(), {"NO_COLOR": "1"})
    assert not wants_colour(Terminal(), {"TERM": "dumb"})
    assert not wants_colour(io.StringIO(), {})
