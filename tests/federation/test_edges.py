"""Edges between workers: everything that leaves for a peer is transformed; gradients are those of one process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from party_models import WIDTH, Shop, federation, make_encoder, make_head, rows
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import (
    BackhaulError,
    MisuseError,
    OptionError,
    QuotaError,
    RefusedError,
    UnsendableError,
    WorkerLostError,
)
from backhaul.federation import BFloat16, Clip, Edge, GaussianNoise, Int8, TopK, epsilon
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.trust import exposure


@rpc.expose
def encode(x: Tensor) -> Tensor:
    """On worker1: a part of a model."""
    found: Tensor = encoder(x)
    return found


encoder = make_encoder()


@rpc.expose
def echo(value: Any) -> Any:
    return value


@rpc.expose
def same_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


@rpc.expose
async def later(x: Tensor) -> Tensor:
    return x


@rpc.expose
def ask_back(x: Tensor) -> Tensor:
    """A nested call: the tensor leaves worker1 as an argument."""
    return rpc.rpc_sync("worker0", echo, (x,))


@rpc.expose
def holds(x: Tensor) -> rpc.RRef[Tensor]:
    return rpc.RRef(x)


def halved(x: Tensor) -> Tensor:
    return x / 2


HALVE = Edge(on_send=[halved], on_gradient=[])


class Alone(nn.Module):
    """The whole model in one process. The edges are part of it, as torch functions."""

    def __init__(self, on_send: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.head, self.on_send = make_encoder(), make_head(), on_send

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.on_send(self.encoder(x)))
        return found.pow(2).mean()


def clip(x: Tensor) -> Tensor:
    norms = x.reshape(len(x), -1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1))
    return x * (0.3 / (norms + 1e-6)).clamp(max=1.0)


def cast(x: Tensor) -> Tensor:
    """Torch's own cast also casts its gradient, so the gradient would be rounded too."""
    return x + (x.bfloat16().double() - x).detach()


EXACT: dict[str, tuple[Edge, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "nothing": (Edge(on_send=[], on_gradient=[]), lambda x: x, lambda x: x),
    "clipped values": (Edge(on_send=[Clip(0.3)], on_gradient=[]), clip, lambda x: x),
    "clipped gradients": (Edge(on_send=[], on_gradient=[Clip(0.01)]), lambda x: x, Clip(0.01)),
    "bfloat16": (Edge(on_send=[BFloat16()], on_gradient=[BFloat16()]), BFloat16(), BFloat16()),
    "int8": (Edge(on_send=[Int8()], on_gradient=[Int8()]), Int8(), Int8()),
    "the largest": (Edge(on_send=[TopK(0.3)], on_gradient=[TopK(0.3)]), TopK(0.3), TopK(0.3)),
    "several": (
        Edge(on_send=[Clip(0.3), TopK(0.5), BFloat16()], on_gradient=[TopK(0.5), Int8()]),
        lambda x: BFloat16()(TopK(0.5)(Clip(0.3)(x))),
        lambda x: Int8()(TopK(0.5)(x)),
    ),
}


@pytest.mark.parametrize("trust", ["federation", "cluster"])
@pytest.mark.parametrize("accumulate", ["context", "grad"])
@pytest.mark.parametrize("what", EXACT)
def test_gradients_are_those_of_one_process_with_the_same_transforms(what: str, accumulate: Any, trust: Any) -> None:
    edge, on_send, on_gradient = EXACT[what]
    alone = Alone(on_send)
    seen: list[Tensor] = []

    def hook(gradient: Tensor) -> Tensor:  # the gradient that worker0 sends back to worker1
        return on_gradient(gradient)

    encoded = alone.encoder(rows)
    sent = on_send(encoded)
    sent.register_hook(hook)
    loss = alone.head(sent).pow(2).mean()
    loss.backward()

    head = make_head()
    for parameter in encoder.parameters():
        parameter.grad = None
    with (
        InProcessCluster(2, options=RpcOptions(trust=trust, edges={"worker*": edge})) as workers,
        workers[0].as_current(),
        dist_autograd.context() as context_id,
    ):
        received = rpc.rpc_sync("worker1", encode_rows)
        received.register_hook(seen.append)
        assert torch.equal(received, sent)
        assert received.dtype is torch.float64
        found = head(received).pow(2).mean()
        assert torch.equal(found, loss)
        dist_autograd.backward(context_id, [found], accumulate=accumulate)
        if accumulate == "grad":
            gradients = [parameter.grad for parameter in encoder.parameters()]
        else:
            with workers[1].as_current():
                there = dist_autograd.get_gradients(context_id)
                gradients = [there[parameter] for parameter in encoder.parameters()]
    expected = [parameter.grad for parameter in alone.encoder.parameters()]
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)
    assert len(seen) == 1  # a hook of the receiver runs once, before the gradient is transformed


