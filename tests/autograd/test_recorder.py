"""What a worker notes about the contexts of messages: the tables alone, without a worker."""

from __future__ import annotations

import pytest
import torch

from backhaul.autograd import contexts as module
from backhaul.autograd.contexts import Contexts, Record, current_context
from backhaul.autograd.functions import ID_BITS
from backhaul.autograd.recording import Recorder
from backhaul.errors import ContextError, ProtocolError
from backhaul.ids import WorkerInfo
from backhaul.options import Quotas
from backhaul.wire.messages import Mark

ME, PEER = WorkerInfo(0, "worker0"), WorkerInfo(1, "worker1")
THEIRS = 1 << ID_BITS


def recorder(contexts: Contexts) -> Recorder:
    return Recorder(contexts, torch.zeros((), requires_grad=True))


def test_the_sender_of_a_message_is_noted_with_its_context() -> None:
    contexts = Contexts(ME)
    record = contexts.join(THEIRS + 1, PEER)
    assert record is not None
    assert record.workers() == {PEER.id}
    contexts.join(THEIRS + 1, WorkerInfo(2, "worker2"))
    assert record.workers() == {1, 2}


def test_only_the_latest_ended_contexts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 2)
    contexts = Contexts(ME)
    for id in (1, 2, 3):
        contexts.join(THEIRS + id, PEER)
        contexts.end(THEIRS + id)
    assert contexts.join(THEIRS + 3, PEER) is None, "a late message would bring it back"
    assert contexts.join(THEIRS + 2, PEER) is None
    assert contexts.join(THEIRS + 1, PEER) is not None


def test_a_peer_s_open_contexts_are_limited() -> None:
    contexts = Contexts(ME, Quotas(contexts=2))
    for id in (1, 2):
        contexts.join(THEIRS + id, PEER)
    with pytest.raises(ContextError, match="this peer has 2 open autograd contexts already"):
        contexts.join(THEIRS + 3, PEER)
    contexts.end(THEIRS + 1)
    assert contexts.join(THEIRS + 3, PEER) is not None


def test_the_floor_of_ended_passes_only_rises() -> None:
    record = Record(THEIRS)
    record.raise_floor(PEER.id, THEIRS + 9)
    record.raise_floor(PEER.id, THEIRS + 5)
    assert record.is_over(THEIRS + 8)
    assert not record.is_over(THEIRS + 9)
    assert not record.is_over(1), "that of another worker"


def test_a_context_that_ends_meanwhile_records_nothing() -> None:
    """The context ends after it was looked up, and before the worker is noted that must be told of its end."""
    contexts = Contexts(ME)
    record = contexts.new()
    record.over = True
    tensors = [torch.ones(2, requires_grad=True)]
    token = current_context.set(record.id)
    try:
        assert recorder(contexts).asking(tensors, PEER) == (None, tensors)
    finally:
        current_context.reset(token)
    assert record.sends == {}


def test_without_gradients_only_the_values_leave() -> None:
    contexts = Contexts(ME)
    record = contexts.new()
    token = current_context.set(record.id)
    try:
        with torch.no_grad():
            mark, (sent,) = recorder(contexts).asking([torch.ones(2, requires_grad=True)], PEER)
    finally:
        current_context.reset(token)
    assert mark is not None
    assert not mark.grad
    assert not sent.requires_grad
    assert record.sends == {}
    assert record.workers() == {PEER.id}, "it takes part, and hears of the end"


def test_a_message_with_a_number_of_another_worker_is_refused() -> None:
    contexts = Contexts(ME)
    tensors = [torch.ones(2, requires_grad=True)]
    with pytest.raises(ProtocolError, match="does not belong to its sender, worker 'worker1'"):
        recorder(contexts).received(Mark(THEIRS + 1, (2 << ID_BITS) + 1), tensors, PEER)
    (received,) = recorder(contexts).received(Mark(THEIRS + 1, THEIRS + 2), tensors, PEER)
    assert received.grad_fn is not None
