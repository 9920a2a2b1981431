"""A peer that wants more from a party than is allowed: the numbers behind its edge, its parameters, its time."""

from __future__ import annotations

import gc
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from party_models import Middle, Shop, federation, make_encoder, party_of, rows
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import BackhaulError, ContextError, QuotaError, RefusedError
from backhaul.federation import Clip, Edge, GaussianNoise, Party
from backhaul.nn import RemoteModule
from backhaul.trust.exposure import PeerNames
from backhaul.wire import trees
from backhaul.wire.frames import encode
from backhaul.wire.messages import Call, Coded, Gradients

NOISY = Edge(on_send=[Clip(1.0), GaussianNoise(4.0)], on_gradient=[Clip(1.0), GaussianNoise(4.0)])


@contextmanager
def behind_noise() -> Iterator[rpc.RRef[Any]]:
    """worker0 is the attacker. worker1 has a party, and adds noise to everything for worker0."""
    with federation(edges={"worker0": NOISY}):
        shop = rpc.remote("worker1", Shop)
        shop.rpc_sync().describe()
        yield shop


def is_told(value: Any, secrets: list[Tensor]) -> bool:
    """Whether a value contains one of these tensors, or a part of one."""
    if isinstance(value, Tensor):
        flat = value.detach().double().reshape(-1)
        return any(torch.isin(flat.round(decimals=9), secret.reshape(-1).round(decimals=9)).any() for secret in secrets)
    if isinstance(value, dict):
        return any(is_told(each, secrets) for each in value.values())
    if isinstance(value, list | tuple):
        return any(is_told(each, secrets) for each in value)
    if isinstance(value, rpc.RRef):
        return is_told(value.to_here(), secrets)
    return isinstance(value, float)


def test_peers_may_call_only_these_methods() -> None:
    """If you add a method to Party, add it here, and check what it reveals."""
    names = PeerNames("worker0", 1 << 20)
    party = Party(make_encoder())
    known = {name for kind in type(party).__mro__ for name in vars(kind)} | set(vars(party))
    assert {name for name in known if names.method(party, name) is not None} == {
        "accumulate",
        "describe",
        "forward",
        "state",
        "step",
        "train",
        "zero_grad",
    }


def test_no_method_reveals_the_values_behind_the_noise() -> None:
    """All methods, with all kinds of arguments, by call, by reference and in a context."""
    parameters = [value.detach().clone() for value in make_encoder().state_dict().values()]
    secrets = [rows, make_encoder()(rows).detach(), *parameters]
    arguments: list[tuple[Any, ...]] = [(), (0,), ("list",)]
    answered = 0
    with behind_noise() as shop:
        names = PeerNames("worker0", 1 << 20)
        known = {name for kind in Shop.__mro__ for name in vars(kind)}
        public = {name for name in known if names.method(party_of(Shop), name) is not None}
        public |= {"module", "optimizer", "loader", "state_dict", "parameters", "_params", "_batch", "__dict__"}
        for name, given in itertools.product(sorted(public), arguments):
            ways: list[Callable[[], Any]] = [
                lambda name=name, given=given: getattr(shop.rpc_sync(), name)(*given),  # type: ignore[misc]
                lambda name=name, given=given: getattr(shop.remote(), name)(*given).to_here(),  # type: ignore[misc]
            ]
            for way in ways:
                try:
                    with dist_autograd.context():
                        told = is_told(way(), secrets)
                except Exception as error:
                    text = f"{error} {error.__cause__}"
                    assert not any(f"{number:.4f}" in text for number in rows[0].tolist()), name
                    continue
                answered += 1
                assert not told, name
    assert answered > 10  # otherwise the attacks did not reach the party


def test_shapes_and_types_of_arguments_do_not_get_around_the_edge() -> None:
    with federation(edges={"worker0": NOISY}):
        middle = rpc.remote("worker1", Middle, (3,))
        for given in (torch.zeros(1, 4), torch.zeros(0, 4), torch.zeros(4), torch.zeros(1, 4, requires_grad=True)):
            found = middle.rpc_sync().forward(given.double())
            plain = torch.nn.functional.linear(given.double(), *party_of(Middle).module.parameters())
            assert found.numel() == 0 or not torch.isin(found.detach(), plain.detach()).any()


