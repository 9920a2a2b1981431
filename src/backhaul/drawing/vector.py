"""A laid out picture as SVG. Pure.

The document refers to nothing outside, has no styles or ids that could clash with others on a page, and escapes all
texts.
"""

from __future__ import annotations

from collections.abc import Iterator

from backhaul.drawing.layout import LINE, MARGIN, PAD_Y, SMALL, TITLE, Layout, Path, Rect, lay_out
from backhaul.drawing.picture import Item, Kind, Lane, Picture, State
from backhaul.drawing.text import width, xml

FONT = "Helvetica, Arial, sans-serif"

FILLS: dict[Kind, tuple[str, str]] = {
    "module": ("#e3ecfb", "#4470b8"),
    "operations": ("#f1f2f4", "#8a919c"),
    "leaves": ("#fbf5dc", "#b3922e"),
    "more": ("#ffffff", "#8a919c"),
    "root": ("#e2f2e6", "#2f7d43"),
    "send": ("#ffffff", "#5b6472"),
    "recv": ("#ffffff", "#5b6472"),
}
STATES: dict[State, tuple[str, str]] = {
    "gate": ("#fff3da", "#c77d0a"),
    "waited": ("#ffdf9e", "#b86a00"),
    "waiting": ("#ffc766", "#b35900"),
    "failed": ("#fbdcdc", "#bb2525"),
}
"""Fill and border colours."""

INK = "#1c2430"
PALE = "#4d5766"
BAD = "#bb2525"
CARRIED = "#2f7d43"
INSIDE = "#9aa2ae"
LEGEND = [
    (PALE, False, "sent"),
    (CARRIED, True, "sent, and gradients came back"),
]
_LEGEND_HEIGHT = 20.0
_HEAD = 7.0


def render(picture: Picture) -> str:
    """The picture as an SVG document, in our own layout."""
    layout = lay_out(picture)
    return "\n".join(_document(picture, layout)) + "\n"


def colours(item: Item) -> tuple[str, str]:
    """Fill and border of an item."""
    return STATES[item.state] if item.state else FILLS[item.kind]


def _document(picture: Picture, layout: Layout) -> Iterator[str]:
    messages = any(arrow.message for arrow in picture.arrows)
    wide, high = layout.width, layout.height + (_LEGEND_HEIGHT if messages else 0.0)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high:.0f}" '
        f'viewBox="0 0 {wide:.0f} {high:.0f}" font-family="{FONT}" role="img">'
    )
    yield f"<title>{xml(picture.title)}</title>"
    yield f'<rect width="{wide:.0f}" height="{high:.0f}" fill="#ffffff"/>'
    yield _text(MARGIN, MARGIN + TITLE, picture.title, TITLE, bold=True)
    for number, line in enumerate(picture.lines, 1):
        colour = BAD if picture.failed and number == 1 else PALE
        yield _text(MARGIN, MARGIN + TITLE + number * LINE, line, SMALL, colour=colour)
    for lane, rect in zip(picture.lanes, layout.lanes, strict=True):
        yield from _lane(lane, rect)
    for path in layout.paths:
        yield _arrow(path)
    for item, rect in zip(picture.items, layout.items, strict=True):
        yield from _item(item, rect)
    if messages:
        yield from _legend(MARGIN, layout.height - MARGIN / 2 + 8.0)
    yield "</svg>"


def _lane(lane: Lane, rect: Rect) -> Iterator[str]:
    dashes = "" if lane.answered else ' stroke-dasharray="6 4"'
    stroke = BAD if lane.failed else "#b9c0cb"
    yield (
        f'<rect class="lane" x="{rect.x:.1f}" y="{rect.y:.1f}" width="{rect.width:.1f}" height="{rect.height:.1f}" '
        f'rx="8" fill="#f8f9fb" stroke="{stroke}"{dashes}/>'
    )
    yield _text(rect.middle, rect.y + 8 + TITLE, lane.name, TITLE, bold=True, anchor="middle")
    for number, line in enumerate(lane.lines, 1):
        bad = lane.failed or not lane.answered
        yield _text(
            rect.middle, rect.y + 8 + TITLE + number * LINE, line, SMALL, colour=BAD if bad else PALE, anchor="middle"
        )


