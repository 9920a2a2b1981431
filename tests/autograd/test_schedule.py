"""Schedule: what can be run when, from tables of events, and against a model with random graphs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from graphs import PEER, Graph, expected, leaf, met, outputs, received, recv_of, rooted, sent
from torch import Tensor

from backhaul.autograd.functions import ID_BITS, ROOT
from backhaul.autograd.graph import Component, Node
from backhaul.autograd.schedule import Schedule, Source

THEIRS = PEER.id << ID_BITS
"""The first id of the peer."""


def one(source: int, tensor: Tensor) -> dict[int, Source]:
    """A message with one tensor."""
    return {source: Source(sent(source, tensor), source)}


def message(first: int, *tensors: Tensor) -> dict[int, Source]:
    """A message with several tensors. Their sources are numbered from ``first``, which is also the message's id."""
    return {source: Source(sent(source, tensor), first) for source, tensor in enumerate(tensors, first)}


def roots(*tensors: Tensor) -> dict[int, Source]:
    return {ROOT: Source(rooted(*tensors), ROOT)}


def come(schedule: Schedule, candidates: Mapping[int, Source], *sources: int) -> list[list[int]]:
    """Let the gradients of these sources arrive. Returns the sources of the components that can be run."""
    return [component.sources for component in schedule.arrive(sources, candidates.__getitem__)]


def resolved(schedule: Schedule) -> list[list[int]]:
    return sorted(component.sources for component in schedule.resolve())


@pytest.fixture
def common() -> Tensor:
    """A tensor on which several Sends depend."""
    return torch.sin(leaf())


def test_one_candidate_is_run_as_its_gradients_come() -> None:
    sources = one(50, leaf() * 2)
    schedule = Schedule(sources)
    assert come(schedule, sources, 50) == [[50]]
    assert not schedule.must_resolve


def test_nothing_that_comes_starts_nothing() -> None:
    assert come(Schedule({}), {}) == []


def test_the_only_candidate_may_be_large_and_comes_once() -> None:
    x = leaf()
    for _ in range(100):
        x = x + 1
    sources = one(50, x)
    schedule = Schedule(sources)
    assert come(schedule, sources, 50) == [[50]]
    assert come(schedule, sources, 50) == []
    late = {**sources, **one(60, leaf() * 2)}  # recorded by code that the pass itself ran
    assert come(schedule, late, 60) == [[60]]
    assert resolved(schedule) == []
    assert not schedule.must_resolve


def test_independent_candidates_are_run_as_their_gradients_come() -> None:
    x = leaf()
    sources = {**one(50, x * 2), **one(60, x * 3), **roots(x * 4)}
    schedule = Schedule(sources)
    assert come(schedule, sources, 60) == [[60]]
    assert come(schedule, sources, ROOT) == [[ROOT]]
    assert come(schedule, sources, 50) == [[50]]
    assert not schedule.must_resolve


def test_one_message_is_one_run(common: Tensor) -> None:
    """Whether or not its tensors depend on a common node."""
    sources = {**message(50, common, common * 2), **message(60, leaf(), leaf() * 2, leaf())}
    schedule = Schedule(sources)
    assert come(schedule, sources, 50, 51) == [[51, 50]]
    assert come(schedule, sources, 60, 61, 62) == [[62, 61, 60]]
    assert not schedule.must_resolve


def test_tensors_of_a_message_that_get_no_gradient_are_not_run(common: Tensor) -> None:
    x = common * 2
    sources = message(50, common, x, leaf(), common * 3)
    schedule = Schedule(sources)
    (component,) = schedule.arrive((51, 53), sources.__getitem__)
    assert component.sources == [53, 51]
    assert sources[50].node not in component.nodes
    assert not schedule.must_resolve


def test_the_rest_of_a_message_is_one_run_even_if_it_falls_apart() -> None:
    x, y = leaf() * 2, leaf() * 2
    sources = message(50, x, x * y, y)
    schedule = Schedule(sources)
    assert come(schedule, sources, 50, 52) == [[52, 50]]


def test_an_empty_schedule_runs_a_source_that_comes_later() -> None:
    schedule = Schedule({})
    assert schedule.take_part([3]) == {}
    assert schedule.resolve() == []
    assert come(schedule, one(50, leaf()), 50) == [[50]]


def test_candidates_of_several_messages_must_be_resolved_first(common: Tensor) -> None:
    sources = {**one(50, common), **one(60, common)}
    schedule = Schedule(sources)
    assert come(schedule, sources, 60) == []
    assert schedule.must_resolve
    schedule.take_part([50, 60])
    (component,) = schedule.resolve()
    assert component.sources == [60, 50]
    assert schedule.waits(component)
    # Its run has started, and waits for this gradient itself.
    assert come(schedule, sources, 50) == []
    assert not schedule.waits(component)


