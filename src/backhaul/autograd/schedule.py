"""Schedule: what a worker can run of a pass, and when. A pure state machine.

Any Send of the context may turn out to take part: these are the *candidates*. The gradients of all tensors of a
message that take part come together. So if gradients are here for each message that a component has candidates of, it
can be run. Otherwise it must be known first which of the candidates take part: a Send whose result never
reaches the loss would be waited for in vain. Then the pass has to be **resolved**:
beginning at the roots, each worker finds the Recvs that its known sources reach (`take_part`) and tells their senders,
until nothing new is found. After that (`resolve`) the components are planned again, with those that take part only.

The starter of a pass need not ask if the messages that the roots depend on have told what they depend on themselves
(`graph.foresee`): that is the same answer, since a graph does not change behind a Send.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from backhaul.autograd.functions import ROOT, Recv, rank_of
from backhaul.autograd.graph import SMALL, Component, Node, as_one, plan, reach, together


class Source(msgspec.Struct, frozen=True, eq=False):
    """A candidate: its node, and the message that its tensor was sent in."""

    node: Node
    message: int


class Schedule:
    """Not thread-safe. ``sources`` are the candidates."""

    def __init__(self, sources: Mapping[int, Source]) -> None:
        self._sources = dict(sources)
        self._arrived: set[int] = set()
        self._messages: set[int] = set()  # of which gradients have arrived
        self._takes_part: set[int] = set()
        self._reached: set[Any] = set()
        self._resolved = False
        self._component: dict[int, Component] = {}
        self._planned = False
        self.must_resolve = False
        """Something has arrived that cannot be run before the pass is resolved."""

    def __contains__(self, source: int) -> bool:
        """Whether it is a candidate."""
        return source in self._sources

    def revive(self, sources: Mapping[int, Source]) -> None:
        """More candidates, which nobody expected."""
        self._plan_all()
        new = {source: found for source, found in sources.items() if source not in self._sources}
        self._sources.update(new)
        self._plan(new)

    def arrive(self, sources: Collection[int], find: Callable[[int], Source]) -> list[Component]:
        """The gradients of these sources are here: what can be run now. ``find`` gets those that are no candidates."""
        if len(sources) > 1 and not self._planned and self._sources.keys() == set(sources):
            component = self._as_one()
            if component is not None:
                return [component]
        self._plan_all()
        for source in sources:
            if source not in self._component:
                # Recorded after the pass began, by what the pass itself runs: nothing else can lead there.
                if source not in self._sources:
                    self._sources[source] = find(source)
                self._plan([source])
        self._arrived.update(sources)
        if len(sources) == 1:
            (source,) = sources
            if len(self._component[source].sources) == 1:  # as in a chain
                self._messages.add(self._sources[source].message)
                return self._start(self._component[source])
        self._messages.update(self._sources[source].message for source in sources)
        found: list[Component] = []
        unclear = False
        for component in dict.fromkeys(self._component[source] for source in sources):
            if component.started:  # or each gradient would cost a look at all sources of its run
                continue
            missing = [source for source in component.sources if source not in self._arrived]
            if self._resolved or not missing:
                found += self._start(component)
            elif not all(self._sources[source].message in self._messages for source in missing):
                unclear = True
            else:  # what is missing of messages whose gradients are here does not take part
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
        """All candidates as one component to run now: the gradients of all have come at once. None if it is large."""
        component = as_one({source: found.node for source, found in self._sources.items()})
        if component is not None:
            self._planned = component.started = True
            self._component = dict.fromkeys(self._sources, component)
            self._arrived.update(self._sources)
            self._messages.update(found.message for found in self._sources.values())
        return component

    def _foreseen(self) -> set[int] | None:
        """The candidates that take part, as the messages that the roots depend on have told; None if not all have."""
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
        # One that is not a candidate was run before: it has to be revived.
        return found if all(source in self._sources for source in found if rank_of(source) in mine) else None

    def _merged(self, components: list[Component]) -> list[Component]:
        """Small ones that do not wait as one: a run costs more than they do. Large ones may be run side by side."""
        if len(components) < 2:
            return components
        small: list[Component] = []
        others: list[Component] = []
        for component in components:
            is_small = component.size <= SMALL and not self.waits(component)
            (small if is_small else others).append(component)
        return components if len(small) < 2 else [together(small), *others]

    def take_part(self, sources: Iterable[int]) -> dict[Node, list[int]]:
        """These sources take part: the Recvs that they reach and which outputs, those that are not known to, yet."""
        new = set(sources) - self._takes_part
        self._takes_part |= new
        return reach([self._sources[source].node for source in new if source in self._sources], self._reached)

    def resolve(self) -> list[Component]:
        """All that take part are known: what can be run now."""
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
            # Some of its sources may be in another component by now.
            if len(sources) == len(component.sources) and certain.issuperset(sources):
                found.append(component)
            else:
                unclear += sources
        for source in unclear:
            del self._component[source]
        found += self._plan(filter(certain.__contains__, unclear))
        return [started for component in found for started in self._start(component)]

    def _plan_all(self) -> None:
        """Plan the candidates, unless that has been done. Not before it is needed: often all come at once."""
        if not self._planned:
            self._planned = True
            self._plan(self._sources)

    def _plan(self, sources: Iterable[int]) -> list[Component]:
        nodes = {source: self._sources[source].node for source in sources}
        components = plan(nodes) if nodes else []
        self._component.update({source: component for component in components for source in component.sources})
        return components

    def passed_on(self) -> list[tuple[int, Node]]:
        """The sources that lead to one Recv and to nothing else, and those Recvs."""
        return [
            (source, next(iter(component.recvs)))
            for source, component in self._component.items()
            if len(component.sources) == len(component.recvs) == 1 and not component.leaves and source != ROOT
        ]

    def _start(self, component: Component) -> list[Component]:
        """A run begins with its first source. It would only wait for it, otherwise."""
        if component.started or component.sources[0] not in self._arrived:
            return []
        component.started = True
        return [component]

    @property
    def missing(self) -> list[int]:
        """The sources that runs cannot begin without, though others of theirs are here."""
        waiting = {
            component
            for source in self._arrived
            if (component := self._component.get(source)) is not None and not component.started
        }
        return sorted(source for component in waiting for source in component.sources if source not in self._arrived)

    def waits(self, component: Component) -> bool:
        """Whether a run of it will have to wait for some of its sources."""
        return not self._arrived.issuperset(component.sources)
