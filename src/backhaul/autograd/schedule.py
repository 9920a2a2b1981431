"""Schedule: which components of a pass a worker can run, and when. A pure state machine.

Any Send of the context may take part in the pass: the Sends are the *candidates*. The gradients of all tensors of a
message that take part arrive together. So a component can be run when gradients have arrived for each message of its
candidates. Otherwise the worker must know first which candidates take part: it would wait in vain for a Send whose
result never reaches the loss. Then the pass must be **resolved**. Beginning at the roots, each worker finds the Recvs
that its known sources reach (`take_part`) and tells their senders, until nothing new is found. After that (`resolve`)
the components are planned again, with only the candidates that take part.

The starter of a pass need not ask if the messages that the roots depend on say what they depend on themselves
(`graph.foresee`). That gives the same answer, since a graph does not change behind a Send.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, KeysView, Mapping
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from backhaul.autograd.functions import ROOT, Recv, rank_of
from backhaul.autograd.graph import SMALL, Component, Node, as_one, plan, reach, together

_node = attrgetter("node")
_message = attrgetter("message")


class Candidate(Protocol):
    """A Send, as far as it matters here."""

    @property
    def node(self) -> Node: ...
    @property
    def message(self) -> int:
        """The message in which its tensor was sent."""


class Source(msgspec.Struct, frozen=True, eq=False):
    """A candidate that is just that, such as the one for the roots."""

    node: Node
    message: int


class Schedule:
    """One worker's part of a pass: what has arrived, and what can be run. Not thread-safe.

    ``sources`` are the candidates.
    """

    def __init__(self, sources: Mapping[int, Candidate]) -> None:
        self._sources = dict(sources)
        self._arrived: set[int] = set()
        self._messages: set[int] = set()  # the messages for which gradients have arrived
        self._takes_part: set[int] = set()
        self._reached: set[Any] = set()
        self._resolved = False
        self._component: dict[int, Component] = {}
        self._planned = False
        self.must_resolve = False
        """Whether gradients have arrived that cannot be used before the pass is resolved."""

    @property
    def sources(self) -> KeysView[int]:
        """The candidates."""
        return self._sources.keys()

    def revive(self, sources: Mapping[int, Candidate]) -> None:
        """Add candidates that were not expected to take part."""
        self._plan_all()
        new = {source: found for source, found in sources.items() if source not in self._sources}
        self._sources.update(new)
        self._plan(new)

    def arrive(self, sources: Collection[int], find: Callable[[int], Candidate]) -> list[Component]:
        """Note that the gradients of these sources have arrived. Returns the components that can be run now.

        ``find`` returns the `Source` of one that is not a candidate yet.
        """
        if not self._planned:
            if 0 < len(sources) == len(self._sources) and self._sources.keys() == set(sources):
                component = self._as_one()
                if component is not None:
                    return [component]
            self._plan_all()
        for source in sources:
            if source not in self._component:
                # It was recorded after the pass began, by code that the pass itself runs: no other source reaches it.
                if source not in self._sources:
                    self._sources[source] = find(source)
                self._plan([source])
        self._arrived.update(sources)
        if len(sources) == 1:
            (source,) = sources
            component = self._component[source]
            if len(component.sources) == 1:  # the fast path, for a chain
                self._messages.add(self._sources[source].message)
                if component.started:
                    return []
                component.started = True
                return [component]
        found: list[Component] = []
        unclear = False
        self._messages.update(map(_message, map(self._sources.__getitem__, sources)))
        for component in dict.fromkeys(map(self._component.__getitem__, sources)):
            if component.started:  # otherwise each gradient would cost a walk over all sources of its run
                continue
            if self._arrived.issuperset(component.sources):
                component.started = True
                found.append(component)
                continue
            missing = [source for source in component.sources if source not in self._arrived]
            if self._resolved:
                found += self._start(component)
            elif not all(self._sources[source].message in self._messages for source in missing):
                unclear = True
            else:  # the gradients of all its messages are here, so the missing sources do not take part
                for replaced in self._plan(filter(self._arrived.__contains__, component.sources)):
                    found += self._start(replaced)
        if unclear:
            foreseen = None if self.must_resolve else self._foreseen()
            if foreseen is None:
                self.must_resolve = True
            else:
                found += self._resolve(foreseen)
        return self._merged(found)

    def _as_one(self) -> Component | None:
        """All candidates as one component to run now, since all gradients arrived at once.

        None if there are several and the component would be large.
        """
        nodes = dict(zip(self._sources, map(_node, self._sources.values()), strict=True))
        component = plan(nodes)[0] if len(nodes) == 1 else as_one(nodes)
        if component is not None:
            self._planned = component.started = True
            self._component = dict.fromkeys(self._sources, component)
            self._arrived.update(self._sources)
            self._messages.update(map(_message, self._sources.values()))
        return component

    def _foreseen(self) -> set[int] | None:
        """The candidates that take part, as the messages that the roots depend on say; None if some do not say."""
        if ROOT not in self._arrived:
            return None
        found: set[int] = set()
        for node, outputs in reach([self._sources[ROOT].node], set()).items():
            recv: Recv = node.recv
            if recv.reach is None:
                return None
            for output in outputs:
                found.add(recv.message + output)
                if recv.reach:
                    found.update(recv.reach[output])
        mine = {rank_of(source) for source in self._sources if source != ROOT}
        # A source that is not a candidate was run before. It must be revived, so the pass must be resolved.
        return found if all(source in self._sources for source in found if rank_of(source) in mine) else None

    def _merged(self, components: list[Component]) -> list[Component]:
        """Merge small components that do not wait: a run costs more than they do. Large ones may run in parallel."""
        if len(components) < 2:
            return components
        small: list[Component] = []
        others: list[Component] = []
        for component in components:
            is_small = component.size <= SMALL and not self.waits(component)
            (small if is_small else others).append(component)
        return components if len(small) < 2 else [together(small), *others]

    def take_part(self, sources: Iterable[int]) -> dict[Node, list[int]]:
        """Note that these sources take part. Returns the Recvs, with outputs, that they reach for the first time."""
        new = set(sources) - self._takes_part
        self._takes_part |= new
        return reach([self._sources[source].node for source in new if source in self._sources], self._reached)

    def resolve(self) -> list[Component]:
        """All sources that take part are known. Returns the components that can be run now."""
        self._reached.clear()
        return self._resolve(self._takes_part)

    def _resolve(self, takes_part: set[int]) -> list[Component]:
        self._plan_all()
        self._resolved = True
        certain = takes_part | self._arrived
        waiting: dict[Component, list[int]] = {}
        for source, component in self._component.items():
            if not component.started:
                waiting.setdefault(component, []).append(source)
        found: list[Component] = []
        unclear: list[int] = []
        for component, sources in waiting.items():
            # Some of its sources may have moved to another component.
            if len(sources) == len(component.sources) and certain.issuperset(sources):
                found.append(component)
            else:
                unclear += sources
        for source in unclear:
            del self._component[source]
        found += self._plan(filter(certain.__contains__, unclear))
        return [started for component in found for started in self._start(component)]

    def _plan_all(self) -> None:
        """Plan the candidates, once. This happens late, because often all gradients arrive at once (`_as_one`)."""
        if not self._planned:
            self._planned = True
            self._plan(self._sources)

    def _plan(self, sources: Iterable[int]) -> list[Component]:
        nodes = {source: self._sources[source].node for source in sources}
        components = plan(nodes) if nodes else []
        for component in components:
            for source in component.sources:
                self._component[source] = component
        return components

    def passed_on(self) -> list[tuple[int, Node]]:
        """The sources that lead to exactly one Recv and to nothing else, with these Recvs."""
        return [
            (source, next(iter(component.recvs)))
            for source, component in self._component.items()
            if component.recvs and not component.leaves
            if len(component.sources) == len(component.recvs) == 1 and source != ROOT
        ]

    def _start(self, component: Component) -> list[Component]:
        """Start a component if its first source has arrived; before that, its run would only wait."""
        if component.started or component.sources[0] not in self._arrived:
            return []
        component.started = True
        return [component]

    @property
    def missing(self) -> list[int]:
        """The missing sources of components that have not started, though some of their gradients have arrived."""
        waiting = {
            component
            for source in self._arrived
            if (component := self._component.get(source)) is not None and not component.started
        }
        return sorted(source for component in waiting for source in component.sources if source not in self._arrived)

    def waits(self, component: Component) -> bool:
        """Whether a run of the component will wait for some of its sources."""
        return not self._arrived.issuperset(component.sources)