def test_candidates_that_have_all_come_need_not_be_resolved(common: Tensor) -> None:
    """Resolving may have begun, and sources that get no gradient may be missing from their messages."""
    sources = {**message(50, common, common * 2), **message(60, common * 3, common * 4, leaf())}
    schedule = Schedule(sources)
    assert come(schedule, sources, 61, 62) == [[62]]
    assert schedule.must_resolve
    assert come(schedule, sources, 50) == [[61, 50]]
    schedule.take_part([50, 61, 62])
    assert resolved(schedule) == []


def test_several_messages_may_come_at_once(common: Tensor) -> None:
    """Messages that come at once become one run."""
    sources = {**one(50, common), **one(60, common), **one(70, leaf())}
    schedule = Schedule(sources)
    assert come(schedule, sources, 50, 60, 70) == [[70, 60, 50]]
    assert not schedule.must_resolve


def deep(count: int) -> Tensor:
    x = leaf()
    for _ in range(count):
        x = x + 1
    return x


def test_large_components_are_runs_of_their_own() -> None:
    """Large components may run in parallel; small ones are merged."""
    sources = message(50, deep(100), leaf(), deep(80), leaf() * 2)
    schedule = Schedule(sources)
    assert sorted(come(schedule, sources, 50, 51, 52, 53)) == [[50], [52], [53, 51]]
    sources = message(50, deep(100), leaf(), deep(80))
    assert sorted(come(Schedule(sources), sources, 50, 51, 52)) == [[50], [51], [52]]


def test_a_run_begins_when_its_first_source_is_here(common: Tensor) -> None:
    sources = {**one(50, common), **one(60, common)}
    schedule = Schedule(sources)
    assert come(schedule, sources, 50) == []
    schedule.take_part([50, 60])
    assert resolved(schedule) == []
    assert come(schedule, sources, 60) == [[60, 50]]


def test_the_roots_are_the_first_source(common: Tensor) -> None:
    sources = {**one(50, common), **roots(common * 2, *received(1000))}
    schedule = Schedule(sources)
    assert come(schedule, sources, ROOT) == []
    assert schedule.must_resolve
    schedule.take_part([ROOT, 50])
    assert resolved(schedule) == [[ROOT, 50]]


def test_a_candidate_that_takes_no_part_is_not_waited_for(common: Tensor) -> None:
    sources = {**one(50, common), **one(60, common), **one(70, common)}
    schedule = Schedule(sources)
    assert come(schedule, sources, 50) == []
    schedule.take_part([50, 60])
    assert resolved(schedule) == []
    assert come(schedule, sources, 60) == [[60, 50]]


def test_components_without_an_absent_candidate_may_fall_apart() -> None:
    x, y = leaf() * 2, leaf() * 2
    sources = {**one(50, x), **one(60, y), **one(70, x * y)}
    schedule = Schedule(sources)
    assert come(schedule, sources, 50) == []
    schedule.take_part([50, 60])
    assert resolved(schedule) == [[50]]
    assert come(schedule, sources, 60) == [[60]]


def test_one_tensor_of_a_message_waits_for_other_messages(common: Tensor) -> None:
    """A component without gates runs now, and separately from one with gates."""
    sources = {**one(40, common), **message(50, common * 2, leaf()), **message(60, leaf(), leaf())}
    schedule = Schedule(sources)
    assert come(schedule, sources, 50, 51) == [[51]]
    assert schedule.must_resolve
    schedule.take_part([40, 50, 51])
    assert resolved(schedule) == [[50, 40]]
    # Separate components are merged afterwards too.
    assert sorted(itertools.chain(*come(schedule, sources, 60, 61))) == [60, 61]


def test_runs_that_wait_are_not_put_together(common: Tensor) -> None:
    """A gate of one would delay the other."""
    other = torch.sin(leaf())
    sources = {**one(40, common), **one(41, other), **message(50, common * 2, other * 2)}
    schedule = Schedule(sources)
    schedule.take_part(list(sources))
    assert resolved(schedule) == []
    assert sorted(come(schedule, sources, 50, 51)) == [[50, 40], [51, 41]]


def test_a_candidate_whose_gradient_has_come_takes_part(common: Tensor) -> None:
    """The TakePart message for the candidate need not have arrived."""
    sources = {**one(50, common), **one(60, common)}
    schedule = Schedule(sources)
    come(schedule, sources, 60)
    assert resolved(schedule) == [[60]]


def test_a_candidate_that_was_run_is_not_run_again_after_resolving(common: Tensor) -> None:
    sources = {**one(40, leaf()), **one(50, common), **one(60, common)}
    schedule = Schedule(sources)
    assert come(schedule, sources, 40) == [[40]]
    come(schedule, sources, 60)
    schedule.take_part([40, 50, 60])
    assert resolved(schedule) == [[60, 50]]
    assert come(schedule, sources, 40) == []


