"""Picture: the joined parts of all workers, with every text and arrow of the drawing, before layout. Pure.

Workers become **lanes**. Lanes contain **items**: the boxes of the graph, the roots, and one for each message sent
or received. Each Send is joined with its Recv at the peer by the id of its tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from backhaul.drawing import text

MOST_LANES = 24
MOST_MESSAGES = 16
MOST_ALIKE = 4
"""In a lane with more messages than this, in each direction or between the same boxes, those form one item."""

ROOT = 0
"""The source that stands for the roots of a pass."""

Kind = Literal["module", "operations", "leaves", "more", "root", "send", "recv"]
State = Literal["", "gate", "waited", "waiting", "failed"]


class Item(NamedTuple):
    """A box of the picture: its title, smaller lines below, and its tooltip."""

    lane: int
    kind: Kind
    title: str
    lines: Sequence[str]
    tip: str
    state: State = ""


class Arrow(NamedTuple):
    """From one item to another, by position. Gradients go the other way."""

    tail: int
    head: int
    message: bool
    """Whether the arrow is a message between workers."""
    carried: bool = False
    """Whether gradients came back."""
    tip: str = ""


class Lane(NamedTuple):
    """A worker."""

    rank: int
    name: str
    lines: Sequence[str]
    answered: bool
    failed: bool = False


class Picture(NamedTuple):
    title: str
    lines: Sequence[str]
    failed: bool
    lanes: Sequence[Lane]
    items: Sequence[Item]
    arrows: Sequence[Arrow]


def mentioned(part: dict[str, Any]) -> list[int]:
    """The ranks of the other workers that have a part in the context, as far as this part shows."""
    found = {rank for rank, _ in part.get("workers", ())}
    found.update(send["to"] for send in part.get("sends", ()))
    found.update(recv["from"] for recv in part.get("recvs", ()))
    return sorted(found - {part["rank"]})


def picture(parts: Sequence[dict[str, Any]]) -> Picture:
    """The picture of these parts. Workers that are mentioned but have no part are drawn as silent.

    The part of a worker that did not answer is ``{"rank": …, "worker": …, "known": False, "error": why}``.
    """
    return _Joining(parts).picture()


class _Joining:
    def __init__(self, parts: Sequence[dict[str, Any]]) -> None:
        self.parts = {part["rank"]: part for part in sorted(parts, key=lambda part: part["rank"])}
        names = {rank: name for part in self.parts.values() for rank, name in part.get("workers", ())}
        names |= {rank: part["worker"] for rank, part in self.parts.items()}
        for part in self.parts.values():
            for rank in mentioned(part):
                names.setdefault(rank, f"rank {rank}")
        self.names = {rank: text.line(str(name), 40) for rank, name in sorted(names.items())}
        self.lane_of = {rank: place for place, rank in enumerate(list(self.names)[:MOST_LANES])}
        self.items: list[Item] = []
        self.arrows: dict[tuple[int, int], Arrow] = {}
        self.sent: dict[int, int] = {}  # source -> item
        self.received: dict[int, int] = {}
        self.ran = {rank: _Runs(part) for rank, part in self.parts.items()}

    def picture(self) -> Picture:
        for rank, lane in self.lane_of.items():
            part = self.parts.get(rank)
            if part is not None and part["known"]:
                self._add_part(part, lane)
        self._join()
        title, lines, failed = self._title()
        lanes = [self._lane(rank) for rank in self.lane_of]
        return Picture(title, lines, failed, lanes, self.items, list(self.arrows.values()))

    # Inside a lane.

    def _add_part(self, part: dict[str, Any], lane: int) -> None:
        roots = {box["of"] for box in part["boxes"] if "of" in box}
        first = len(self.items)
        for box in part["boxes"]:
            self.items.append(_box(box, lane, len(roots) > 1))
        for tail, head in part["edges"]:
            self._arrow(first + tail, first + head)
        exits, entries = dict(part["exits"]), dict(part["entries"])
        relayed = {source: message for message, source in part["relays"]}
        runs = self.ran[part["rank"]]
        for tensors in _merged(part["sends"], "to", lambda each: tuple(exits.get(each["source"], ()))):
            item = self._send(tensors, lane, runs)
            for each in tensors:
                self.sent[each["source"]] = item
                for box in exits.get(each["source"], ()):
                    self._arrow(first + box, item)
        for tensors in _merged(part["recvs"], "from", lambda each: tuple(entries.get(each["message"], ()))):
            item = self._recv(tensors, lane)
            for each in tensors:
                self.received[each["source"]] = item
                for box in entries.get(each["message"], ()):
                    self._arrow(item, first + box)
        by_message = {each["message"]: self.received[each["source"]] for each in part["recvs"]}
        root = self._root(part, lane, runs)
        for source, message in relayed.items():
            head = root if source == ROOT else self.sent.get(source)
            if head is not None and message in by_message:
                self._arrow(by_message[message], head)
        if root is not None:
            for box in exits.get(ROOT, ()):
                self._arrow(first + box, root)

    def _send(self, tensors: Sequence[dict[str, Any]], lane: int, runs: _Runs) -> int:
        state, lines = runs.describe([each["source"] for each in tensors])
        if any(each["waiting"] for each in tensors):
            state = "waiting"
            lines.append("gate: waits now")
        elif not runs.of_any(tensors):
            together = max(each["gate"] for each in tensors)
            if together:
                state = "gate"
                lines.append(f"gate: runs with {together - 1} other{'s' if together > 2 else ''}, may wait")
        peer = self._name(tensors[0]["to"])
        tip = f"sent to {peer}\n" + _tensors_tip(tensors)
        return self._item(Item(lane, "send", f"to {peer}", [_tensors(tensors), *lines], tip, state))

    def _recv(self, tensors: Sequence[dict[str, Any]], lane: int) -> int:
        rank = tensors[0]["from"]
        sender = self.parts.get(rank)
        peer = self._name(rank)
        lines = [] if sender is not None and sender["known"] else [_tensors(tensors)]
        return self._item(Item(lane, "recv", f"from {peer}", lines, f"from {peer}\n" + _tensors_tip(tensors)))

    def _root(self, part: dict[str, Any], lane: int, runs: _Runs) -> int | None:
        """The item of the roots of a pass, if they are known or were run."""
        if not part["rooted"] and ROOT not in runs.last:
            return None
        state, lines = runs.describe([ROOT])
        return self._item(Item(lane, "root", "roots of backward", lines, "where the backward pass starts", state))

    def _item(self, item: Item) -> int:
        self.items.append(item)
        return len(self.items) - 1

    def _arrow(self, tail: int, head: int) -> None:
        if tail != head:
            self.arrows.setdefault((tail, head), Arrow(tail, head, False))

    # Between lanes.

    def _join(self) -> None:
        found: dict[tuple[int, int], list[tuple[dict[str, Any], bool]]] = {}
        silent: dict[tuple[int, int, bool], int] = {}
        for rank, part in self.parts.items():
            if rank not in self.lane_of:
                continue
            for send in part.get("sends", ()):
                head = self.received.get(send["source"])
                if head is None:
                    head = self._end(silent, rank, send["to"], "from")
                if head is not None:
                    carried = send["source"] in self.ran[rank].carried or send["spent"]
                    found.setdefault((self.sent[send["source"]], head), []).append((send, carried))
            for recv in part.get("recvs", ()):
                if recv["source"] not in self.sent:
                    tail = self._end(silent, rank, recv["from"], "to")
                    if tail is not None:
                        found.setdefault((tail, self.received[recv["source"]]), []).append((recv, False))
        for (tail, head), tensors in found.items():
            carried = any(carried for _, carried in tensors)
            tip = _tensors_tip([tensor for tensor, _ in tensors])
            if carried:
                tip += "\ngradients came back"
            self.arrows[tail, head] = Arrow(tail, head, True, carried, tip)

    def _end(self, silent: dict[tuple[int, int, bool], int], rank: int, peer: int, way: str) -> int | None:
        """An item for the other end of messages, in the lane of a worker that did not report them."""
        if peer not in self.lane_of:
            return None
        key = (rank, peer, way == "to")
        if key not in silent:
            lane = self.lane_of[peer]
            kind: Kind = "send" if way == "to" else "recv"
            silent[key] = self._item(Item(lane, kind, f"{way} {self._name(rank)}", ["?"], "this end is not known"))
        return silent[key]

    # Texts.

    def _name(self, rank: int) -> str:
        return self.names.get(rank, f"rank {rank}")

    def _lane(self, rank: int) -> Lane:
        part = self.parts.get(rank)
        if part is None or not part["known"]:
            reason = text.line(str((part or {}).get("error") or ""), 48)
            knows = part is not None and not part.get("error")
            return Lane(
                rank, self.names[rank], ["has no record of this context"] if knows else ["no answer", reason], False
            )
        leaves = part["leaves"]
        lines = [f"{text.plural(part['nodes'], 'node')}, {text.plural(leaves['count'], 'leaf')}"]
        if leaves["elements"]:
            lines[0] += f" of {text.plural(leaves['elements'], 'element')}"
        summary, failed = self.ran[rank].summary()
        if summary:
            lines.append(summary)
        left_out = [text.plural(count, noun[:-1]) for noun, count in part["left_out"].items() if count]
        if left_out:
            lines.append(f"+ {', '.join(left_out)} more")
        return Lane(rank, self.names[rank], lines, True, failed)

    def _title(self) -> tuple[str, list[str], bool]:
        known = [part for part in self.parts.values() if part["known"]]
        if not known:
            return "autograd context", ["no worker has a record of it"], False
        initiator = self._name(known[0]["initiator"])
        title = f"autograd context {known[0]['context']}, made by {initiator}"
        lines: list[str] = []
        passes = sorted((each for part in known for each in part["passes"]), key=lambda each: each["began"])
        going = {id for part in known for id in part["going"]} - {each["backward"] for each in passes}
        failed = False
        if passes:
            last = passes[-1]
            failed = last["error"] is not None
            which = "backward" if len(passes) == 1 else f"last of {len(passes)} backward passes"
            time = text.duration(last["nanoseconds"])
            lines.append(
                f"{which} failed after {time}: {text.line(last['error'], 90)}" if failed else f"{which}: {time}"
            )
        elif not going:
            lines.append("no backward pass yet")
        if going:
            lines.append("a backward pass is running")
        more = len(self.names) - len(self.lane_of)
        if more:
            lines.append(f"+ {text.plural(more, 'worker')} more")
        return title, lines, failed


class _Runs:
    """The finished parts of passes on one worker."""

    def __init__(self, part: dict[str, Any]) -> None:
        self.last: dict[int, dict[str, Any]] = {}
        """The latest run of each source."""
        self._all: list[dict[str, Any]] = part.get("runs", [])
        self._waits: dict[tuple[int, int], int] = {}
        self.carried: set[int] = set()
        """The sources whose gradients have come back."""
        for run in self._all:
            self.last.update(dict.fromkeys(run["sources"], run))
            # A run begins when the gradients of its first source arrive; a failed run may have waited for the others in
            # vain.
            self.carried.update(run["sources"][:1] if run["failed"] and run["gates"] else run["sources"])
        for wait in part.get("waits", ()):
            key = wait["backward"], wait["source"]
            self._waits[key] = self._waits.get(key, 0) + wait["nanoseconds"]

    def of_any(self, sends: Iterable[dict[str, Any]]) -> bool:
        return any(send["source"] in self.last for send in sends)

    def describe(self, sources: Sequence[int]) -> tuple[State, list[str]]:
        """The state and the lines for an item with these sources."""
        state: State = ""
        lines: list[str] = []
        runs = {id(run): run for source in sources if (run := self.last.get(source)) is not None}
        begun = [run for run in runs.values() if run["sources"][0] in sources]
        if begun:
            time = text.duration(sum(run["nanoseconds"] for run in begun))
            if any(run["failed"] for run in begun):
                state = "failed"
                lines.append(f"run failed after {time}")
            else:
                lines.append(f"run: {time}" if len(begun) == 1 else f"{len(begun)} runs: {time} in all")
        elif runs:
            lines.append("run with others")
            state = "failed" if any(run["failed"] for run in runs.values()) else ""
        gates = [(run["backward"], source) for run in runs.values() for source in run["gates"] if source in sources]
        waited = [self._waits[gate] for gate in gates if gate in self._waits]
        if waited:
            lines.append(f"gate: waited {text.duration(sum(waited))}")
        elif gates:
            lines.append("gate: did not wait")
        if state != "failed" and gates:
            state = "waited" if waited else "gate"
        return state, lines

    def summary(self) -> tuple[str, bool]:
        """One line on the latest pass on this worker, and whether one of its runs failed."""
        if not self._all:
            return "", False
        backward = self._all[-1]["backward"]
        runs = [run for run in self._all if run["backward"] == backward]
        line = f"{text.plural(len(runs), 'run')}: {text.duration(sum(run['nanoseconds'] for run in runs))}"
        waited = sum(time for (of, _), time in self._waits.items() if of == backward)
        if waited:
            line += f", {text.duration(waited)} of it at gates"
        failed = any(run["failed"] for run in runs)
        return line + (", failed" if failed else ""), failed


def _merged(
    tensors: Sequence[dict[str, Any]], peer: str, boxes: Callable[[dict[str, Any]], Hashable]
) -> list[list[dict[str, Any]]]:
    """Groups of tensors drawn as one item: those of a message, or more if there are many messages."""
    keys: list[Callable[[dict[str, Any]], Hashable]] = [
        lambda each: each["message"],
        lambda each: (each[peer], boxes(each)),
        lambda each: each[peer],
    ]
    for key in keys:
        found: dict[Hashable, list[dict[str, Any]]] = {}
        for each in tensors:
            found.setdefault(key(each), []).append(each)
        alike = Counter(keys[1](group[0]) for group in found.values())
        if len(found) <= MOST_MESSAGES and max(alike.values(), default=0) <= MOST_ALIKE:
            break
    return list(found.values())


def _box(box: dict[str, Any], lane: int, several: bool) -> Item:
    operations = [name if count == 1 else f"{name} {text.TIMES}{count}" for name, count in box["operations"]]
    leaves = [f"{name} {text.shape(shape)}".strip() for name, shape in box["leaves"]]
    tip = []
    if box["nodes"]:
        tip.append(f"{text.plural(box['nodes'], 'node')}: {text.listed(operations, box['kinds'], 12)}")
    if box["leaf_count"]:
        names = text.listed(leaves, box["leaf_count"], 12)
        tip.append(f"{text.plural(box['leaf_count'], 'leaf')} of {text.plural(box['elements'], 'element')}: {names}")
    kind: Kind = box["kind"]
    lines: list[str] = []
    if kind == "module":
        title = f"{box['of']}.{box['label']}" if several and box["class"] else box["label"]
        title = text.line(title, 40) + (f": {text.line(box['class'], 30)}" if box["class"] else "")
        own = [f"{name.rpartition('.')[2]} {text.shape(shape)}" for name, shape in box["leaves"]]
        if len({name.rpartition(".")[0] for name, _ in box["leaves"]}) > 1:
            lines.append(f"{text.plural(box['leaf_count'], 'leaf')} of {text.plural(box['elements'], 'element')}")
        elif own:
            lines.append(text.line(text.listed(own, box["leaf_count"], 2), 48))
    elif kind == "leaves":
        title = text.line(leaves[0] if leaves[0][0] != "[" else f"leaf {leaves[0]}", 48)
        if box["leaf_count"] > 1:
            title = text.plural(box["leaf_count"], "leaf")
            lines.append(text.line(text.listed(leaves, box["leaf_count"], 2), 48))
    elif kind == "more":
        title = f"+ {text.plural(box['nodes'], 'node')} more"
    else:
        title = text.line(text.listed(operations, box["kinds"], 3), 48)
    if box["nodes"] > 3 and (kind == "module" or (kind == "operations" and box["kinds"] > 3)):
        lines.append(text.plural(box["nodes"], "node"))
    return Item(lane, kind, title, lines, text.paragraph("\n".join([title, *tip])))


def _tensors(tensors: Sequence[dict[str, Any]]) -> str:
    """The sizes of tensors, in one line."""
    size = text.amount(sum(each["bytes"] for each in tensors), "B")
    kinds = {(text.shape(each["shape"]), each["dtype"]) for each in tensors}
    if len(kinds) > 1:
        return f"{len(tensors)} tensors, {size}"
    ((shape, dtype),) = kinds
    many = "" if len(tensors) == 1 else f"{len(tensors)} {text.TIMES} "
    return text.line(f"{many}{shape} {dtype}, {size}")


def _tensors_tip(tensors: Sequence[dict[str, Any]]) -> str:
    shown = [
        text.line(f"tensor {each['source']}: {text.shape(each['shape'])} {each['dtype']}, {each['bytes']:,} bytes", 120)
        for each in tensors[:12]
    ]
    if len(tensors) > 12:
        shown.append(f"+ {len(tensors) - 12} more")
    return "\n".join(shown)
