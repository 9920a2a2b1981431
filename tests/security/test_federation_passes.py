"""Peers of a federation that lie about backward passes: false gradients, false reports, false ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import exposed
import pytest
import torch
from exposed import weight
from liars import attack, federation, is_value, liar, without_pauses

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.autograd.completion import Ledger
from backhaul.autograd.functions import ROOT
from backhaul.errors import ProtocolError, QuotaError, RpcTimeoutError
from backhaul.options import Quotas
from backhaul.testing import InProcessCluster
from backhaul.trust.checking import Box, Charges
from backhaul.wire import trees
from backhaul.wire.messages import (
    Check,
    Failed,
    Gradients,
    Inquire,
    Leave,
    Mark,
    Pass,
    Ping,
    Report,
    Resolve,
    Resolved,
    Result,
    TakePart,
)


@pytest.fixture
def workers() -> Iterator[InProcessCluster]:
    with federation() as made:
        yield made


def eventually(check: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if check():
            return True
        threading.Event().wait(0.005)
    return False


def leaf() -> torch.Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


def double_of(context: int) -> torch.Tensor:
    """The result of a correct pass, in which worker0 weighs a tensor of the current worker."""
    x = leaf()
    loss = (rpc.rpc_sync("worker0", exposed.weigh, (x,)) ** 2).sum()
    dist_autograd.backward(context, [loss])
    return dist_autograd.get_gradients(context)[x]


TWOS = torch.full((3,), 2.0, dtype=torch.float64)
NEXT = (2 << 48) + 1000


def messages_about(backward: Pass, source: int) -> list[tuple[Any, list[torch.Tensor]]]:
    gradient = torch.full((3,), 1e9, dtype=torch.float64)
    return [
        (Gradients(backward, (source,), (0,)), [gradient]),
        (Gradients(backward, (source,), ()), []),
        (Gradients(backward, (source,), (7,)), [gradient]),
        (Gradients(backward, (source,), (0, 0)), [gradient]),
        (Gradients(backward, (), ()), []),
        (TakePart(backward, (source,)), []),
        (TakePart(backward, (ROOT, -1, 1 << 62)), []),
        (Resolve(backward), []),
        (Resolved(backward), []),
        (Report(backward, False, (source,), ()), []),
        (Report(backward, False, (ROOT,), ()), []),
        (Report(backward, True, (ROOT,), ()), []),
        (Failed(backward, "worker1", "builtins.SystemExit", "lost", "", [trees.PICKLE, b""]), []),
    ]


def test_messages_about_a_guessed_context_change_nothing(workers: InProcessCluster) -> None:
    """No message about guessed ids changes what others get."""
    with workers[1].as_current(), dist_autograd.context() as context, liar(workers) as peer:
        x = leaf()
        weighed = rpc.rpc_sync("worker0", exposed.weigh, (x,))
        (source,) = workers[0].autograd.contexts.get(context).sends
        with attack(workers):
            for guess in (context + 1, context - 1, (1 << 48) + 1, (0 << 48) + 1, 0, -1, (77 << 48) + 1):
                for starter in (0, 1, 2, 77):
                    for message, tensors in messages_about(Pass((starter << 48) + 5, guess, 0, False, True), source):
                        peer.send(message, tensors)
                peer.send(Leave(guess))
            assert isinstance(peer.ask(Ping), Result)
        dist_autograd.backward(context, [(weighed**2).sum()])
        assert torch.equal(dist_autograd.get_gradients(context)[x], TWOS)
    assert weight.grad is None


def test_gradients_for_tensors_sent_to_another_peer_are_refused(workers: InProcessCluster) -> None:
    """The peer knows the context, so it can make the pass fail. It cannot choose the gradients."""
    with workers[1].as_current(), dist_autograd.context() as context, liar(workers) as peer:
        x = leaf()
        weighed = rpc.rpc_sync("worker0", exposed.weigh, (x,))
        record = workers[0].autograd.contexts.get(context)
        (source,) = record.sends
        for number, starter in enumerate((0, 1, 2), 1):
            backward = Pass((starter << 48) + number, int(context), 0, False, True)
            for message, tensors in messages_about(backward, source)[:6]:
                peer.send(message, tensors)
        assert isinstance(peer.ask(Ping), Result)
        assert not record.gradients
        assert weight.grad is None
        dist_autograd.backward(context, [(weighed**2).sum()])
        assert torch.equal(dist_autograd.get_gradients(context)[x], TWOS)
        assert torch.equal(record.gradients[weight], TWOS)


def test_gradients_of_another_shape(workers: InProcessCluster) -> None:
    """In its own context and pass, for a tensor that was sent to it."""
    with liar(workers) as peer, attack(workers):
        x = leaf()
        for number, gradient in enumerate(
            (torch.ones(4), torch.ones(3, 3), torch.ones(0), torch.ones(3, dtype=torch.complex64), torch.ones(3).bool())
        ):
            context, message = NEXT + 10 * number, NEXT + 10 * number + 1
            mark = Mark(context, message)
            answer = peer.call("exposed:weigh", [trees.TENSOR, 0], tensors=[x], mark=mark)
            backward = Pass(message + 5, context, 0, False, True)
            peer.send(Gradients(backward, (answer.mark.message,), (0,)), [gradient])
        assert isinstance(peer.ask(Ping), Result)
    assert weight.grad is None or weight.grad.shape == (3,)
    weight.grad = None


BAD = {
    "longer": torch.ones(4, dtype=torch.float64),
    "another dtype": torch.zeros(1 << 20, dtype=torch.uint8),
    "single precision": torch.ones(3),
    "expanded": torch.ones(1, dtype=torch.float64).expand(1 << 20, 3),
    "of one row": torch.ones(1, 3, dtype=torch.float64),
    "a number": torch.ones((), dtype=torch.float64),
    "empty": torch.ones(0, dtype=torch.float64),
    "on the meta device": torch.ones(3, dtype=torch.float64, device="meta"),
    "requires grad": torch.ones(3, dtype=torch.float64, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_gradient_that_does_not_fit_its_tensor_is_refused(
    workers: InProcessCluster, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with liar(workers) as peer, attack(workers):
        answer = peer.call("exposed:weigh", [trees.TENSOR, 0], tensors=[leaf()], mark=Mark(NEXT, NEXT + 1))
        backward = Pass(NEXT + 5, NEXT, 0, False, False)
        peer.send(Gradients(backward, (answer.mark.message,), (0,)), [BAD[kind]])
        assert isinstance(peer.ask(Ping), Result)
        record = workers[0].autograd.contexts.get(NEXT)
        assert record is not None
        assert not record.gradients
        assert workers[0].autograd.engine._charges.of(2) == 0
    assert "for a tensor that is torch.float64[3], torch.strided on cpu" in caplog.text


GOOD = {
    "as it was sent": torch.full((3,), 2.0, dtype=torch.float64),
    "of one number": torch.full((1,), 2.0, dtype=torch.float64).expand(3),
    "a part of more": torch.full((6,), 2.0, dtype=torch.float64)[::2],
    "sparse": torch.full((3,), 2.0, dtype=torch.float64).to_sparse(),
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_gradient_that_fits_its_tensor_is_taken(workers: InProcessCluster, kind: str) -> None:
    with liar(workers) as peer, attack(workers):
        answer = peer.call("exposed:weigh", [trees.TENSOR, 0], tensors=[leaf()], mark=Mark(NEXT, NEXT + 1))
        peer.send(Gradients(Pass(NEXT + 5, NEXT, 0, False, False), (answer.mark.message,), (0,)), [GOOD[kind]])
        record = workers[0].autograd.contexts.get(NEXT)
        assert record is not None
        assert eventually(lambda: weight in record.gradients)
        assert torch.equal(record.gradients[weight].to_dense(), TWOS)
        assert workers[0].autograd.engine._charges.of(2) == 0


def test_places_of_gradients_are_in_order(workers: InProcessCluster) -> None:
    one = torch.ones(3, dtype=torch.float64)
    with liar(workers) as peer, attack(workers):
        answer = peer.call("exposed:weigh", [trees.TENSOR, 0], tensors=[leaf()], mark=Mark(NEXT, NEXT + 1))
        source = answer.mark.message
        for number, present in enumerate(((-1,), (1,), (0, 0), (1 << 40,))):
            backward = Pass(NEXT + 5 + number, NEXT, 0, False, False)
            peer.send(Gradients(backward, (source,), present), [one] * len(present))
        assert isinstance(peer.ask(Ping), Result)
        record = workers[0].autograd.contexts.get(NEXT)
        assert record is not None
        assert not record.gradients


def test_only_the_sender_of_a_false_pass_gets_the_error(workers: InProcessCluster) -> None:
    """The context is unknown. The sender gets the error, not the worker that the message names as the starter."""
    told: dict[int, list[Any]] = {1: [], 2: []}
    for rank, found in told.items():
        workers[rank].agent.intercept(Failed, lambda envelope, found=found: found.append(envelope.message))
    with liar(workers) as peer:
        peer.send(Gradients(Pass((1 << 48) + 5, 12345, 0, False, False), (1,), ()))
        assert isinstance(peer.ask(Ping), Result)
        assert eventually(lambda: bool(told[2]))
    assert told[2][0].type_name == "backhaul.errors.ContextError"
    assert told[1] == []


def test_gradients_that_wait_are_charged() -> None:
    charges = Charges(100)
    box, other = Box(charges), Box(charges)
    ten = torch.ones(10, dtype=torch.float32)
    box.charge({1: (ten,), 2: (None,)}, 5)
    box.update({1: (ten,), 2: (None,)})
    assert charges.of(5) == 40
    box.charge({1: (ten,)}, 5)  # again, in place of the earlier one
    assert charges.of(5) == 40
    other.charge({1: (ten[:5].to_sparse(),)}, 6)
    assert charges.of(6) == 5 * (8 + 4)
    with pytest.raises(QuotaError, match="more than 100 bytes of gradients"):
        box.charge({3: (torch.ones(20),)}, 5)
    assert box.pop(1) == (ten,)
    assert charges.of(5) == 0
    box.charge({1: (ten,)}, 5)
    box[1] = (ten,)
    del box[1]
    assert charges.of(5) == 0
    del other
    assert charges.of(6) == 0


def test_a_peer_cannot_end_the_context_of_another(workers: InProcessCluster) -> None:
    with workers[1].as_current(), dist_autograd.context() as context:
        weighed = rpc.rpc_sync("worker0", exposed.weigh, (x := leaf(),))
        with liar(workers) as peer, attack(workers):
            for _ in range(100):
                peer.send(Leave(int(context)))
            assert isinstance(peer.ask(Ping), Result)
        # A separate thread asks the worker that made it.
        assert eventually(lambda: not workers[0].autograd._doubted)
        assert workers[0].autograd.contexts.get(context) is not None
        dist_autograd.backward(context, [(weighed**2).sum()])
        assert torch.equal(dist_autograd.get_gradients(context)[x], TWOS)
    assert eventually(lambda: workers[0].autograd.counts()["contexts"] == 0)


def test_a_context_that_is_over_is_ended_by_any_worker_that_says_so(workers: InProcessCluster) -> None:
    """worker0 made it. worker1 tells worker2, which worker0 does not know, that it is over."""
    with workers[0].as_current(), dist_autograd.context():
        assert rpc.rpc_sync("worker1", exposed.call_back, ("worker2", 4)) == 8
        assert workers[2].autograd.counts()["contexts"] == 1
    assert eventually(lambda: all(worker.autograd.counts()["contexts"] == 0 for worker in workers))


def test_an_answer_about_contexts_of_others_is_ignored(workers: InProcessCluster) -> None:
    """worker2 is asked about its own contexts, and answers that other workers' contexts are over."""
    with workers[1].as_current(), dist_autograd.context() as context:
        rpc.rpc_sync("worker0", exposed.weigh, (leaf(),))
        agent = workers[2].agent
        with liar(workers) as peer:
            assert is_value(peer.call("exposed:double", 1, mark=Mark(NEXT)), 2)
            for answer in ([int(context), NEXT], [], "all", {}, 7):
                agent.register(
                    Inquire, lambda inbound, envelope, answer=answer: agent.answer(envelope.message.id, answer)
                )
                workers[0].autograd._inquire(2, (NEXT,))
                assert workers[0].autograd.contexts.get(NEXT) is None
                assert workers[0].autograd.contexts.get(context) is not None


