"""From parts to pictures: what is joined, labelled, escaped, and where it is placed. No workers here."""

from __future__ import annotations

import random
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from typing import Any

import pytest
from drawing_models import SVG, boxes, overlapping, texts

from backhaul.drawing import Drawing, mentioned, svg, text
from backhaul.drawing.layout import PAD_X, lay_out
from backhaul.drawing.picture import MOST_LANES, Arrow, Item, Lane, Picture, picture
from backhaul.errors import MisuseError, OptionError

NASTY = '<script>alert("1")</script>\\N \\" & &amp; ]]> --> \n\x00\x1b\ud800 {|} 你好 %s'

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's dot is not installed")


def tensor(source: int, peer: dict[str, int], shape: list[int] | None = None, **more: Any) -> dict[str, Any]:
    shape = [2, 3] if shape is None else shape
    return {"source": source, "message": source, **peer, "shape": shape, "dtype": "float32", "bytes": 24, **more}


def sent(source: int, to: int, **more: Any) -> dict[str, Any]:
    return tensor(source, {"to": to}, **{"gate": 0, "waiting": False, "spent": False, **more})


def came(source: int, sender: int, **more: Any) -> dict[str, Any]:
    return tensor(source, {"from": sender}, **more)


def operations(name: str, nodes: int = 1) -> dict[str, Any]:
    return {
        "kind": "operations",
        "label": "",
        "class": "",
        "operations": [[name, nodes]],
        "kinds": 1,
        "nodes": nodes,
        "leaves": [],
        "leaf_count": 0,
        "elements": 0,
    }


def part(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "context": 5,
        "rank": rank,
        "worker": f"worker{rank}",
        "known": True,
        "initiator": 0,
        "workers": [],
        "boxes": [],
        "edges": [],
        "entries": [],
        "exits": [],
        "relays": [],
        "sends": [],
        "recvs": [],
        "rooted": False,
        "runs": [],
        "waits": [],
        "passes": [],
        "going": [],
        "nodes": 0,
        "leaves": {"count": 0, "elements": 0},
        "left_out": {"nodes": 0, "sends": 0, "recvs": 0},
        **more,
    }


def run(*sources: int, backward: int = 1, gates: tuple[int, ...] = (), failed: bool = False) -> dict[str, Any]:
    return {
        "backward": backward,
        "sources": list(sources),
        "began": 0,
        "nanoseconds": 1_500_000,
        "gates": list(gates),
        "failed": failed,
    }


def item_of(shown: Picture, kind: str, lane: int) -> Item:
    (found,) = [item for item in shown.items if item.kind == kind and item.lane == lane]
    return found


def test_a_send_is_joined_with_its_recv() -> None:
    shown = picture([part(0, sends=[sent(7, 1)]), part(1, recvs=[came(7, 0)])])
    (arrow,) = shown.arrows
    assert arrow.message
    assert not arrow.carried
    assert shown.items[arrow.tail] == item_of(shown, "send", 0)
    assert shown.items[arrow.head] == item_of(shown, "recv", 1)
    assert shown.items[arrow.tail].lines == ["[2, 3] float32, 24 B"]
    assert shown.items[arrow.head].lines == []


def test_messages_that_cross_are_joined_by_their_ids() -> None:
    parts = [
        part(0, sends=[sent(7, 1), sent(8, 1)], recvs=[came(9, 1)]),
        part(1, sends=[sent(9, 0)], recvs=[came(8, 0), came(7, 0)]),
    ]
    shown = picture(parts)
    ends = [
        (shown.items[arrow.tail].tip.split("\n")[1], shown.items[arrow.head].tip.split("\n")[1])
        for arrow in shown.arrows
    ]
    assert len(ends) == 3
    assert all(tail == head for tail, head in ends)


def test_the_workers_that_a_part_mentions_are_found() -> None:
    one = part(1, workers=[[0, "worker0"]], sends=[sent(7, 3)], recvs=[came(8, 2)])
    assert mentioned(one) == [0, 2, 3]
    assert mentioned({"rank": 1, "worker": "worker1", "known": False}) == []


