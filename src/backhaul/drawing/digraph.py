"""A picture in the DOT language of Graphviz. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from backhaul.drawing.picture import Arrow, Item, Picture
from backhaul.drawing.text import quoted
from backhaul.drawing.vector import BAD, CARRIED, INK, INSIDE, PALE, colours


def render(picture: Picture) -> str:
    """The picture as a digraph, with a cluster for each worker. Messages between workers have a size in their box."""
    return "\n".join(_lines(picture)) + "\n"


def _lines(picture: Picture) -> Iterator[str]:
    colour = BAD if picture.failed else INK
    title = "".join(f"{line}\n" for line in [picture.title, *picture.lines])
    yield "digraph context {"
    yield f'  graph [label={quoted(title, left=True)}, labelloc=t, labeljust=l, fontname="Helvetica", fontsize=12,'
    yield f'         fontcolor="{colour}", bgcolor="white", rankdir=TB, nodesep=0.25, ranksep=0.35, newrank=true];'
    yield '  node [fontname="Helvetica", fontsize=11, shape=box, style="filled", margin="0.12,0.06", height=0.3];'
    yield '  edge [fontname="Helvetica", fontsize=10, arrowsize=0.7];'
    for place, lane in enumerate(picture.lanes):
        yield f"  subgraph cluster_{place} {{"
        style = "rounded,filled" if lane.answered else "rounded,dashed"
        border = BAD if lane.failed else "#b9c0cb"
        label = quoted("\n".join([lane.name, *filter(None, lane.lines)]))
        yield f'    graph [label={label}, labeljust=c, style="{style}", color="{border}", fillcolor="#f8f9fb",'
        yield f'           fontcolor="{BAD if lane.failed or not lane.answered else INK}"];'
        inside = [(at, item) for at, item in enumerate(picture.items) if item.lane == place]
        for at, item in inside:
            yield f"    n{at} [{_item(item)}];"
        if not inside:
            yield f'    e{place} [label="", shape=point, style=invis];'
        yield "  }"
    for arrow in picture.arrows:
        yield f"  n{arrow.tail} -> n{arrow.head} [{_arrow(arrow)}];"
    yield "}"


def _item(item: Item) -> str:
    fill, border = colours(item)
    shape = "rounded,filled" if item.kind in ("send", "recv", "root") else "filled"
    if item.kind == "more":
        shape = "filled,dashed"
    thick = 2 if item.state else 1
    return (
        f"label={quoted(chr(10).join([item.title, *item.lines]))}, tooltip={quoted(item.tip)}, "
        f'style="{shape}", fillcolor="{fill}", color="{border}", penwidth={thick}'
    )


def _arrow(arrow: Arrow) -> str:
    if not arrow.message:
        return f'color="{INSIDE}"'
    tip = f"edgetooltip={quoted(arrow.tip)}"
    return (
        f'color="{CARRIED}", dir=both, penwidth=1.4, {tip}' if arrow.carried else f'color="{PALE}", penwidth=1.4, {tip}'
    )