def test_a_candidate_that_comes_unexpectedly_is_run_alone(common: Tensor) -> None:
    sources = {**one(50, common), **one(60, common)}
    schedule = Schedule(sources)
    come(schedule, sources, 60)
    schedule.take_part([60])
    assert resolved(schedule) == [[60]]
    assert come(schedule, sources, 50) == [[50]]


def test_a_source_that_was_recorded_since_is_run_alone(common: Tensor) -> None:
    schedule = Schedule(one(50, common))
    late = one(90, common)
    (component,) = schedule.arrive(late, late.__getitem__)
    assert component.sources == [90]
    assert len(component.leaves) == 1


def test_a_source_is_run_once() -> None:
    sources = one(50, leaf())
    schedule = Schedule(sources)
    assert come(schedule, sources, 50) == [[50]]
    assert come(schedule, sources, 50) == []


def test_take_part_returns_each_output_once() -> None:
    (x, z), (y,) = received(1000, 2), received(1001)
    schedule = Schedule({**one(50, x), **message(60, x * y, z), **roots(leaf() * 2)})
    assert schedule.take_part([ROOT]) == {}
    assert schedule.take_part([50, 50]) == {recv_of(x): [0]}
    assert schedule.take_part([50]) == {}
    assert schedule.take_part([60, 77]) == {recv_of(y): [0]}
    assert schedule.take_part([61]) == {recv_of(x): [1]}


def test_roots_with_known_dependencies_need_no_resolving(common: Tensor) -> None:
    """The messages carry the dependencies, so no worker must be asked."""
    (x,) = received(THEIRS, reach=((50, 3 << ID_BITS),))
    sources = {**one(50, common), **one(60, common), **roots(common * x)}
    schedule = Schedule(sources)
    (component,) = schedule.arrive([ROOT], sources.__getitem__)
    assert component.sources == [ROOT, 50]
    assert schedule.waits(component)
    assert not schedule.must_resolve
    assert come(schedule, sources, 50) == []


@pytest.mark.parametrize("tensors", [(), received(THEIRS, reach=()), received(THEIRS, 2, ((), (50,)))[:1]])
def test_roots_that_depend_on_no_candidate_are_run_alone(common: Tensor, tensors: Sequence[Tensor]) -> None:
    sources = {**one(50, common), **roots(common * 2, *tensors)}
    schedule = Schedule(sources)
    assert come(schedule, sources, ROOT) == [[ROOT]]
    assert not schedule.must_resolve


def test_one_message_with_unknown_dependencies_needs_resolving(common: Tensor) -> None:
    (x,), (y,) = received(THEIRS, reach=((50,),)), received(THEIRS + 1)
    sources = {**one(50, common), **roots(common * x * y)}
    schedule = Schedule(sources)
    assert come(schedule, sources, ROOT) == []
    assert schedule.must_resolve


def test_a_source_that_is_no_candidate_any_more_is_asked_about(common: Tensor) -> None:
    (x,) = received(THEIRS, reach=((40, 50),))
    sources = {**one(50, common), **roots(common * x)}
    schedule = Schedule(sources)
    assert come(schedule, sources, ROOT) == []
    assert schedule.must_resolve


def test_a_worker_that_did_not_start_the_pass_has_to_ask(common: Tensor) -> None:
    (x,) = received(THEIRS, reach=())
    sources = {**one(50, common), **one(60, common * x)}
    schedule = Schedule(sources)
    assert come(schedule, sources, 60) == []
    assert schedule.must_resolve


def test_another_worker_may_still_ask_to_resolve_the_pass(common: Tensor) -> None:
    """What the starter has foreseen is not confused with what TakePart messages say."""
    (x,) = received(THEIRS, reach=((50,),))
    sources = {**one(50, common), **roots(common * x)}
    schedule = Schedule(sources)
    assert come(schedule, sources, ROOT) == [[ROOT, 50]]
    assert schedule.take_part([ROOT]) == {recv_of(x): [0]}
    assert schedule.take_part([50]) == {}