@pytest.mark.parametrize("error", [None, "worker 'worker1' is lost"])
def test_a_worker_without_a_part(error: str | None) -> None:
    first = part(0, workers=[[1, "worker1"]], sends=[sent(7, 1)], recvs=[came(8, 1)])
    silent = [] if error is None else [{"rank": 1, "worker": "worker1", "known": False, "error": error}]
    shown = picture([first, *silent])
    lane = shown.lanes[1]
    assert (lane.name, lane.answered, lane.lines[0]) == ("worker1", False, "no answer")
    assert lane.lines[1] == (error or "")
    assert len([arrow for arrow in shown.arrows if arrow.message]) == 2
    assert item_of(shown, "recv", 0).lines == ["[2, 3] float32, 24 B"]  # its sender does not answer
    ElementTree.fromstring(svg([first, *silent]))


def test_a_worker_that_knows_nothing_of_the_context() -> None:
    shown = picture([part(0), {"rank": 1, "worker": "worker1", "known": False}])
    assert shown.lanes[1].lines == ["has no record of this context"]


def test_runs_and_gates() -> None:
    runs = [run(9, 7, 8, gates=(7, 8)), run(6), run(5, failed=True)]
    waits = [{"backward": 1, "source": 7, "began": 0, "nanoseconds": 2_000_000}]
    one = part(0, sends=[sent(source, 1) for source in (5, 6, 7, 8, 9)], runs=runs, waits=waits)
    shown = picture([one, part(1, recvs=[came(source, 0) for source in (5, 6, 7, 8, 9)])])
    # There are more than four between the same boxes, so they are one item here; apart, each has its own line.
    (together,) = [item for item in shown.items if item.kind == "send"]
    assert together.lines[1:] == ["run failed after 4.5 ms", "gate: waited 2 ms"]
    said = {}
    for source in (5, 6, 7, 8, 9):
        alone = picture([part(0, sends=[sent(source, 1)], runs=runs, waits=waits)])
        said[source] = item_of(alone, "send", 0).state, item_of(alone, "send", 0).lines[1:]
    assert said == {
        5: ("failed", ["run failed after 1.5 ms"]),
        6: ("", ["run: 1.5 ms"]),
        7: ("waited", ["run with others", "gate: waited 2 ms"]),
        8: ("gate", ["run with others", "gate: did not wait"]),
        9: ("", ["run: 1.5 ms"]),
    }
    assert shown.lanes[0].lines[1] == "3 runs: 4.5 ms, 2 ms of it at gates, failed"
    assert shown.lanes[0].failed
    assert all(arrow.carried for arrow in shown.arrows)


def test_before_a_pass_gates_may_wait_and_during_one_they_do() -> None:
    shown = picture([part(0, sends=[sent(7, 1, gate=3)])])
    assert item_of(shown, "send", 0).state == "gate"
    assert item_of(shown, "send", 0).lines[1:] == ["gate: runs with 2 others, may wait"]
    shown = picture([part(0, sends=[sent(7, 1, gate=3, waiting=True)])])
    assert item_of(shown, "send", 0).state == "waiting"
    assert item_of(shown, "send", 0).lines[1:] == ["gate: waits now"]


def test_a_later_run_replaces_a_failed_one() -> None:
    runs = [run(7, backward=1, failed=True), run(7, backward=2)]
    shown = picture([part(0, sends=[sent(7, 1)], runs=runs)])
    assert item_of(shown, "send", 0).lines[1:] == ["run: 1.5 ms"]
    assert not shown.lanes[0].failed


@pytest.mark.parametrize(
    ("passes", "going", "line", "failed"),
    [
        ([], [], "no backward pass yet", False),
        ([], [1], "a backward pass is running", False),
        ([(1, 0, None)], [], "backward: 1 ms", False),
        ([(1, 0, "ValueError: no\nmore"), (2, 9, None)], [], "last of 2 backward passes: 1 ms", False),
        ([(1, 0, "ValueError: no\nmore")], [], "backward failed after 1 ms: ValueError: no⏎more", True),
    ],
)
def test_the_first_line_summarises_the_passes(
    passes: list[tuple[int, int, str | None]], going: list[int], line: str, failed: bool
) -> None:
    told = [{"backward": id, "began": began, "nanoseconds": 1_000_000, "error": error} for id, began, error in passes]
    shown = picture([part(0, passes=told, going=going)])
    assert (shown.lines[0], shown.failed) == (line, failed)