def test_gradients_that_leave_have_noise_too() -> None:
    """The gradient of a linear layer's output reveals its weights. A peer that asks for it gets noise."""
    with federation(edges={"worker0": NOISY}), dist_autograd.context() as context_id:
        middle = RemoteModule("worker1", Middle, (3,))
        x = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
        dist_autograd.backward(context_id, [middle(x)[0, 0]])
        got = dist_autograd.get_gradients(context_id)[x]
        weight = party_of(Middle).module.weight.detach()
        assert not torch.isin(got, weight).any()
        assert (got - weight[0]).abs().max() > 0.01  # noise is this small only once in 10^10 draws


def test_the_constants_behind_a_graph_are_not_sent_with_it() -> None:
    with behind_noise() as shop, dist_autograd.context():
        found = shop.rpc_sync().forward(0)
        assert found.grad_fn is not None
        assert found.untyped_storage().nbytes() == found.nbytes


def test_the_noise_of_a_fetched_value_is_new_each_time_and_counted() -> None:
    with federation(edges={"worker0": NOISY}) as workers:
        held = rpc.remote("worker1", Shop).remote().raw()
        first, second = held.to_here(), held.to_here()
        assert not torch.isin(first, second).any()
        edges = workers[1].agent.execution.edges
        assert edges is not None
        crossing = edges.to("worker0")
        assert crossing is not None
        assert crossing.released("on_send").tensors == 2


def test_parameters_are_sent_only_if_the_party_shares_them() -> None:
    with federation():
        shop = RemoteModule("worker1", Shop)
        with pytest.raises(RefusedError, match="Shop does not share its parameters"):
            shop.state_dict()
        shared = RemoteModule("worker1", Shop, kwargs={"share_state": True})
        found = shared.state_dict()
        assert found.keys() == make_encoder().state_dict().keys()
        assert all(torch.equal(value, found[name]) for name, value in make_encoder().state_dict().items())
    with federation(edges={"worker7": NOISY}):
        shared = RemoteModule("worker1", Shop, kwargs={"share_state": True})
        with pytest.raises(RefusedError, match="changed parameters are useless"):
            shared.state_dict()


def test_an_address_is_not_told() -> None:
    with behind_noise() as shop:
        key = shop.rpc_sync().describe()[-1]
        party = party_of(Shop)
        assert key not in (id(party), id(party.module))


# Unbounded work.


def test_rows_are_bounded() -> None:
    with federation():
        middle = rpc.remote("worker1", Middle, (3,))
        for way in (lambda x: middle.rpc_sync().forward(x), lambda x: middle.remote().forward(x).to_here()):
            with pytest.raises(QuotaError, match="the arguments of Middle may have at most 65536 rows, not 65537"):
                way(torch.zeros(1, 4, dtype=torch.float64).expand(65537, 4))
        given = [torch.zeros(17, dtype=torch.int64), [torch.zeros(17)], {"x": torch.zeros(17)}]
        shop = rpc.remote("worker1", Shop)
        for each in given:
            with pytest.raises(QuotaError, match="the arguments of Shop may have at most 16 rows"):
                shop.rpc_sync().forward(each)


def test_rows_of_a_batch_are_bounded() -> None:
    party = Party(make_encoder(), loader=lambda count: rows[:1].expand(count, 6), max_rows=100)
    assert len(party.forward(100)) == 100
    with pytest.raises(QuotaError, match="a batch of Party may have at most 100 rows, not 1000000"):
        party.forward(1_000_000)


def test_instances_are_bounded_before_anything_is_made() -> None:
    made: list[int] = []

    class Costly(Party):
        instances = 3

        def __init__(self) -> None:
            made.append(1)
            super().__init__(make_encoder())

    kept = [Costly() for _ in range(3)]
    for _ in range(10):
        with pytest.raises(QuotaError, match=r"Costly allows 3 instances at a time"):
            Costly()
    assert len(made) == 3
    del kept[0]
    kept.append(Costly())


