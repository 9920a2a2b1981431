"""The order of work in a pass: which messages it sends, how early, and what runs while a gate waits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import W, call, layer, leaf, new_weights
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.agent.calling import Calling
from backhaul.agent.line import Line
from backhaul.testing import InProcessCluster
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.messages import KINDS, Failure, Gradients, Result

PATIENCE = 10.0


@pytest.fixture(autouse=True)
def _weights() -> None:
    new_weights()


@contextmanager
def counting(workers: InProcessCluster) -> Iterator[Counter[str]]:
    """The one-way messages that workers send to each other inside the block, by kind."""
    counts: Counter[str] = Counter()
    send, reply = Calling.post, Line.reply

    def count(frame: Frame) -> None:
        kind = KINDS[frame.pieces[0][3]]
        if kind not in (Result, Failure):
            counts[kind.__name__] += 1

    def sent(line: Calling, frame: Frame) -> None:
        count(frame)
        send(line, frame)

    def replied(line: Line, frame: Frame) -> None:
        count(frame)
        reply(line, frame)

    with patch.object(Calling, "post", sent), patch.object(Line, "reply", replied):
        yield counts


def test_a_chain_sends_only_gradients_and_reports(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = x
        for _ in range(5):
            y = torch.sin(call("worker1", layer, "a", y))
        with counting(pair) as counts:
            dist_autograd.backward(ctx, [y.sum()])
        # Worker 0's own runs need no report. It waits for the last report of worker 1.
        assert counts == {"Gradients": 10, "Report": 5}


@pytest.mark.usefixtures("no_hooks")
def test_one_worker_runs_a_chain_of_its_own_values_in_one_go(
    pair: InProcessCluster,
) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = x
        for _ in range(5):
            y = call("worker1", layer, "a", y)
        with counting(pair) as counts:
            dist_autograd.backward(ctx, [y.sum()])
        assert counts == {"Gradients": 2, "Report": 1}


def test_a_small_run_with_several_gradients_for_the_starter_sends_one_message(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        total = sum(call("worker1", layer, "a", x).sum() for _ in range(4))
        with counting(pair) as counts:
            dist_autograd.backward(ctx, [total])
        assert counts == {"Gradients": 2}


def test_the_gradients_of_a_message_go_back_in_one_message(pair: InProcessCluster) -> None:
    x, y = leaf(4, 4), leaf(4, 4, seed=3)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        result = call("worker1", torch.mul, x, y)
        with counting(pair) as counts:
            dist_autograd.backward(ctx, [result.sum()])
        assert counts == {"Gradients": 2, "Report": 1}


def test_one_source_is_run_by_the_thread_that_read_its_gradients(
    pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf(4, 4)
    readers: list[int] = []
    runners: list[int] = []
    engine = pair[1].autograd.engine
    arrived = engine._on_gradients

    def handle(line: Line, envelope: Envelope) -> None:
        readers.append(threading.get_ident())
        engine._handle(arrived, line, envelope)

    monkeypatch.setitem(pair[1].agent._handlers, Gradients, handle)
    W["a"].register_hook(lambda _: runners.append(threading.get_ident()))  # type: ignore[no-untyped-call]
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = call("worker1", layer, "a", x)
        for _ in range(5):
            dist_autograd.backward(ctx, [y.sum()], retain_graph=True)
    assert len(runners) == 5
    assert runners == readers


def test_a_skip_needs_no_resolving_if_the_messages_carry_their_dependencies(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        h = torch.sin(x)
        call("worker1", layer, "b", h)  # not used
        loss = (call("worker1", layer, "a", h) * h).sum()
        with counting(pair) as counts:
            dist_autograd.backward(ctx, [loss])
        assert counts == {"Gradients": 2, "Report": 1}


def deep_layer(name: str, x: Tensor) -> Tensor:
    """A layer with more nodes than `graph.foresee` searches."""
    for _ in range(100):
        x = x + 0
    return layer(name, x)


def test_a_skip_is_resolved_along_the_paths_of_the_gradients(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        h = torch.sin(x)
        call("worker1", deep_layer, "b", h)  # not used
        loss = (call("worker1", deep_layer, "a", h) * h).sum()
        with counting(pair) as counts:
            dist_autograd.backward(ctx, [loss])
        # TakePart to worker 1 and back, and its report; then the gradients, and their report.
        assert counts == {"TakePart": 2, "Gradients": 2, "Report": 2}


events: dict[str, threading.Event] = {}


def await_event(name: str) -> None:
    assert events[name].wait(PATIENCE), f"{name} did not happen meanwhile"


def scaled_late(x: Tensor) -> Tensor:
    """The gradient of its weight is ready only after the caller has used that of x."""
    weight = W["a"] * 2
    weight.register_hook(lambda _: await_event("the caller has the gradient"))  # type: ignore[no-untyped-call]
    return x * weight


def test_gradients_are_sent_while_the_run_goes_on(pair: InProcessCluster) -> None:
    events["the caller has the gradient"] = threading.Event()
    x = leaf(4, 4)
    x.register_hook(lambda _: events["the caller has the gradient"].set())  # type: ignore[no-untyped-call]
    with pair[0].as_current(), dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [rpc.rpc_sync("worker1", scaled_late, args=(x,)).sum()], timeout=PATIENCE)
        with pair[1].as_current():
            assert W["a"] in dist_autograd.get_gradients(ctx)


class LateScale(torch.autograd.Function):
    """Holds its gradient back until the caller's own weight has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        await_event("the caller's weight has its gradient")
        return gradient * 2


def scale_late(x: Tensor) -> Tensor:
    return LateScale.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_work_for_leaves_is_done_while_a_gate_waits(pair: InProcessCluster) -> None:
    events["the caller's weight has its gradient"] = threading.Event()
    x, weight = leaf(4, 4), leaf(4, 4, seed=3)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        # Made first, so that torch's own order would reach it last.
        scaled = weight * 3
        seen = events["the caller's weight has its gradient"]
        scaled.register_hook(lambda _: seen.set())  # type: ignore[no-untyped-call]
        h = torch.sin(x)
        loss = (rpc.rpc_sync("worker1", scale_late, args=(h,)) * h * scaled).sum()
        dist_autograd.backward(ctx, [loss], timeout=PATIENCE)
        got = dist_autograd.get_gradients(ctx)
    expected = torch.autograd.grad((torch.sin(x) * 2 * torch.sin(x) * (weight * 3)).sum(), [x, weight])
    torch.testing.assert_close([got[x], got[weight]], list(expected), rtol=1e-12, atol=1e-12)