@rpc.expose
def encode_rows() -> Tensor:
    return encode(rows)


def test_bfloat16_equals_a_local_model_with_the_cast() -> None:
    edge = Edge(on_send=[BFloat16()], on_gradient=[])
    alone = Alone(cast)
    alone(rows).backward()
    head = make_head()
    with federation(edges={"*": edge}) as workers, dist_autograd.context() as context_id:
        received = rpc.rpc_sync("worker1", encode_rows)
        assert torch.equal(received, encoder(rows).bfloat16().double())
        dist_autograd.backward(context_id, [head(received).pow(2).mean()])
        with workers[1].as_current():
            there = dist_autograd.get_gradients(context_id)
            for mine, theirs in zip(encoder.parameters(), alone.encoder.parameters(), strict=True):
                torch.testing.assert_close(there[mine], theirs.grad, rtol=1e-12, atol=1e-15)


def test_arguments_are_transformed_and_have_gradients() -> None:
    x = rows[:, :WIDTH].clone().requires_grad_()
    with federation(edges={"worker1": Edge(on_send=[Int8()], on_gradient=[])}), dist_autograd.context() as context_id:
        found = rpc.rpc_sync("worker1", echo, (x,))
        assert torch.equal(found, Int8()(x))
        dist_autograd.backward(context_id, [found.sum()])
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.ones_like(x))