def test_only_some_of_many_workers_are_drawn() -> None:
    parts = [part(rank, sends=[sent(rank + 100, (rank + 1) % 40)]) for rank in range(40)]
    shown = picture(parts)
    assert len(shown.lanes) == MOST_LANES
    assert shown.lines[-1] == f"+ {40 - MOST_LANES} workers more"
    ElementTree.fromstring(svg(parts))


def nasty() -> list[dict[str, Any]]:
    module = {**operations(NASTY, 9), "kind": "module", "label": NASTY, "class": NASTY, "of": NASTY}
    leaves = {**operations("", 0), "kind": "leaves", "operations": [], "leaves": [[NASTY, [1]]], "leaf_count": 1}
    error = {"backward": 1, "began": 0, "nanoseconds": 1, "error": NASTY}
    return [
        part(
            0,
            worker=NASTY,
            boxes=[module, operations(NASTY), leaves],
            edges=[[2, 0], [0, 1]],
            exits=[[7, [1]]],
            sends=[sent(7, 1, dtype=NASTY)],
            passes=[error],
        ),
        {"rank": 1, "worker": NASTY, "known": False, "error": NASTY},
    ]


def test_names_cannot_break_out_of_the_svg() -> None:
    shown = svg(nasty())
    root = ElementTree.fromstring(shown)
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {"svg", "title", "rect", "g", "path", "text"}
    assert "<script" not in shown
    assert any('<script>alert("1")</script>' in each for each in texts(shown))
    shown.encode()  # no lone surrogates


@needs_dot
def test_names_cannot_break_out_of_the_dot_text() -> None:
    drawing = Drawing(nasty(), layout="dot")
    root = ElementTree.fromstring(drawing.svg)
    tags = {each.tag.removeprefix(SVG) for each in root.iter()}
    assert tags <= {"svg", "g", "title", "text", "polygon", "path", "ellipse", "polyline", "a"}
    said = "\n".join(each.text or "" for each in root.iter(f"{SVG}text"))
    assert '<script>alert("1")</script>\\N \\"' in said.replace("\N{NO-BREAK SPACE}", " ")


def random_picture(seed: int, lanes: int, count: int, arrows: int) -> Picture:
    draw = random.Random(seed)
    items = [
        Item(
            draw.randrange(lanes),
            draw.choice(["module", "operations", "leaves", "send", "recv", "root", "more"]),
            "x" * draw.randint(1, 40),
            ["y" * draw.randint(1, 50) for _ in range(draw.randrange(4))],
            "tip",
            draw.choice(["", "gate", "waited", "failed"]),
        )
        for _ in range(count)
    ]
    found = {}
    for _ in range(arrows):
        tail, head = draw.sample(range(count), 2)  # in both directions, so that some form cycles
        found[tail, head] = Arrow(tail, head, items[tail].lane != items[head].lane, draw.random() < 0.5, "tip")
    shown = [Lane(rank, f"worker{rank}", ["a line"], True) for rank in range(lanes)]
    return Picture("title", ["line"], False, shown, items, list(found.values()))


@pytest.mark.parametrize("seed", range(20))
def test_nothing_overlaps_in_our_own_layout(seed: int) -> None:
    draw = random.Random(seed)
    shown = random_picture(seed, draw.randint(1, 6), draw.randint(2, 40), draw.randint(1, 80))
    layout = lay_out(shown)
    assert not overlapping(list(layout.items))
    assert not overlapping(list(layout.lanes))
    for item, rect in zip(shown.items, layout.items, strict=True):
        lane = layout.lanes[item.lane]
        assert lane.x < rect.x
        assert rect.right < lane.right
        assert lane.y < rect.y
        assert rect.bottom < lane.bottom
        assert lane.right < layout.width
        assert lane.bottom < layout.height


@pytest.mark.parametrize("seed", range(20))
def test_arrows_join_their_boxes_and_cross_no_other(seed: int) -> None:
    draw = random.Random(seed)
    shown = random_picture(seed, draw.randint(1, 6), draw.randint(2, 40), draw.randint(1, 80))
    layout = lay_out(shown)
    assert [path.arrow for path in layout.paths] == list(shown.arrows)
    for path in layout.paths:
        tail, head = layout.items[path.arrow.tail], layout.items[path.arrow.head]
        (x, y), (end_x, end_y) = path.points[0], path.points[-1]
        assert (x, end_x) == pytest.approx((tail.middle, head.middle))
        assert {y, end_y} <= {tail.y, tail.bottom, head.y, head.bottom}
        for (x0, y0), (x1, y1) in pairwise(path.points):
            for rect in layout.items:
                inside_x = min(x0, x1) < rect.right and rect.x < max(x0, x1)
                assert not (inside_x and min(y0, y1) < rect.bottom - 0.01 and rect.y + 0.01 < max(y0, y1))