def test_a_party_that_refers_to_itself_is_gone_when_another_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that is a method of the party makes a cycle. A peer cannot make the worker collect garbage at will."""
    monkeypatch.setattr(Party, "_collected", -math.inf)
    collected: list[int] = []
    really = gc.collect
    monkeypatch.setattr(gc, "collect", lambda: (collected.append(1), really()))

    class Cyclic(Party):
        instances = 1

        def __init__(self) -> None:
            super().__init__(make_encoder(), loader=self.forward)

    gc.disable()
    try:
        Cyclic()
        kept = Cyclic()
        for _ in range(5):
            with pytest.raises(QuotaError):
                Cyclic()
    finally:
        gc.enable()
    assert len(collected) == 1
    assert kept.loader is not None


def test_instances_are_bounded_for_peers() -> None:
    with federation():
        kept = [RemoteModule("worker1", Middle, (each,)) for each in range(2)]
        for _ in range(5):
            with pytest.raises(QuotaError, match="Middle allows 2 instances at a time"):
                RemoteModule("worker1", Middle, (9,))
        assert kept[0](torch.zeros(1, 4, dtype=torch.float64)).shape == (1, 4)


def test_a_party_itself_cannot_be_made_by_peers() -> None:
    with federation():
        for given in ((), (1,), (torch.zeros(1),), (Shop,)):
            with pytest.raises((BackhaulError, TypeError)):
                rpc.remote("worker1", Party, given).rpc_sync().describe()
    assert not [each for each in Party._living if type(each) is Party and hasattr(each, "module")]


def test_a_gradient_is_used_once() -> None:
    """If gradients could be used again, a peer could make a thousand steps with one backward pass."""
    with federation(), dist_autograd.context() as context_id:
        shop = RemoteModule("worker1", Shop)
        dist_autograd.backward(context_id, [shop(0).sum()])
        method = shop.get_module_rref().rpc_sync()
        method.step(context_id)
        after = {name: value.clone() for name, value in party_of(Shop).module.state_dict().items()}
        for _ in range(3):
            with pytest.raises(ContextError, match="already used the gradients of this context"):
                method.step(context_id)
        with pytest.raises(ContextError, match="already used the gradients of this context"):
            method.accumulate(context_id)
        assert all(torch.equal(value, after[name]) for name, value in party_of(Shop).module.state_dict().items())
        assert party_of(Shop).steps == 1


@pytest.mark.parametrize("context_id", [1 << 60, -1, 0, True, "a", 0.5, [1]])
def test_invalid_contexts_are_refused(context_id: Any) -> None:
    with federation():
        shop = RemoteModule("worker1", Shop)
        for name in ("step", "accumulate"):
            with pytest.raises(BackhaulError):
                getattr(shop.get_module_rref().rpc_sync(), name)(context_id)
        assert party_of(Shop).steps == 0


@pytest.mark.parametrize("mode", [1, "eval", None])
def test_an_invalid_mode_is_refused(mode: Any) -> None:
    with federation(), pytest.raises(BackhaulError, match="takes True or False"):
        rpc.remote("worker1", Shop).rpc_sync().train(mode)


def test_each_batch_of_a_loader_goes_to_one_call() -> None:
    """Two peers at once take turns, and the loader starts only once."""
    party = Party(torch.nn.Identity(), loader=[torch.full((1,), float(number)) for number in range(100)])
    found: list[float] = []
    start = threading.Barrier(4)

    def take() -> None:
        start.wait()
        for _ in range(25):
            found.append(party.forward().item())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(100))


# Malformed compressed tensors.

HUGE = Coded(0, "topk", "float64", (1 << 27,))


def test_a_small_message_does_not_become_a_large_tensor(caplog: pytest.LogCaptureFixture) -> None:
    """Twelve bytes would become a gibibyte, more than a message may have."""
    parts = [torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)]
    name = [trees.NAMED, f"{echo.__module__}:{echo.__qualname__}"]
    call = [trees.TUPLE, name, [trees.TUPLE, [trees.TENSOR, 0]], {}]
    with federation() as workers:
        line = workers[0].agent._route("worker1", math.inf)
        with pytest.raises(RefusedError):
            line.ask(1 << 40, encode(Call(1 << 40, call, coded=(HUGE,)), parts), "a bomb", math.inf, is_call=True)
        assert "compressed tensors that take more than 268435456 bytes" in caplog.text
        assert rpc.rpc_sync("worker1", echo, (1,)) == 1


@rpc.expose
def echo(value: Any) -> Any:
    return value


def test_gradients_that_are_compressed_and_lie_fail_the_pass_alone() -> None:
    with federation() as workers, dist_autograd.context() as context_id:
        shop = RemoteModule("worker1", Shop)
        found = shop(0)
        engine = workers[0].autograd.engine
        tell = engine.send

        def lie(local: Any, rank: int, message: Any, tensors: Any = ()) -> None:
            if isinstance(message, Gradients):
                fields = (message.backward, message.sources, message.present, message.consumed, message.emitted)
                message, tensors = Gradients(*fields, (HUGE,)), [torch.zeros(1), torch.zeros(1, dtype=torch.int32)]
            tell(local, rank, message, tensors)

        engine.send = lie  # type: ignore[method-assign]
        with pytest.raises(BackhaulError, match="compressed tensors that take more than"):
            dist_autograd.backward(context_id, [found.sum()])
        engine.send = tell  # type: ignore[method-assign]
        assert torch.equal(shop(0), found)