def test_a_report_about_the_work_of_others_fails_the_pass(workers: InProcessCluster) -> None:
    """A false report does not end a pass. The pass fails, and the error names the liar."""
    with workers[0].as_current(), dist_autograd.context() as context, liar(workers) as peer:
        late = threading.Event()
        exposed.gates["late"] = late
        x = leaf()
        y = rpc.rpc_sync("worker1", exposed.weigh, (x,))
        y.register_hook(lambda gradient: late.wait(10) and None)
        errors: list[BaseException] = []

        def run() -> None:
            with workers[0].as_current():
                try:
                    dist_autograd.backward(context, [(y**2).sum()])
                except BaseException as error:
                    errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        record = workers[0].autograd.contexts.get(context)
        assert eventually(lambda: bool(record.passes))
        (local,) = record.passes.values()
        (sent,) = record.sends
        for consumed, emitted in (((), (ROOT,)), ((ROOT,), ()), ((sent,), ())):
            peer.send(Report(local.backward, False, consumed, emitted))
        assert isinstance(peer.ask(Ping), Result)
        late.set()
        thread.join()
    (error,) = errors
    assert isinstance(error, ProtocolError)
    assert "worker2" in str(error)


def test_a_repeated_report_is_a_protocol_error() -> None:
    ledger = Ledger(doubts=True)
    assert not ledger.report([ROOT], [7, 8])
    for consumed, emitted in (([], [7]), ([], [9, 9]), ([ROOT], [])):
        with pytest.raises(ProtocolError, match="reported before"):
            ledger.report(consumed, emitted)
    honest = Ledger(doubts=True)
    assert not honest.report([7], [])
    assert not honest.report([ROOT], [7, 8])
    assert honest.report([8], [])


