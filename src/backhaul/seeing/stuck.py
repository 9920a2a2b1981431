"""Stuck: what each waiting thread of a cluster ultimately waits for. Pure: computed from the workers' answers.

Each worker reports what its threads do (topic "threads") and its figures ("snapshot"). This module combines them:

    thread ─ waits for the reply to call 7 of worker0 ─► the thread of worker1 that handles call 7 of worker0
           ─ waits at a gate for gradients of a pass ──► the threads of that peer that work on the pass
           ─ waits in `backward` for some workers ─────► the threads of theirs that work on the pass
           ─ waits for a value ────────────────────────► the thread that makes it
           ─ waits until a peer takes a message ───────► that peer, if it does not answer
           ─ stands at a lock, or joins a thread ──────► the thread that holds the lock, or is joined

and so on, until a **cycle** closes, or the chain **ends**: at a running thread, a lock with an unknown holder, a
lost worker. The workers do not answer at the same moment. So while work continues, a reported chain may never have
existed; threads that hang are reported correctly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from backhaul.seeing.findings import Chain, Edge, Node, Stuck

INSPECTION = "what a worker does"
"""How a member's question about another worker appears among the waits; threads that wait for it are not reported."""

ASKER = "backhaul asks "
"""The prefix of the names of threads that ask other workers."""

_MOST_CHAINS = 100
_LONGEST = 100
_FETCH = "to_here of "
_FAREWELL = ("the end of the group", "its readiness to shut down", "its tally")
_SEVERITY = ("cycle", "lost", "blocked", "unknown", "late", "runs", "shutdown")

Answer = Mapping[str, Any]
"""One worker's answers: ``threads`` and ``snapshot``, or ``error``, and ``lost`` if the worker is dead."""


class _Item(msgspec.Struct, frozen=True):
    """Something that a thread is doing."""

    kind: str  # "waits", "handles" or "runs"
    worker: str
    what: dict[str, Any]

    @property
    def seconds(self) -> float:
        return float(self.what.get("seconds", 0.0))


class _Link(msgspec.Struct, frozen=True):
    """The next step of a chain: a thread, by its key, or an end."""

    does: str
    target: str = ""
    end: str = ""
    says: str = ""
    worker: str = ""


class _Thread:
    def __init__(self, key: str, worker: str, found: Mapping[str, Any]) -> None:
        self.key = key
        self.worker = worker
        self.name = str(found["name"])
        self.blocked = found.get("blocked")
        self.stack: Sequence[Mapping[str, Any]] = found.get("stack", ())
        self.items: list[_Item] = []

    def add(self, kind: str, worker: str, found: Iterable[dict[str, Any]]) -> None:
        self.items += [_Item(kind, worker, each) for each in found]

    def sort(self) -> None:
        """Sort its items, innermost first. A wait is inside of an item that began at the same moment."""
        self.items.sort(key=lambda item: (item.seconds, item.kind != "waits"))
        if self.items:
            self.worker = self.items[0].worker

    @property
    def innermost(self) -> _Item | None:
        return self.items[0] if self.items else None

    @property
    def title(self) -> str:
        handled = [item.what["what"] for item in self.items if item.kind == "handles" and item.what["kind"] == "Call"]
        if handled:
            return f"thread in {handled[0].rpartition('.')[2]}"
        return "main thread" if self.name == "MainThread" else f"thread {self.name}"

    @property
    def looks(self) -> bool:
        """Whether the thread exists only because someone inspects the worker."""
        item = self.innermost
        if self.name.startswith(ASKER):
            return True
        return item is not None and (item.what.get("kind") == "Inspect" or item.what.get("what") == INSPECTION)

    @property
    def line(self) -> Mapping[str, Any] | None:
        """The innermost frame of user code, else of an installed package."""
        for whose in ("user", "installed"):
            found = [frame for frame in self.stack if frame.get("whose", "user") == whose]
            if found:
                return found[-1]
        return None

    @property
    def at(self) -> str:
        frame = self.line
        if frame is None:
            return ""
        place = f"line {frame['line']} of {os.path.basename(frame['file'])}"
        return f"{place}: {frame['code']}" if frame.get("code") else place

    @property
    def awaits_future(self) -> bool:
        """Whether the thread waits for a future that no reply completes: user code must complete it."""
        frame = self.stack[-1] if self.stack else None
        return (
            frame is not None
            and frame["function"] == "wait"
            and str(frame["file"]).endswith(("torch/futures/__init__.py", "backhaul/agent/future.py"))
        )