class Model:
    """By definition: which sources run together, and when their run begins."""

    def __init__(self, sources: Mapping[int, Source]) -> None:
        self.sources = sources
        self.arrived: set[int] = set()
        self.messages: set[int] = set()
        self.takes_part: set[int] = set()
        self.resolved = False
        self.must_resolve = False
        self.groups: dict[int, frozenset[int]] = {}
        self.begun: set[frozenset[int]] = set()
        self._group(sources)

    def _group(self, sources: Sequence[int] | Mapping[int, Source]) -> list[frozenset[int]]:
        groups = list(expected({source: self.sources[source].node for source in sources}))
        self.groups.update({source: group for group in groups for source in group})
        return groups

    def arrive(self, batch: Sequence[int]) -> set[frozenset[int]]:
        self.arrived.update(batch)
        self.messages.update(self.sources[source].message for source in batch)
        found: set[frozenset[int]] = set()
        for group in {self.groups[source] for source in batch}:
            if self.resolved or group <= self.arrived:
                found |= self._begin(group)
            elif {self.sources[source].message for source in group} <= self.messages:
                for schedule in self._group([source for source in group if source in self.arrived]):
                    found |= self._begin(schedule)
            else:
                self.must_resolve = True
        return found

    def resolve(self) -> set[frozenset[int]]:
        self.resolved = True
        known = self.takes_part | self.arrived
        unclear = [source for source, group in self.groups.items() if group not in self.begun]
        groups = self._group([source for source in unclear if source in known])
        return set().union(*(self._begin(group) for group in groups)) if groups else set()

    def _begin(self, group: frozenset[int]) -> set[frozenset[int]]:
        first = ROOT if ROOT in group else max(group)
        if group in self.begun or first not in self.arrived:
            return set()
        self.begun.add(group)
        return {group}

    def waits(self, group: frozenset[int]) -> bool:
        return not group <= self.arrived


def follows(started: Sequence[Component], wanted: set[frozenset[int]], model: Model) -> None:
    """Check that the schedule starts what the model starts. It may merge components that need not wait."""
    for component in started:
        sources = frozenset(component.sources)
        edges = met(model.sources[source].node for source in sources)
        assert {node: set(places) for node, places in component.recvs.items()} == outputs(edges)
        parts = {group for group in wanted if group <= sources}
        assert frozenset().union(*parts) == sources
        assert len(parts) == 1 or not any(map(model.waits, parts))
    assert sorted(source for component in started for source in component.sources) == sorted(
        source for group in wanted for source in group
    )


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_in_random_orders(seed: int) -> None:
    """Random sources take part and arrive in any order. The pass is resolved when it must be, or later."""
    for number in range(30):
        draw = random.Random(1000 * seed + number)
        sources = Graph(1000 * seed + number).sources
        taking_part = [source for source in sources if draw.random() < 0.7] or list(sources)[:1]
        model = Model(sources)
        schedule = Schedule(sources)
        told = list(taking_part)
        batches: dict[int, list[int]] = {}
        for source in taking_part:
            batches.setdefault(sources[source].message, []).append(source)
        coming = list(batches.values())
        draw.shuffle(told)
        draw.shuffle(coming)
        if len(coming) > 1 and draw.random() < 0.3:  # several from one worker, sent together
            coming[-2:] = [coming[-1] + coming[-2]]
        found: dict[Node, set[int]] = {}
        run: list[int] = []
        while coming or (model.must_resolve and not model.resolved):
            if told and draw.random() < 0.5:
                source = told.pop()
                model.takes_part.add(source)
                for node, places in schedule.take_part([source]).items():
                    found.setdefault(node, set()).update(places)
                if not model.resolved:
                    assert found == outputs(met(sources[each].node for each in model.takes_part))
            elif model.must_resolve and not model.resolved and not told and draw.random() < 0.5:
                started = schedule.resolve()
                follows(started, model.resolve(), model)
                run += itertools.chain.from_iterable(component.sources for component in started)
            elif coming:
                batch = coming.pop()
                started = schedule.arrive(batch, sources.__getitem__)
                follows(started, model.arrive(batch), model)
                assert schedule.must_resolve == model.must_resolve
                run += itertools.chain.from_iterable(component.sources for component in started)
        # Every source that takes part is run once, and no other source is.
        assert sorted(run) == sorted(taking_part)


def test_missing_sources_are_those_that_a_waiting_component_lacks(common: Tensor) -> None:
    sources = {**one(50, common * 2), **one(60, common * 3), **one(70, leaf() * 2)}
    schedule = Schedule(sources)
    come(schedule, sources, 60)
    assert schedule.missing == [50]
    come(schedule, sources, 50)
    assert schedule.missing == []


def test_a_component_that_has_started_is_no_longer_listed(common: Tensor) -> None:
    """A run that has started reports itself what it waits for."""
    sources = {**one(50, common), **one(60, common)}
    schedule = Schedule(sources)
    come(schedule, sources, 60)
    schedule.take_part([50, 60])
    (component,) = schedule.resolve()
    assert schedule.waits(component)
    assert schedule.missing == []


def test_a_component_whose_gradients_all_came_at_once_does_not_wait(common: Tensor) -> None:
    sources = {**one(50, common * 2), **one(60, common * 3)}
    schedule = Schedule(sources)
    (component,) = schedule.arrive([50, 60], sources.__getitem__)
    assert not schedule.waits(component)