def test_the_number_of_passes_is_limited(workers: InProcessCluster) -> None:
    without_pauses(workers[0])
    with liar(workers) as peer, attack(workers):
        context, message = NEXT, NEXT + 1
        answer = peer.call("exposed:weigh", [trees.TENSOR, 0], tensors=[leaf()], mark=Mark(context, message))
        assert answer.mark.context == context
        for number in range(2000):
            peer.send(Resolve(Pass(NEXT + 100 + number, context, 0, True, False)))
            peer.send(Failed(Pass(NEXT + 100 + number, context, 0, True, False), "x", "y", "z", ""))
        assert isinstance(peer.ask(Ping), Result)
        record = workers[0].autograd.contexts.get(context)
        assert len(record.passes) <= 256
        assert len(record.aborted) <= 256
        assert isinstance(peer.ask(Check, Pass(NEXT + 100, context, 0, True, False), 1 << 60), Result)


def test_the_quota_of_contexts_comes_back_when_they_end() -> None:
    with federation(quotas=Quotas(contexts=2)) as workers, workers[1].as_current():
        for _ in range(5):
            with dist_autograd.context() as context:
                assert torch.equal(double_of(context), TWOS)


def test_the_quota_of_recorded_tensors() -> None:
    with federation(quotas=Quotas(references=5)) as workers, liar(workers) as peer, attack(workers):
        for number in range(5):
            mark = Mark(NEXT, NEXT + 1 + number)
            answer = peer.call("exposed:weigh", [trees.TENSOR, 0], tensors=[leaf()], mark=mark)
            assert isinstance(answer, Result)
        answer = peer.call("exposed:weigh", [trees.TENSOR, 0], tensors=[leaf()], mark=Mark(NEXT, NEXT + 99))
        assert answer.type_name == "backhaul.errors.QuotaError"
        assert is_value(peer.call("exposed:double", 1, mark=Mark(NEXT)), 2)


