"""Layout: the positions of everything in a picture, without Graphviz. Pure.

Lanes stand side by side, and the forward pass goes down. All items are in *rows*, shared by all lanes, and every
arrow leads to a later row. An arrow across several rows has its own place in each row between, in the lane that it
leads to. So each piece of an arrow goes from one row to the next, where there are no boxes, and arrows cross no boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from backhaul.drawing.picture import Arrow, Item, Lane, Picture
from backhaul.drawing.text import width

TITLE = 13.0
SMALL = 11.0
LINE = 15.0
PAD_X = 10.0
PAD_Y = 7.0
MARGIN = 20.0

_SWEEPS = 6
_BETWEEN_ITEMS = 18.0
_BETWEEN_ROWS = 34.0
_MORE_FOR_MESSAGES = 14.0
_BETWEEN_LANES = 36.0
_LANE_PAD = 16.0
_BEND = 8.0
_NARROWEST = 60.0


class Rect(NamedTuple):
    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


class Path(NamedTuple):
    """The points of an arrow: first down from its tail, then from row to row."""

    arrow: Arrow
    points: Sequence[tuple[float, float]]


class Layout(NamedTuple):
    width: float
    height: float
    header: float
    """The height of the title."""
    lanes: Sequence[Rect]
    items: Sequence[Rect]
    paths: Sequence[Path]


class _Spot:
    """An item, or a bend of an arrow, in a row."""

    __slots__ = ("down", "item", "lane", "row", "up", "width", "x")

    def __init__(self, lane: int, row: int, width: float, item: int | None = None) -> None:
        self.lane, self.row, self.width, self.item = lane, row, width, item
        self.x = 0.0  # of its centre, from the left of its lane
        self.up: list[_Spot] = []
        self.down: list[_Spot] = []


def size(item: Item) -> tuple[float, float]:
    """The width and height of an item's box."""
    widest = max([width(item.title, TITLE, bold=True), *(width(each, SMALL) for each in item.lines)])
    return max(widest + 2 * PAD_X, _NARROWEST), LINE * (1 + len(item.lines)) + 2 * PAD_Y


def header_of(lane: Lane) -> tuple[float, float]:
    """The width and height of a lane's heading."""
    widest = max([width(lane.name, TITLE, bold=True), *(width(each, SMALL) for each in lane.lines)])
    return widest + 2 * _LANE_PAD, LINE * (1 + len(lane.lines)) + 14.0


def lay_out(picture: Picture) -> Layout:
    rows = _rows(picture)
    sizes = [size(item) for item in picture.items]
    spots = [_Spot(item.lane, rows[at], sizes[at][0], at) for at, item in enumerate(picture.items)]
    chains = [_chain(arrow, spots) for arrow in picture.arrows]
    table: dict[tuple[int, int], list[_Spot]] = {}  # by row and lane
    for spot in [*spots, *(bend for chain in chains for bend in chain if bend.item is None)]:
        table.setdefault((spot.row, spot.lane), []).append(spot)
    lane_widths = [header_of(lane)[0] for lane in picture.lanes]
    for (_, lane), row in table.items():
        lane_widths[lane] = max(lane_widths[lane], _total(row) + 2 * _LANE_PAD)
    lefts: list[float] = []
    left = MARGIN
    for each in lane_widths:
        lefts.append(left)
        left += each + _BETWEEN_LANES
    _place(table, lane_widths, lefts)
    return _finish(picture, sizes, spots, chains, lane_widths, lefts)


# Rows.


def _rows(picture: Picture) -> list[int]:
    """The row of each item: below all items with arrows to it. In a cycle of arrows, one of them goes up."""
    count = len(picture.items)
    after: list[list[int]] = [[] for _ in range(count)]
    for arrow in picture.arrows:
        after[arrow.tail].append(arrow.head)
    order, upward = _order(after)
    rows = [0] * count
    before: list[int] = [0] * count
    for tail in order:
        for head in after[tail]:
            if (tail, head) not in upward:
                rows[head] = max(rows[head], rows[tail] + 1)
                before[head] += 1
    for tail in reversed(order):  # an item without incoming arrows is drawn next to its user
        heads = [rows[head] for head in after[tail] if (tail, head) not in upward]
        if heads and not before[tail]:
            rows[tail] = min(heads) - 1
    first = min(rows, default=0)
    return [row - first for row in rows]


def _order(after: Sequence[Sequence[int]]) -> tuple[list[int], set[tuple[int, int]]]:
    """All positions, each before those that it leads to; and the edges that violate this order."""
    upward: set[tuple[int, int]] = set()
    state = [0] * len(after)  # 1 while its successors are visited, then 2
    done: list[int] = []
    for start in range(len(after)):
        stack = [(start, 0)] if not state[start] else []
        state[start] = state[start] or 1
        while stack:
            place, number = stack.pop()
            if number == len(after[place]):
                state[place] = 2
                done.append(place)
                continue
            stack.append((place, number + 1))
            head = after[place][number]
            if state[head] == 1:
                upward.add((place, head))
            elif state[head] == 0:
                state[head] = 1
                stack.append((head, 0))
    return done[::-1], upward