def explain(answers: Mapping[str, Answer]) -> Stuck:
    """What the threads of these workers wait for. ``answers`` is keyed by worker name."""
    return _Explanation(answers).result()


class _Explanation:
    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self._silent = {name: str(each["error"]) for name, each in answers.items() if "error" in each}
        self._lost = {name for name, each in answers.items() if each.get("lost")}
        self._snapshots = {name: each["snapshot"] for name, each in answers.items() if "snapshot" in each}
        self._names = {each["worker"]["rank"]: name for name, each in self._snapshots.items()}
        self._threads: dict[str, _Thread] = {}
        for name, each in answers.items():
            if "threads" in each and name in self._snapshots:
                self._read(name, each["threads"])
        for thread in self._threads.values():
            thread.sort()
        self._links: dict[str, list[_Link]] = {}

    def _key(self, worker: str, thread: int) -> str:
        """Names a thread uniquely. One process may hold several workers."""
        about = self._snapshots[worker]["worker"]
        return f"{about.get('host', worker)}/{about.get('pid', 0)}/{thread}"

    def _read(self, worker: str, threads: Iterable[Mapping[str, Any]]) -> None:
        for found in threads:
            key = self._key(worker, found["id"])
            thread = self._threads.setdefault(key, _Thread(key, worker, found))
            thread.add("handles", worker, found["handles"])
            thread.add("waits", worker, found["waits"])
        for run in self._snapshots[worker].get("autograd", {}).get("runs", ()):
            if (run_by := self._threads.get(self._key(worker, run["thread"]))) is not None:
                run_by.add("runs", worker, [run])

    # What a thread waits for.

    def _next(self, thread: _Thread) -> list[_Link]:
        if thread.key not in self._links:
            self._links[thread.key] = list(self._find(thread))
        return self._links[thread.key]

    def _find(self, thread: _Thread) -> Iterable[_Link]:
        item = thread.innermost
        if item is None or item.kind != "waits":
            return self._in_user_code(thread, item)
        about = item.what
        match about["kind"]:
            case "reply":
                return self._reply(item.worker, about)
            case "gate":
                does = f"waits at a gate of backward pass {about['backward']} for gradients from {about['peer']}"
                return self._work(does, thread, about["peer"], about["backward"])
            case "pass":
                return self._pass(thread, about)
            case "value":
                return self._value(f"waits for the value {about['ref']}", item.worker, about["ref"])
            case "connection":
                return [self._connection(about["peer"])]
            case "room":
                return [self._room(about["peer"], about["bytes"])]
        return [_Link("waits", end="unknown", says=f"waits for {about.get('what', about['kind'])}")]

    def _reply(self, worker: str, about: Mapping[str, Any]) -> list[_Link]:
        peer, what = about["peer"], about["what"]
        does = f"waits for {what} on {peer}"
        if what in _FAREWELL:
            return [self._farewell()]
        if peer not in self._snapshots:
            return [self._gone(does, peer)]
        handling = self._handling(peer, lambda each: each["peer"] == worker and each["call"] == about["call"])
        if handling is not None:
            return [_Link(does, target=handling.key)]
        if what.startswith(_FETCH):
            return self._value(does, peer, what.removeprefix(_FETCH))
        late = [
            each
            for each in self._snapshots[peer].get("running", ())
            if each.get("thread") is None and each["peer"] == worker and each["call"] == about["call"]
        ]
        if late:
            return self._late(does, peer, late[0])
        says = f"no thread of {peer} has started it: it is on its way, or no thread of {peer} is free"
        return [_Link(does, end="unknown", says=says, worker=peer)]

    def _farewell(self) -> _Link:
        ready = {
            item.worker
            for thread in self._threads.values()
            for item in thread.items
            if item.kind == "waits" and item.what.get("what") in _FAREWELL
        }
        absent = sorted(set(self._snapshots) - ready)
        says = f"{', '.join(absent)} did not call it yet" if absent else "work still goes on"
        return _Link("waits in shutdown() for the others", end="shutdown", says=says)

    def _late(self, does: str, peer: str, late: Mapping[str, Any]) -> list[_Link]:
        """A call that continues without a thread may wait for calls of its worker that no thread waits for."""
        says = (
            f"{late['what']} has run there without a thread for {late['seconds']:.1f} s: it is a coroutine, or has "
            "returned a future that is not done"
        )
        waited = {
            (item.what["peer"], item.what["call"])
            for thread in self._threads.values()
            for item in thread.items
            if item.worker == peer and item.kind == "waits" and item.what["kind"] == "reply"
        }
        found: list[_Link] = []
        for asked in self._snapshots[peer].get("asked", ()):
            if (asked["peer"], asked["call"]) not in waited and asked["what"] != INSPECTION:
                found += [
                    msgspec.structs.replace(link, does=f"{does}, which runs without a thread and probably {link.does}")
                    for link in self._reply(peer, asked)
                ]
        return found or [_Link(does, end="late", says=says, worker=peer)]

    def _value(self, does: str, owner: str, ref: str) -> list[_Link]:
        making = self._handling(owner, lambda each: each["kind"] == "Create" and each.get("ref") == ref)
        if making is not None:
            return [_Link(does, target=making.key)]
        says = f"no thread of {owner} makes it: it is made by a coroutine or a future, or its creation is on its way"
        return [_Link(does, end="unknown", says=says, worker=owner)]

    def _pass(self, thread: _Thread, about: Mapping[str, Any]) -> list[_Link]:
        does = f"waits in backward pass {about['backward']}"
        if not about["ranks"]:
            return [_Link(does, end="unknown", says="all its work is done, and the reports are on their way")]
        found: list[_Link] = []
        for rank in about["ranks"]:
            peer = self._names.get(rank, f"rank {rank}")
            found += self._work(f"{does} for {peer}", thread, peer, about["backward"])
        return found

    def _work(self, does: str, thread: _Thread, peer: str, backward: int, seen: tuple[str, ...] = ()) -> list[_Link]:
        """The threads of a worker that work on a pass; else what the worker itself waits for."""
        if peer not in self._snapshots:
            return [self._gone(does, peer)]
        at_work = [
            other
            for other in self._threads.values()
            if other.key != thread.key
            and any(item.worker == peer and item.what.get("backward") == backward for item in other.items)
            and (item := other.innermost) is not None
            and not (item.kind == "waits" and item.what["kind"] == "pass")
        ]
        if at_work:
            return [_Link(does, target=other.key) for other in at_work]
        links: list[_Link] = []
        for context in self._snapshots[peer].get("autograd", {}).get("in_detail", ()):
            for each in context["passes"]:
                if each["backward"] != backward:
                    continue
                missing = {gap["rank"] for gap in each.get("missing", ())}
                for rank in sorted({*missing, *each.get("given_to", ())}):
                    name = self._names.get(rank, f"rank {rank}")
                    if name in seen:
                        continue
                    why = "cannot continue without gradients from" if rank in missing else "has given gradients to"
                    links += self._work(f"{does}, which {why} {name}", thread, name, backward, (*seen, peer))
        says = f"no thread of {peer} works on that pass: its gradients are on their way to or from {peer}"
        return links or [_Link(does, end="unknown", says=says, worker=peer)]

    def _in_user_code(self, thread: _Thread, item: _Item | None) -> list[_Link]:
        if (blocked := thread.blocked) is not None:
            return self._blocked(thread, blocked)
        if thread.awaits_future:
            says = f"nothing has completed that future ({thread.at})"
            return [_Link("waits for a future", end="blocked", says=says, worker=thread.worker)]
        if item is None:
            return [_Link("runs", end="runs", says=f"is at {thread.at}" if thread.at else "runs")]
        if item.kind == "runs":
            gates = self._gates_of(item)
            if gates:  # torch's engine has its own threads for devices
                return [_Link("runs torch's engine", target=other.key) for other in gates]
        what = item.what
        if item.kind == "runs" or "backward" in what:
            says = f"has run its part of backward pass {what['backward']} for {item.seconds:.1f} s"
        else:
            says = f"has run {what['what']} for {item.seconds:.1f} s"
        return [_Link("runs", end="runs", says=f"{says}, now at {thread.at}" if thread.at else says)]

    def _gates_of(self, run: _Item) -> list[_Thread]:
        return [
            other
            for other in self._threads.values()
            if (item := other.innermost) is not None
            and item.worker == run.worker
            and item.what.get("kind") == "gate"
            and item.what["backward"] == run.what["backward"]
            and not any(each.kind == "runs" for each in other.items)
        ]

    def _blocked(self, thread: _Thread, blocked: Mapping[str, Any]) -> list[_Link]:
        kind, what = blocked["on"], blocked.get("what") or ""
        at = f" ({thread.at})" if thread.at else ""
        does = f"waits for the {kind} {what}{at}" if what else f"waits for {_ARTICLE.get(kind, 'a')} {kind}{at}"
        holder = blocked.get("holder")
        if holder is not None:
            key = f"{thread.key.rpartition('/')[0]}/{holder}"
            if key in self._threads:
                how = "held by" if kind == "lock" else "that is"
                return [_Link(f"{does}, {how} {_named(self._threads[key])}", target=key)]
        says = {
            "lock": "its holder is unknown",
            "thread": "that thread has ended",
            "event": "no thread has set it",
        }.get(kind, "no thread has woken it")
        return [_Link(does, end="blocked", says=says, worker=thread.worker)]

    def _handling(self, worker: str, matches: Any) -> _Thread | None:
        """The thread of a worker that handles a request, if one does."""
        for thread in self._threads.values():
            if any(item.worker == worker and item.kind == "handles" and matches(item.what) for item in thread.items):
                return thread
        return None

    def _connection(self, peer: str) -> _Link:
        does = f"waits for a connection to {peer}"
        if peer in self._snapshots:
            return _Link(does, end="unknown", says="it is being made", worker=peer)
        return self._gone(does, peer)

    def _room(self, peer: str, size: int) -> _Link:
        does = f"waits until {peer} takes {size:,} bytes"
        if peer in self._snapshots:
            return _Link(does, end="unknown", says=f"they are on their way, or {peer} does not read", worker=peer)
        return self._gone(does, peer)

    def _gone(self, does: str, peer: str) -> _Link:
        if peer in self._lost:
            return _Link(does, end="lost", says=f"{peer} is lost: {self._silent[peer]}", worker=peer)
        reason = self._silent.get(peer, "it is not known here")
        return _Link(does, end="lost" if peer in self._silent else "unknown", says=f"{peer}: {reason}", worker=peer)

    # Assembling the result.

    def result(self) -> Stuck:
        waiting = [thread for thread in self._threads.values() if self._is_found(thread)]
        # Start a cycle at a thread that holds a lock in it, else at the thread that has waited longest.
        holders = {link.target for each in self._threads.values() if each.blocked for link in self._next(each)}
        waiting.sort(key=lambda thread: (thread.key not in holders, -_waited(thread)))
        chains: list[Chain] = []
        waited_for: set[str] = set()
        todo = list(waiting)
        while todo:
            thread = todo.pop()
            new = {link.target for link in self._next(thread) if link.target} - waited_for - {thread.key}
            waited_for |= new
            todo += [self._threads[key] for key in new]
        first = [thread for thread in waiting if thread.key not in waited_for]
        for thread in first:
            self._walk(thread, chains)
        seen = {key for chain in chains for key in chain.nodes}
        for thread in waiting:  # the rest form cycles that no other thread waits for
            if thread.key not in seen:
                self._walk(thread, chains)
                seen |= {key for chain in chains for key in chain.nodes}
        chains.sort(key=lambda chain: (_SEVERITY.index(chain.end), -chain.seconds))
        nodes, edges = self._drawn(chains)
        return Stuck(nodes, edges, chains, dict(self._silent))

    def _is_found(self, thread: _Thread) -> bool:
        """Whether a thread waits for something that other threads must do."""
        if thread.looks:
            return False
        item = thread.innermost
        return (item is not None and item.kind == "waits") or (item is None and thread.awaits_future)

    def _walk(self, first: _Thread, chains: list[Chain]) -> None:
        """Add the chains that begin with this thread."""
        todo: list[tuple[list[_Thread], list[str]]] = [([first], [])]
        while todo and len(chains) < _MOST_CHAINS:
            path, said = todo.pop()
            for link in self._next(path[-1]):
                phrases = [*said, link.does]
                if not link.target:
                    last = [link.says] if link.end == "runs" else [link.does, link.says]
                    chains.append(self._chain(path, said, link, last))
                    continue
                other = self._threads[link.target]
                if other in path or len(path) >= _LONGEST:
                    chains.append(self._cycle(path, phrases, other))
                else:
                    todo.append(([*path, other], phrases))

    def _chain(self, path: list[_Thread], said: list[str], link: _Link, last: list[str]) -> Chain:
        steps = [*said, last[0]]
        sentence = f"{_named(path[0])} {', which '.join(steps)}"
        if len(last) > 1 and last[1]:
            sentence += f": {last[1]}"
        return Chain(
            link.end, sentence + ".", (*(thread.key for thread in path), _end_key(path[-1], link)), _waited(path[0])
        )

    def _cycle(self, path: list[_Thread], phrases: list[str], closing: _Thread) -> Chain:
        steps = ", which ".join(phrases)
        members = "none of them can continue" if path[-1] is not closing else "it can never continue"
        by = "" if phrases[-1].endswith(_named(closing)) else f", where {_named(closing)} waits for it in turn"
        sentence = f"{_named(path[0])} {steps}{by}: a cycle, {members}."
        return Chain("cycle", sentence, (*(thread.key for thread in path), closing.key), _waited(path[0]))

    def _drawn(self, chains: Iterable[Chain]) -> tuple[list[Node], list[Edge]]:
        nodes: dict[str, Node] = {}
        edges: dict[tuple[str, str], Edge] = {}
        for chain in chains:
            for key in chain.nodes:
                if key in nodes or key not in self._threads:
                    continue
                thread = self._threads[key]
                links = self._next(thread)
                does = links[0].says if links[0].end == "runs" else links[0].does
                nodes[key] = Node(key, thread.worker, thread.title, does, _waited(thread), at=thread.at)
                for link in links:
                    target = link.target or _end_key(thread, link)
                    if link.end != "runs":
                        edges[key, target] = Edge(key, target, link.does)
                    if link.end and link.end != "runs":
                        nodes[target] = Node(target, link.worker, link.end, link.says, kind=link.end)
        known = [edge for edge in edges.values() if edge.target in nodes]
        return list(nodes.values()), known


_ARTICLE = {"event": "an"}


def _end_key(thread: _Thread, link: _Link) -> str:
    """The key of an end. Threads that wait for the same lost worker share one node."""
    if link.end == "runs":
        return thread.key
    return f"end:{link.says}" if link.end == "lost" else f"end:{thread.key}:{link.says}"


def _named(thread: _Thread) -> str:
    return f"{thread.worker}'s {thread.title}"


def _waited(thread: _Thread) -> float:
    item = thread.innermost
    return 0.0 if item is None else item.seconds
