"""A short record of what happened in a `simulation`."""

from __future__ import annotations

from typing import Any

from simulated_network import Brought, Connection

from backhaul.ids import RefId, ShareId
from backhaul.wire.messages import Sweep, Swept

_MOST_LINES = 60
_ALWAYS = "dies", "learns death of", "breaks", "notices end of"


class Trace:
    """Events: the worker, what it does, and with what."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def add(self, *event: Any) -> None:
        self.events.append(event)

    def lines(self, *about: RefId) -> list[str]:
        """All events, or those about these references; only the last ones if there are very many."""
        if not about:
            return [" ".join(map(show, event)) for event in self.events]
        named: set[Any] = set(about)
        for event in self.events:
            named |= {part.share for part in event if isinstance(part, Brought) and part.ref in about}
        lines = [" ".join(map(show, event)) for event in self.events if event[1] in _ALWAYS or _mentions(event, named)]
        left_out = len(lines) - _MOST_LINES
        return lines if left_out <= 0 else [f"({left_out} lines left out)", *lines[left_out:]]


def _mentions(thing: Any, named: set[Any]) -> bool:
    if isinstance(thing, RefId | ShareId):
        return thing in named
    if isinstance(thing, Sweep | Swept):
        return True
    return any(_mentions(part, named) for part in _parts(thing))


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, tuple | set | frozenset):
        return list(thing)
    return [getattr(thing, field) for field in getattr(thing, "__struct_fields__", ())]


def show(thing: Any) -> str:
    """A short text for people."""
    if isinstance(thing, ShareId):
        return f"s{thing.sharer}.{thing.number}"
    if isinstance(thing, Brought):
        return f"{thing.ref} as {show(thing.share)}{'' if thing.claim else ', no claim'}"
    if isinstance(thing, str | int | RefId | Connection):
        return str(thing)
    inside = ", ".join(map(show, _parts(thing)))
    if isinstance(thing, set):
        return "{" + inside + "}"
    name = "" if type(thing) is tuple else type(thing).__name__
    return f"{name}({inside})"
