"""A pass at one worker, without messages: what it keeps, what it charges for, and its state after a failure."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from backhaul.autograd.contexts import Contexts, Record, Send
from backhaul.autograd.functions import send
from backhaul.autograd.local_pass import LocalPass
from backhaul.errors import QuotaError
from backhaul.ids import WorkerInfo
from backhaul.trust.checking import Charges
from backhaul.wire.messages import Pass

ME, PEER = WorkerInfo(0, "worker0"), WorkerInfo(1, "worker1")
GRADIENT = (torch.ones(3),)
BYTES = 12


class Made(NamedTuple):
    local: LocalPass
    record: Record
    sources: list[int]


def made(count: int = 1, charges: Charges | None = None) -> Made:
    """A pass of a context in which ``count`` tensors were sent to the peer, one by one."""
    contexts = Contexts(ME)
    record = contexts.new()
    sources = [contexts.new_id() for _ in range(count)]
    for source in sources:
        tensor = 2 * torch.ones(3, requires_grad=True)
        output = send(source, [tensor])
        record.add({source: Send(source, PEER, output.grad_fn, output, tensor.device)})
    id = contexts.new_id()
    return Made(LocalPass(Pass(id, record.id, id, False, False), record, None, charges), record, sources)


def test_gradients_that_arrive_can_run() -> None:
    local, _, (source,) = made()
    components, ask = local.arrive({source: GRADIENT}, PEER.id)
    assert [component.sources for component in components] == [[source]]
    assert not ask
    assert local.has(source)


def test_a_failed_pass_keeps_no_gradients() -> None:
    local, _, (source,) = made()
    local.arrive({source: GRADIENT}, PEER.id)
    assert local.fail(ValueError("wrong"), "worker1")
    assert not local.has(source)
    assert not local.fail(ValueError("again"), "worker1")


def test_a_failed_pass_takes_no_gradients() -> None:
    local, _, (source,) = made()
    local.fail(ValueError("wrong"), "worker1")
    assert local.arrive({source: GRADIENT}, PEER.id) == ([], False)
    assert not local.has(source)
    assert local.take_part([source]) == {}
    assert local.resolve() == []


def test_a_failed_pass_gives_no_work_away() -> None:
    local, _, _ = made()
    local.giving_to(PEER.id)
    assert local.helpers == {PEER.id}
    local.fail(ValueError("wrong"), "worker1")
    with pytest.raises(ValueError, match="wrong"):
        local.giving_to(2)
    assert local.helpers == {PEER.id}
    with pytest.raises(ValueError, match="wrong"):
        local.require_going()


def test_a_pass_that_fails_is_noted_as_aborted_unless_it_is_over() -> None:
    local, record, _ = made()
    local.fail(ValueError("wrong"), "worker1")
    assert record.aborted == {local.backward.id}
    local, record, _ = made()
    record.raise_floor(ME.id, local.backward.id + 1)
    local.fail(ValueError("wrong"), "worker1")
    assert record.aborted == set()


def test_a_failed_pass_depends_on_no_worker() -> None:
    local, _, _ = made()
    local.giving_to(PEER.id)
    local.got_from(2)
    assert [local.depends_on(rank) for rank in (1, 2, 3)] == [True, True, False]
    local.fail(ValueError("wrong"), "worker1")
    assert not local.depends_on(PEER.id)


def test_gradients_that_wait_are_charged_until_the_pass_fails() -> None:
    charges = Charges(2 * BYTES)
    local, _, sources = made(3, charges)
    local.arrive({sources[0]: GRADIENT}, PEER.id)
    assert charges.of(PEER.id) == BYTES
    local.arrive({sources[1]: GRADIENT}, PEER.id)
    with pytest.raises(QuotaError, match="24 bytes of gradients from this peer"):
        local.arrive({sources[2]: GRADIENT}, PEER.id)
    local.fail(ValueError("wrong"), "worker1")
    assert charges.of(PEER.id) == 0


def test_a_context_that_ends_ends_the_pass() -> None:
    local, _, (source,) = made()
    local.arrive({source: GRADIENT}, PEER.id)
    assert local.end()
    assert local.failed
    assert not local.has(source)
    assert local.arrive({source: GRADIENT}, PEER.id) == ([], False)