def _item(item: Item, rect: Rect) -> Iterator[str]:
    fill, stroke = colours(item)
    round = rect.height / 2 if item.kind in ("send", "recv", "root") else 4.0
    thick = 2 if item.state else 1
    dashes = ' stroke-dasharray="4 3"' if item.kind == "more" else ""
    yield "<g>"
    yield f"<title>{xml(item.tip)}</title>"
    yield (
        f'<rect class="item" x="{rect.x:.1f}" y="{rect.y:.1f}" width="{rect.width:.1f}" height="{rect.height:.1f}" '
        f'rx="{min(round, 16.0):.1f}" fill="{fill}" stroke="{stroke}" stroke-width="{thick}"{dashes}/>'
    )
    y = rect.y + PAD_Y + LINE - 3.5
    yield _text(rect.middle, y, item.title, TITLE, bold=True, anchor="middle")
    for number, line in enumerate(item.lines, 1):
        yield _text(rect.middle, y + number * LINE, line, SMALL, colour=PALE, anchor="middle")
    yield "</g>"


def _arrow(path: Path) -> str:
    arrow = path.arrow
    colour = INSIDE if not arrow.message else CARRIED if arrow.carried else PALE
    thick = 1.6 if arrow.message else 1.2
    points = path.points
    (x, y), (end_x, end_y) = points[0], points[-1]
    down = 1.0 if end_y > y else -1.0
    parts = [f"M{x:.1f} {y + (down * _HEAD if arrow.carried else 0.0):.1f}"]
    for number in range(1, len(points)):
        (x0, y0), (x1, y1) = points[number - 1], points[number]
        if number == len(points) - 1:
            y1 -= down * _HEAD
        bend = (y1 - y0) * 0.55
        if x0 == x1:
            parts.append(f"L{x1:.1f} {y1:.1f}")
        else:
            parts.append(f"C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}")
    heads = _head(end_x, end_y, down, colour)
    if arrow.carried:
        heads += _head(x, y, -down, colour)
    tip = f"<title>{xml(arrow.tip)}</title>" if arrow.tip else ""
    kind = "message" if arrow.message else "inside"
    line = f'<path class="{kind}" d="{" ".join(parts)}" fill="none" stroke="{colour}" stroke-width="{thick}"/>'
    return f"<g>{tip}{line}{heads}</g>"


def _head(x: float, y: float, down: float, colour: str) -> str:
    back = y - down * _HEAD
    return f'<path d="M{x:.1f} {y:.1f} L{x - 3.6:.1f} {back:.1f} L{x + 3.6:.1f} {back:.1f} Z" fill="{colour}"/>'


def _legend(x: float, y: float) -> Iterator[str]:
    for colour, both, meaning in LEGEND:
        yield f'<path d="M{x + 6:.1f} {y:.1f} H{x + 30:.1f}" stroke="{colour}" stroke-width="1.6"/>'
        yield _sideways(x + 36, y, 1.0, colour)
        if both:
            yield _sideways(x, y, -1.0, colour)
        yield _text(x + 44, y + 4, meaning, SMALL, colour=PALE)
        x += 44 + width(meaning, SMALL) + 24


def _sideways(x: float, y: float, way: float, colour: str) -> str:
    back = x - way * _HEAD
    return f'<path d="M{x:.1f} {y:.1f} L{back:.1f} {y - 3.6:.1f} L{back:.1f} {y + 3.6:.1f} Z" fill="{colour}"/>'


def _text(
    x: float, y: float, content: str, size: float, *, bold: bool = False, colour: str = INK, anchor: str = "start"
) -> str:
    if not content:
        return ""
    weight = ' font-weight="bold"' if bold else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{colour}"{weight}{place}>{xml(content)}</text>'
