"""Part: what of a pass is one worker's, and when it can be run. A pure state machine.

Any Send of the context may turn out to take part: these are the *candidates*. A component with one candidate
is run when its gradients come. For one with several it must be known first which of them take part: a Send whose
result never reaches the loss would be waited for in vain. Then the pass has to be **resolved**: beginning at the
roots, each worker finds the Recvs that its known sources reach (`take_part`) and tells their senders, until nothing new
is found. After that (`resolve`) the components are planned again, with those that take part only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from backhaul.autograd.graph import Component, Node, plan, reach


class Part:
    """Not thread-safe. ``sources`` are the candidates, and where they start."""

    def __init__(self, sources: Mapping[int, Sequence[Node]], *, needs_leaves: bool = True) -> None:
        self._sources = dict(sources)
        self._arrived: set[int] = set()
        self._takes_part: set[int] = set()
        self._reached: set[Node] = set()
        self._resolved = False
        if len(sources) == 1 and not needs_leaves:
            components = [Component(list(sources), (), ())]
        else:
            components = plan(self._sources)
        self._component = {source: component for component in components for source in component.sources}
        self.must_resolve = False
        """Something has arrived that cannot be run before the pass is resolved."""

    def arrive(self, source: int, starts: Sequence[Node] = ()) -> Component | None:
        """The gradients of a source are here: what can be run now. ``starts`` is for one that is not a candidate."""
        if source not in self._component:
            # Recorded after the pass began, by what the pass itself runs: nothing else can lead there.
            starts = self._sources.setdefault(source, starts)
            self._component[source] = plan({source: starts})[0]
        self._arrived.add(source)
        component = self._component[source]
        if len(component.sources) > 1 and not self._resolved:
            self.must_resolve = True
            return None
        return self._start(component)

    def take_part(self, sources: Iterable[int]) -> list[Node]:
        """These sources take part: the Recvs that they reach and that are not known to, yet."""
        new = set(sources) - self._takes_part
        self._takes_part |= new
        return reach([start for source in new for start in self._sources.get(source, ())], self._reached)

    def resolve(self) -> list[Component]:
        """All that take part are known: what can be run now."""
        self._resolved = True
        self._reached.clear()
        several = {source for source, component in self._component.items() if len(component.sources) > 1}
        certain = {source: self._sources[source] for source in several if source in self._takes_part | self._arrived}
        for source in several:
            del self._component[source]
        components = plan(certain) if certain else []
        self._component.update({source: component for component in components for source in component.sources})
        return [component for component in components if self._start(component) is not None]

    def has(self, source: int) -> bool:
        """Whether it is a candidate."""
        return source in self._sources

    def _start(self, component: Component) -> Component | None:
        """A run begins with its first source. It would only wait for it, otherwise."""
        if component.started or component.sources[0] not in self._arrived:
            return None
        component.started = True
        return component