def _chain(arrow: Arrow, spots: Sequence[_Spot]) -> list[_Spot]:
    """The spots of an arrow, from the top: new ones in the rows between its ends."""
    top, bottom = spots[arrow.tail], spots[arrow.head]
    if top.row > bottom.row:
        top, bottom = bottom, top
    chain = [top]
    for row in range(top.row + 1, bottom.row):
        chain.append(_Spot(bottom.lane, row, _BEND))
    chain.append(bottom)
    for one, other in pairwise(chain):
        one.down.append(other)
        other.up.append(one)
    return chain


# Places in rows.


def _total(row: Sequence[_Spot]) -> float:
    return sum(spot.width for spot in row) + _BETWEEN_ITEMS * (len(row) - 1)


def _place(table: dict[tuple[int, int], list[_Spot]], lane_widths: Sequence[float], lefts: Sequence[float]) -> None:
    """Align connected spots vertically, without overlaps and inside the lanes."""
    for (_, lane), row in table.items():
        at = (lane_widths[lane] - _total(row)) / 2
        for spot in row:
            spot.x = at + spot.width / 2
            at += spot.width + _BETWEEN_ITEMS
    down = sorted(table)
    for sweep in range(_SWEEPS):
        for key in down if sweep % 2 == 0 else reversed(down):
            row = table[key]
            centre = lane_widths[key[1]] / 2
            if sweep < _SWEEPS - 2:
                orders = {spot: _order_of(spot, lefts, sweep) for spot in row}
                row.sort(key=orders.__getitem__)
            _spread(row, [_wanted(spot, centre, sweep) for spot in row], lane_widths[key[1]])


def _order_of(spot: _Spot, lefts: Sequence[float], sweep: int) -> float:
    """The centre of the spot's neighbours, over all lanes."""
    near = (spot.up if sweep % 2 == 0 else spot.down) or spot.up or spot.down
    return sum(lefts[each.lane] + each.x for each in near) / len(near) if near else lefts[spot.lane] + spot.x


def _wanted(spot: _Spot, centre: float, sweep: int) -> float:
    """The centre of the spot's neighbours in its own lane."""
    for near in (spot.up, spot.down) if sweep % 2 == 0 else (spot.down, spot.up):
        own = [each.x for each in near if each.lane == spot.lane]
        if own:
            return sum(own) / len(own)
    return centre


def _spread(row: Sequence[_Spot], wanted: Sequence[float], lane_width: float) -> None:
    """Place the spots of a row as close to their wanted positions as their order and the lane allow."""
    left = _LANE_PAD
    for spot, x in zip(row, wanted, strict=True):
        spot.x = max(x, left + spot.width / 2)
        left = spot.x + spot.width / 2 + _BETWEEN_ITEMS
    right = lane_width - _LANE_PAD
    for spot in reversed(row):
        spot.x = min(spot.x, right - spot.width / 2)
        right = spot.x - spot.width / 2 - _BETWEEN_ITEMS


# Coordinates.


def _finish(
    picture: Picture,
    sizes: Sequence[tuple[float, float]],
    spots: Sequence[_Spot],
    chains: Sequence[Sequence[_Spot]],
    lane_widths: Sequence[float],
    lefts: Sequence[float],
) -> Layout:
    count = max((spot.row for spot in spots), default=-1) + 1
    heights = [0.0] * count
    for spot, (_, height) in zip(spots, sizes, strict=True):
        heights[spot.row] = max(heights[spot.row], height)
    gaps = [_BETWEEN_ROWS] * count
    for arrow, chain in zip(picture.arrows, chains, strict=True):
        if arrow.message:
            gaps[chain[0].row] = _BETWEEN_ROWS + _MORE_FOR_MESSAGES
    header = LINE * (1 + len(picture.lines)) + 12.0
    top = MARGIN + header
    tops: list[float] = []
    y = top + max((header_of(lane)[1] for lane in picture.lanes), default=0.0) + 6.0
    for height, gap in zip(heights, gaps, strict=True):
        tops.append(y)
        y += height + gap
    bottom = (tops[-1] + heights[-1] if tops else y) + _LANE_PAD

    def middle(spot: _Spot) -> float:
        return lefts[spot.lane] + spot.x

    items = [
        Rect(middle(spot) - width / 2, tops[spot.row], width, height)
        for spot, (width, height) in zip(spots, sizes, strict=True)
    ]
    paths = []
    for arrow, chain in zip(picture.arrows, chains, strict=True):
        points: list[tuple[float, float]] = []
        for spot in chain:
            x, row_bottom = middle(spot), tops[spot.row] + heights[spot.row]
            if spot is chain[-1]:
                points.append((x, tops[spot.row]))
            elif spot is chain[0]:
                points += [(x, tops[spot.row] + sizes[spot.item or 0][1]), (x, row_bottom)]
            else:
                points += [(x, tops[spot.row]), (x, row_bottom)]
        paths.append(Path(arrow, points if chain[0].item == arrow.tail else points[::-1]))
    lanes = [Rect(left, top, lane_width, bottom - top) for left, lane_width in zip(lefts, lane_widths, strict=True)]
    titles = [width(picture.title, TITLE, bold=True), *(width(each, SMALL) for each in picture.lines)]
    right = max([lanes[-1].right if lanes else 0.0, MARGIN + max(titles)])
    return Layout(right + MARGIN, bottom + MARGIN, header, lanes, items, paths)
