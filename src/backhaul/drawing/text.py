"""Text in pictures: its width, and how to make it safe. Names come from users and may be anything. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from html import escape

TIMES = "\N{MULTIPLICATION SIGN}"

# Character widths of a sans-serif font, relative to its size. Real fonts are a little narrower.
_NARROW = dict.fromkeys("ijl.,:;'|!`", 0.31) | dict.fromkeys('frtI()[]{} -/\\"', 0.40)
_WIDE = dict.fromkeys("mwMW%@", 0.98) | dict.fromkeys("ABCDEFGHKNOPQRSTUVXYZ&<>=+" + TIMES, 0.74)
_WIDTHS = _NARROW | _WIDE
_USUAL = 0.60

_LONGEST = 60


def width(text: str, size: float, *, bold: bool = False) -> float:
    """The greatest possible width of a line of text, in pixels."""
    total = 0.0
    for character in text:
        if character.isascii() or character in _WIDTHS:
            total += _WIDTHS.get(character, _USUAL)
        else:
            total += 1.05 if unicodedata.east_asian_width(character) in "WF" else 0.80
    return total * size * (1.08 if bold else 1.0)


def line(text: str, longest: int = _LONGEST) -> str:
    """The text as one line of printable characters, truncated if long."""
    shown = "".join(character if character.isprintable() else _visible(character) for character in text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def paragraph(text: str) -> str:
    """The text in printable characters, with its line breaks."""
    return "\n".join(line(each, 200) for each in text.split("\n"))


def _visible(character: str) -> str:
    return "⏎" if character == "\n" else " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"


def xml(text: str) -> str:
    """Printable text for an XML document, inside elements and attributes."""
    return escape(text, quote=True)


def quoted(text: str, *, left: bool = False) -> str:
    """Printable text as a string of the DOT language, with its line breaks. Lines are centred, or left-aligned."""
    safe = text.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
    safe = safe.replace("\n", "\\l" if left else "\\n")
    return f'"{safe}"'


def shape(sizes: Sequence[int] | None) -> str:
    return "[?]" if sizes is None else f"[{', '.join(map(str, sizes))}]"


def amount(number: float, unit: str) -> str:
    """A number of bytes or things, with three digits."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5 or prefix == "T":
            digits = f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
            return f"{digits} {prefix}{unit}".rstrip()
        number /= 1000
    raise AssertionError


def duration(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= 0.9995 * size:
            return (
                f"{nanoseconds / size:.3g} {unit}" if nanoseconds < 999.5 * size else f"{nanoseconds / size:.0f} {unit}"
            )
    return f"{nanoseconds:.0f} ns"


def plural(count: int, noun: str) -> str:
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}".replace("leafs", "leaves")


def listed(names: Sequence[str], count: int, most: int) -> str:
    """The first of these names, and how many more there are of ``count`` in total."""
    shown = list(names[:most])
    more = count - len(shown)
    return ", ".join([*shown, f"+ {more:,} more"] if more > 0 else shown)