def test_a_peer_that_keeps_gradients_back_is_not_waited_for_beyond_the_timeout(workers: InProcessCluster) -> None:
    with workers[0].as_current(), dist_autograd.context() as context:
        y = rpc.rpc_sync("worker2", exposed.weigh, (leaf(),))
        workers[2].agent.register(Gradients, lambda inbound, envelope: None)
        with pytest.raises(RpcTimeoutError, match="rank 2 has gradients to work on"):
            dist_autograd.backward(context, [(y**2).sum()], timeout=0.3)
    with workers[1].as_current(), dist_autograd.context() as context:
        assert torch.equal(double_of(context), TWOS)


def test_a_peer_cannot_declare_the_passes_of_another_over(workers: InProcessCluster) -> None:
    """A member of the context knows all ids. It can make a pass fail, but cannot make it hang."""
    with workers[1].as_current(), dist_autograd.context() as context, liar(workers) as peer:
        weighed = rpc.rpc_sync("worker0", exposed.weigh, (x := leaf(),))
        floor = (1 << 48) + (1 << 47)
        for message, tensors in messages_about(Pass(floor, int(context), floor, False, False), 1):
            peer.send(message, tensors)
        assert isinstance(peer.ask(Ping), Result)
        dist_autograd.backward(context, [(weighed**2).sum()], timeout=10)
        assert torch.equal(dist_autograd.get_gradients(context)[x], TWOS)