@pytest.mark.parametrize("weight", ["normal", "bold"])
@pytest.mark.parametrize(
    "words",
    [
        "worker0: Linear",
        "[32, 16] float32, 2.05 kB",
        "weight [16, 16], bias [16]",
        "gate: runs with 2 others, may wait",
        "norm: LayerNorm",
        f"Addmm {text.TIMES}12, MmBackward, WWWW, + 1,024 more",
        "1 run: 5.08 ms, 3.52 ms of it at gates",
        "layers.0.attention.out_proj: NonDynamicallyQuantizableLinear",
        "iiiillll....||||",
    ],
)
def test_texts_are_within_their_boxes(words: str, weight: str) -> None:
    """Checked with DejaVu Sans, which is wider than the usual fonts for Helvetica."""
    fonts = pytest.importorskip("matplotlib.font_manager")
    from matplotlib.textpath import TextPath

    extents = TextPath((0, 0), words, size=13, prop=fonts.FontProperties(family="DejaVu Sans", weight=weight))
    assert extents.get_extents().width <= text.width(words, 13, bold=weight == "bold") + 2 * PAD_X


def test_a_picture_without_anything() -> None:
    assert boxes(svg([part(0)])) == []
    assert texts(svg([]))[0] == "autograd context"


@needs_dot
@pytest.mark.parametrize("seed", range(3))
def test_graphviz_takes_our_text(seed: int) -> None:
    from backhaul.drawing.digraph import render

    shown = random_picture(seed, 4, 20, 30)
    done = subprocess.run(["dot", "-Tplain"], input=render(shown).encode(), capture_output=True, check=True)
    lines = done.stdout.decode().splitlines()
    assert not done.stderr
    assert len([line for line in lines if line.startswith("node ")]) == 20
    assert len([line for line in lines if line.startswith("edge ")]) == len(shown.arrows)


def test_without_graphviz(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    drawing = Drawing([part(0, sends=[sent(7, 1)])])
    assert drawing.svg == svg(drawing.parts) == drawing._repr_svg_()
    drawing.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == drawing.svg
    drawing.save(str(tmp_path / "a.gv"))
    assert (tmp_path / "a.gv").read_text() == drawing.dot
    with pytest.raises(MisuseError, match=r"a \.png needs Graphviz"):
        drawing.save(tmp_path / "a.png")
    with pytest.raises(MisuseError, match=r"a \.svg needs Graphviz"):
        _ = Drawing(drawing.parts, layout="dot").svg
    assert not (tmp_path / "a.png").exists()


def test_a_failing_graphviz_is_logged_and_our_layout_is_used(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho 'Error: out of paint' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    drawing = Drawing([part(0)])
    assert drawing.svg == svg(drawing.parts)
    assert "status 3: Error: out of paint" in caplog.text


@pytest.mark.parametrize("name", ["graph", "graph.jpg", "svg"])
def test_a_name_of_no_known_format(name: str) -> None:
    with pytest.raises(OptionError, match="must end with"):
        Drawing([part(0)]).save(name)


def test_a_layout_that_does_not_exist() -> None:
    with pytest.raises(OptionError, match="layout='neato'"):
        Drawing([part(0)], layout="neato")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nanoseconds", "said"),
    [(0, "0 ns"), (999, "999 ns"), (1000, "1 µs"), (1_234_567, "1.23 ms"), (999_600, "1 ms"), (7.5e12, "7500 s")],
)
def test_durations(nanoseconds: float, said: str) -> None:
    assert text.duration(nanoseconds) == said


@pytest.mark.parametrize(("number", "said"), [(0, "0 B"), (999, "999 B"), (1536, "1.54 kB"), (999_700, "1 MB")])
def test_amounts(number: int, said: str) -> None:
    assert text.amount(number, "B") == said