def test_a_tensor_that_comes_twice_is_transformed_once() -> None:
    with federation(edges={"worker0": HALVE}):
        first, second = rpc.rpc_sync("worker1", same_twice, (torch.ones(2),))
        assert first is second
        assert first.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_every_way_that_a_tensor_can_leave(grad: bool, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tensors from worker1 to worker0 are halved, so a tensor that comes back unchanged has bypassed the edge."""
    # Other tests must not see what is exposed here.
    monkeypatch.setattr(exposure.registry, "_entries", dict(exposure.registry._entries))
    rpc.expose(torch.add)
    x = torch.full((3,), 8.0, requires_grad=grad)
    with federation(edges={"worker0": HALVE}), torch.set_grad_enabled(grad):
        shop = rpc.remote("worker1", Shop)
        ways: dict[str, Callable[[], Tensor]] = {
            "a result": lambda: rpc.rpc_sync("worker1", echo, (x,)),
            "a future": lambda: rpc.rpc_async("worker1", echo, (x,)).wait(),
            "a coroutine": lambda: rpc.rpc_sync("worker1", later, (x,)),
            "in containers": lambda: rpc.rpc_sync("worker1", echo, ([{"a": (x,)}],))[0]["a"][0],
            "to_here": lambda: rpc.remote("worker1", echo, (x,)).to_here(),
            "to_here of a given reference": lambda: rpc.rpc_sync("worker1", holds, (x,)).to_here(),
            "a method": lambda: shop.rpc_sync().raw()[:1, 0],
            "a method's value by reference": lambda: shop.remote().raw().to_here()[:1, 0],
            "a method's reference": lambda: shop.rpc_sync().raw_rref().to_here()[:1, 0],
            "an operator": lambda: rpc.rpc_sync("worker1", torch.add, (x, 0)),
            "a parameter": lambda: rpc.rpc_sync("worker1", echo, (nn.Parameter(x.detach()),)),
        }
        for name, way in ways.items():
            if inside:
                with dist_autograd.context():
                    found = way()
            else:
                found = way()
            expected = rows[:1, 0] / 2 if "method" in name else x / 2
            assert torch.equal(found.detach(), expected.detach()), name


def test_a_nested_call_is_transformed_at_each_edge() -> None:
    x = torch.full((3,), 8.0, requires_grad=True)
    with federation(edges={"*": HALVE}), dist_autograd.context() as context_id:
        # To worker1, back as an argument, to worker1 as a result, and back.
        found = rpc.rpc_sync("worker1", ask_back, (x,))
        assert found.tolist() == [0.5] * 3
        dist_autograd.backward(context_id, [found.sum()])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [1 / 16] * 3


def test_the_gradient_of_a_fetched_root_is_transformed_too() -> None:
    edge = Edge(on_send=[], on_gradient=[halved])
    with federation(edges={"worker*": edge}) as workers, dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, rpc.remote("worker1", encode_sum))
        with workers[1].as_current():
            there = dist_autograd.get_gradients(context_id)
        bias = list(encoder.parameters())[-1]
        assert there[bias].tolist() == [len(rows) / 2] * WIDTH


@rpc.expose
def encode_sum() -> Tensor:
    return encode(rows).sum()


def test_values_that_a_worker_sends_itself_are_not_transformed() -> None:
    with federation(edges={"*": HALVE}):
        assert rpc.rpc_sync("worker0", echo, (torch.ones(1),)).item() == 1.0


NUMBERS = ["list", "number", "dict", "complex", "bytes", "bytearray", "array", "scalar", "integers", "sparse"]
HIDDEN = ["complex tensor", "keys", "a set", "deep"]


@pytest.mark.parametrize("what", [*NUMBERS, *HIDDEN])
def test_numbers_outside_tensors_do_not_leave(what: str) -> None:
    with federation(edges={"worker0": HALVE}):
        shop = rpc.remote("worker1", Shop)
        for attempt in (shop.rpc_sync().raw_in, lambda way: shop.remote().raw_in(way).to_here()):
            with pytest.raises(UnsendableError, match=r"on_send is set for the edge to 'worker0'"):
                attempt(what)


def test_numbers_of_a_pickle_do_not_leave() -> None:
    options = RpcOptions(edges={"worker0": HALVE})
    refused = pytest.raises(UnsendableError, match="a pickled object")
    with InProcessCluster(2, options=options) as workers, workers[0].as_current(), refused:
        rpc.rpc_sync("worker1", slice_of_objects)


def slice_of_objects() -> Any:
    return Plain(0.5)


class Plain:
    def __init__(self, number: float) -> None:
        self.number = number


def test_types_in_passes_leave_unchanged() -> None:
    passes = [torch.int64, float, complex, bytes]
    with federation(edges={"worker*": Edge(on_send=[halved], on_gradient=[], passes=passes)}):
        value = [torch.arange(3), 0.5, 1j, b"x", {"a": (1.5, None)}]
        found = rpc.rpc_sync("worker1", echo, (value,))
        assert found[0].tolist() == [0, 1, 2]
        assert found[1:] == value[1:]


def test_the_error_says_which_passes_to_write() -> None:
    with federation(edges={"worker1": HALVE}):
        with pytest.raises(UnsendableError, match=r"cannot change a tensor of torch.int64: .*passes=\[torch.int64\]"):
            rpc.rpc_sync("worker1", echo, (torch.arange(3),))
        with pytest.raises(UnsendableError, match=r"cannot change a float: send a tensor, .*passes=\[float\]"):
            rpc.rpc_sync("worker1", echo, (0.5,))
        with pytest.raises(UnsendableError, match="or a NumPy array,"):
            rpc.rpc_sync("worker1", echo, (rows.numpy(),))
        assert rpc.rpc_sync("worker1", echo, ([1, "a", None, True, 1 << 80],)) == [1, "a", None, True, 1 << 80]


@pytest.mark.parametrize("trust", ["federation", "cluster"])
def test_our_own_errors_are_sent_without_attributes(trust: Any) -> None:
    options = RpcOptions(trust=trust, edges={"worker0": HALVE})
    with InProcessCluster(2, options=options) as workers, workers[0].as_current():
        with pytest.raises(RefusedError, match=r"^not this$") as told:
            rpc.rpc_sync("worker1", refuse, ("not this", True))
        assert not vars(told.value)
        with pytest.raises(BackhaulError) as failure:
            rpc.rpc_sync("worker1", refuse, (None, False))
        assert "0.125" not in f"{failure.value} {failure.value.args} {failure.value.__cause__}"


@rpc.expose
def refuse(text: str | None, with_more: bool) -> None:
    error = RefusedError(text or torch.full((2,), 0.125))
    if with_more:
        error.rows = rows  # type: ignore[attr-defined]
    raise error


@pytest.mark.parametrize("trust", ["federation", "cluster"])
def test_texts_of_exceptions_do_not_leave(trust: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The text of any exception may contain numbers, so it stays. The worker's log has it."""
    secret = str(rows[0, 0].item())
    options = RpcOptions(trust=trust, edges={"worker0": HALVE})
    with InProcessCluster(2, options=options) as workers, workers[0].as_current():
        shop = rpc.remote("worker1", Shop)
        for attempt in (shop.rpc_sync().fail, lambda: shop.remote().fail().to_here()):
            with pytest.raises(ValueError if trust == "federation" else Exception) as failure:
                attempt()
            shown = f"{failure.value} {failure.value.__cause__}"
            assert secret not in shown
            assert "stays in the log of its worker" in shown
    assert secret in caplog.text


def test_texts_of_exceptions_in_backward_do_not_leave() -> None:
    """A failed pass tells the other workers the reason, as far as the edge allows."""
    with federation(edges={"worker0": HALVE}), dist_autograd.context() as context_id:
        found = rpc.rpc_sync("worker1", with_bad_backward)
        with pytest.raises(Exception) as failure:
            dist_autograd.backward(context_id, [found.sum()])
        assert "0.123" not in f"{failure.value} {failure.value.__cause__}"


@rpc.expose
def with_bad_backward() -> Tensor:
    found = encode(rows)
    found.register_hook(fail_with_a_secret)
    return found


def fail_with_a_secret(gradient: Tensor) -> None:
    raise ValueError("0.123")


def test_a_gradient_that_cannot_be_transformed_fails_the_pass() -> None:
    edge = Edge(on_send=[], on_gradient=[fail_to_transform])
    with federation(edges={"worker*": edge}), dist_autograd.context() as context_id:
        found = rpc.rpc_sync("worker1", encode_rows)
        with pytest.raises(MisuseError, match="on_gradient of the edge to 'worker1' has failed with KeyError"):
            dist_autograd.backward(context_id, [found.sum()])


def fail_to_transform(gradient: Tensor) -> Tensor:
    raise KeyError("no")


def test_compressed_tensors_take_fewer_bytes() -> None:
    x = torch.randn(256, 64)
    taken: dict[str, int] = {}
    for name, chain in {"none": [], "bf16": [BFloat16()], "int8": [Int8()], "topk": [TopK(0.05)]}.items():
        with federation(edges={"worker1": Edge(on_send=chain, on_gradient=[])}) as workers:
            rpc.rpc_sync("worker1", echo, (1,))
            before = sent_by(workers[0])
            rpc.rpc_sync("worker1", drop, (x,))
            taken[name] = sent_by(workers[0]) - before
    assert taken["none"] > x.nbytes
    assert taken["bf16"] < 0.52 * x.nbytes
    assert taken["int8"] < 0.28 * x.nbytes
    assert taken["topk"] < 0.12 * x.nbytes


@rpc.expose
def drop(x: Tensor) -> None:
    return None


def sent_by(worker: Any) -> int:
    (line,) = [line for line in worker.agent.calling() if line.peer.name == "worker1"]
    return int(line.channel.sent)


def test_feedback_over_an_edge() -> None:
    """Compared with one process. The feedback is dropped with the connection."""
    rest = torch.zeros(2, 8)
    with federation(edges={"worker1": Edge(on_send=[TopK(0.25, feedback=True)], on_gradient=[])}) as workers:
        for step in range(5):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
            expected = TopK(0.25)(x + rest)
            rest = x + rest - expected
            assert torch.equal(rpc.rpc_sync("worker1", echo, (x,)), expected)
        edges = workers[0].agent.execution.edges
        assert edges is not None
        crossing = edges.to("worker1")
        assert crossing is not None
        assert crossing.feedback.nbytes == rest.nbytes
        ended = threading.Event()
        workers[0].agent.on_connection_ended.append(lambda *_: ended.set())  # after the callback of the edges
        workers[1].shutdown(graceful=False)
        with pytest.raises(WorkerLostError):
            rpc.rpc_sync("worker1", echo, (x,))
        assert ended.wait(20)
        assert crossing.feedback.nbytes == 0


def test_nothing_is_fed_back_for_a_connection_that_ends_while_a_tensor_is_transformed() -> None:
    def cut(x: Tensor) -> Tensor:
        if cuts:
            line = workers[0].agent.link(workers[1].info).open
            assert line is not None
            line.lose(cuts.pop())
        return x

    cuts: list[Exception] = []
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    with federation(edges={"worker1": Edge(on_send=[cut, TopK(0.25, feedback=True)], on_gradient=[])}) as workers:
        rpc.rpc_sync("worker1", echo, (x,))
        cuts.append(ConnectionError("cut by the test"))
        with pytest.raises(WorkerLostError, match="cut by the test"):
            rpc.rpc_sync("worker1", echo, (x,))
        assert torch.equal(rpc.rpc_sync("worker1", echo, (x,)), TopK(0.25)(x))


# Accounting.

NOISY = Edge(on_send=[Clip(1.0), GaussianNoise(2.0, releases=4)], on_gradient=[Clip(1.0), GaussianNoise(3.0)])


def test_epsilon_counts_the_tensors_that_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[Any] = []
    monkeypatch.setattr("backhaul.federation.privacy.epsilon_of", lambda found, delta: composed.append((found, delta)))
    with federation(edges={"worker1": NOISY}):
        epsilon("worker1", 1e-5)
        with dist_autograd.context() as context_id:
            x = torch.ones(2, 2, requires_grad=True)
            found = rpc.rpc_sync("worker1", echo, (x,))
            rpc.rpc_sync("worker1", echo, ((x, x + 1),))
            dist_autograd.backward(context_id, [found.sum()])
        epsilon("worker1", 1e-5)
        epsilon("worker1", 1e-5, releases=2, sensitivity=2.0)
    assert composed == [([], 1e-5), ([(2.0, 3), (3.0, 1)], 1e-5), ([(1.0, 2), (1.5, 1)], 1e-5)]


def test_epsilon_is_that_of_the_library() -> None:
    library = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: backhaul[privacy] has it")
    accountant = pytest.importorskip("dp_accounting.rdp").RdpAccountant()
    accountant.compose(library.GaussianDpEvent(2.0), 3)
    with federation(edges={"worker1": NOISY}):
        for _ in range(3):
            rpc.rpc_sync("worker1", drop, (torch.ones(2),))
        assert epsilon("worker1", 1e-5) == accountant.get_epsilon(1e-5)


def test_a_gradient_without_noise_makes_epsilon_infinite() -> None:
    half = Edge(on_send=[Clip(1.0), GaussianNoise(1.0)], on_gradient=[])
    with federation(edges={"worker*": half}), dist_autograd.context() as context_id:
        found = rpc.rpc_sync("worker1", encode_rows)
        dist_autograd.backward(context_id, [found.sum()])
        assert epsilon("worker1", 1e-5) == math.inf


def test_a_float_that_passes_without_noise_makes_epsilon_infinite() -> None:
    edge = Edge(on_send=[Clip(1.0), GaussianNoise(1.0)], on_gradient=[], passes=[torch.float32, torch.int64])
    with federation(edges={"worker1": edge}):
        rpc.rpc_sync("worker1", drop, (torch.arange(2),))
        assert epsilon("worker1", 1e-5) == 0.0
        rpc.rpc_sync("worker1", drop, (torch.ones(2),))
        assert epsilon("worker1", 1e-5) == math.inf


def test_a_chain_without_noise_makes_epsilon_infinite() -> None:
    with federation(edges={"worker1": Edge(on_send=[Clip(1.0)], on_gradient=[])}):
        rpc.rpc_sync("worker1", drop, (torch.ones(2),))
        assert epsilon("worker1", 1e-5) == math.inf


def test_noise_averages_out_unless_the_releases_are_bounded() -> None:
    with federation(edges={"worker0": NOISY}):
        for _ in range(4):
            rpc.rpc_sync("worker1", echo, (torch.ones(2),))
        with pytest.raises(QuotaError, match="4 tensors were sent to 'worker0' with noise"):
            rpc.rpc_sync("worker1", echo, (torch.ones(2),))
        assert rpc.rpc_sync("worker1", echo, (1,)) == 1


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (lambda: epsilon("worker0", 1e-5), "there is no edge to 'worker0'"),
        (lambda: epsilon("worker1", 1.5), "delta=1.5 must be between 0 and 1"),
        (lambda: epsilon("worker1", 1e-5, releases=-1), "releases=-1 must be"),
        (lambda: epsilon("worker1", 1e-5, sensitivity=0), "sensitivity=0 must be a positive number"),
    ],
)
def test_misuse_of_epsilon_is_refused(attempt: Callable[[], float], text: str) -> None:
    with federation(edges={"worker1": NOISY}), pytest.raises(MisuseError, match=text):
        attempt()


def test_epsilon_of_noise_that_no_clip_bounds() -> None:
    with federation(edges={"worker1": Edge(on_send=[GaussianNoise(std=1.0)], on_gradient=[])}):
        rpc.rpc_sync("worker1", drop, (torch.ones(2),))
        with pytest.raises(MisuseError, match="put a Clip before it"):
            epsilon("worker1", 1e-5)


@pytest.mark.parametrize("value", [[], {"a": 1}, {"": HALVE}, {1: HALVE}, HALVE])
def test_invalid_edges_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"option edges: .* must be a dict of edges"):
        RpcOptions(edges=value)
