"""Party: RemoteModule, DistributedOptimizer and Pipeline in a federation, against the same model in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import party_models
import pytest
import torch
from party_models import Hidden, Middle, Shop, federation, ids_of, make_encoder, make_head, make_layer, party_of, rows
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import checkpoint, rpc
from backhaul.errors import MisuseError, OptionError, PartialError, RefusedError
from backhaul.federation import BFloat16, Clip, Edge, Party
from backhaul.nn import Pipeline, RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer, GradScaler, clip_grad_norm_

STEPS = 6


def train(model: nn.Module, optimizer: DistributedOptimizer, given: Callable[[int], Any]) -> list[float]:
    losses = []
    for step in range(STEPS):
        with dist_autograd.context() as context_id:
            loss = model(given(step)).pow(2).mean()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def train_alone(model: nn.Module, optimizers: list[torch.optim.Optimizer], given: Callable[[int], Any]) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = model(given(step)).pow(2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(one: nn.Module, other: nn.Module) -> None:
    found = other.state_dict()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, found[name], rtol=1e-12, atol=1e-14)


def alone(on_send: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[nn.Module, nn.Module, list[float]]:
    encoder, head = make_encoder(), make_head()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(encoder.parameters(), lr=0.05),
        torch.optim.SGD(head.parameters(), lr=0.02),
    ]

    class Whole(nn.Module):
        def forward(self, step: int) -> Tensor:
            found: Tensor = head(on_send(encoder(rows[ids_of(step)])))
            return found

    return encoder, head, train_alone(Whole(), optimizers, lambda step: step)


@pytest.mark.parametrize(
    ("edge", "on_send"),
    [
        (None, lambda x: x),
        (Edge(on_send=[BFloat16()], on_gradient=[]), BFloat16()),
        (Edge(on_send=[Clip(0.5)], on_gradient=[]), Clip(0.5)),
    ],
    ids=["plain", "bfloat16", "clip"],
)
def test_training_is_that_of_one_process(edge: Edge | None, on_send: Callable[[Tensor], Tensor]) -> None:
    encoder, head, losses = alone(on_send)
    with federation(edges=None if edge is None else {"worker0": edge}):
        shop = RemoteModule("worker1", Shop)
        mine = make_head()
        model = nn.Sequential(shop, mine)
        optimizer = DistributedOptimizer(torch.optim.SGD, parameter_rrefs(model), lr=0.02)
        assert train(model, optimizer, lambda step: step) == pytest.approx(losses, rel=1e-12)
        assert_same(head, mine)
        party = party_of(Shop)
        assert_same(encoder, party.module)
        assert party.steps == STEPS


def test_the_stages_of_a_pipeline_are_parties() -> None:
    first, second = make_layer(10), make_layer(11)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]

    def given(step: int) -> Tensor:
        return rows[ids_of(step), :4]

    losses = train_alone(nn.Sequential(first, second), optimizers, given)
    with federation(3):
        stages = [RemoteModule("worker1", Middle, (10,)), RemoteModule("worker2", Middle, (11,))]
        pipeline = Pipeline(stages, chunks=4)
        optimizer = DistributedOptimizer(torch.optim.SGD, parameter_rrefs(pipeline), lr=0.5)
        assert train(pipeline, optimizer, given) == pytest.approx(losses, rel=1e-12)
        seen = stages[0].get_module_rref().rpc_sync().order()
        parts = [part.sum().item() for step in range(STEPS) for part in given(step).chunk(4)]
        assert seen == parts  # each stage has the micro-batches in their order


def test_a_stage_that_fails_fails_the_batch_when_no_stage_works_on_it() -> None:
    with federation(3):
        pipeline = Pipeline([RemoteModule("worker1", Middle, (1,)), RemoteModule("worker2", Middle, (2,))], chunks=2)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            pipeline(torch.ones(4, 9, dtype=torch.float64))
        assert pipeline(torch.ones(4, 4, dtype=torch.float64)).shape == (4, 4)


def test_gradients_of_several_contexts() -> None:
    """`accumulate` and a step without a context; and a `.grad` that a pass writes itself."""
    encoder = make_encoder()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.05)
    for step in (0, 1):
        encoder(rows[ids_of(step)]).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    encoder(rows[ids_of(2)]).pow(2).mean().backward()
    optimizer.step()
    with federation():
        shop = RemoteModule("worker1", Shop)
        distributed = DistributedOptimizer(torch.optim.SGD, parameter_rrefs(shop), lr=1.0)
        for step in (0, 1):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [shop(step).pow(2).mean()])
                distributed.accumulate(context_id)
        distributed.step()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [shop(2).pow(2).mean()], accumulate="grad")
        distributed.step()
        distributed.step()  # without gradients it does nothing
        assert_same(encoder, party_of(Shop).module)
        assert party_of(Shop).steps == 2


def test_without_gradients() -> None:
    with federation():
        shop = RemoteModule("worker1", Shop)
        with torch.no_grad():
            outside = shop(0)
            later = shop.forward_async(0).wait()
            with dist_autograd.context():
                inside = shop(0)
        for found in (outside, later, inside):
            assert not found.requires_grad
            assert torch.equal(found, make_encoder()(rows[ids_of(0)]))


def test_a_remote_module_describes_its_party() -> None:
    with federation():
        shop = RemoteModule("worker1", Shop)
        assert str(shop) == "RemoteModule(Shop on worker1/cpu)"
        (entry,) = parameter_rrefs(shop, shop)
        assert list(shop.buffers()) == []
        optimizer = DistributedOptimizer(torch.optim.SGD, [entry], lr=0.1)
        assert repr(optimizer).endswith("of SGD on 'worker0', and of parties 'worker1'")
        parent = nn.Sequential(shop)
        parent.eval()
        assert not party_of(Shop).module.training
        assert not shop.training
        parent.train()
        assert party_of(Shop).module.training
        again = RemoteModule.init_from_module_rref("worker1", shop.get_module_rref())
        assert torch.equal(again(1), shop(1))
        shop.zero_grad()


def test_one_party_for_several_peers() -> None:
    """An exposed function returns the same party to all peers."""
    with federation(3) as workers:
        encoder = make_encoder()
        one = Party(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
        given["one"] = one
        try:
            first = RemoteModule("worker1", give_the_one)
            with workers[2].as_current():
                second = RemoteModule("worker1", give_the_one)
                assert torch.equal(second(rows), encoder(rows))
            assert torch.equal(first(rows), encoder(rows))
        finally:
            del given["one"]


given: dict[str, Party] = {}


@rpc.expose
def give_the_one() -> Party:
    return given["one"]


# Loaders.


@pytest.mark.parametrize(
    ("loader", "calls", "expected"),
    [
        (None, [(rows[:2],)], [rows[:2]]),
        (lambda ids: rows[ids], [(torch.tensor([3, 1]),)], [rows[[3, 1]]]),
        (lambda ids: (rows[ids],), [([0],)], [rows[:1]]),
        ([rows[:2], rows[2:4]], [(), (), ()], [rows[:2], rows[2:4], rows[:2]]),
        ([(rows[:2],), [rows[2:4]]], [(), ()], [rows[:2], rows[2:4]]),
        (torch.utils.data.DataLoader(rows[:6], batch_size=4), [(), (), ()], [rows[:4], rows[4:6], rows[:4]]),
    ],
    ids=["arguments", "function", "tuple", "iterable", "tuples", "DataLoader"],
)
def test_loaders(loader: Any, calls: list[Any], expected: list[Tensor]) -> None:
    party = Party(make_encoder(), loader=loader)
    for arguments, batch in zip(calls, expected, strict=True):
        assert torch.equal(party.forward(*arguments), make_encoder()(batch))


def test_loaders_misused() -> None:
    with pytest.raises(MisuseError, match="call it without arguments"):
        Party(make_encoder(), loader=[rows]).forward(1)
    with pytest.raises(MisuseError, match="has no batches"):
        Party(make_encoder(), loader=[]).forward()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"module": make_encoder}, "needs an nn.Module, not a function"),
        ({"optimizer": 3}, "needs a torch optimizer, or None, not a int"),
        ({"loader": 3}, "a function or an iterable, not a int"),
        ({"max_rows": 0}, "max_rows=0 must be"),
    ],
)
def test_a_party_filled_wrongly(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        Party(**{"module": make_encoder(), **arguments})


# Errors that say what is missing.


@pytest.mark.parametrize("what", [Hidden, nn.Linear, party_models.plain_module, party_models.party_of])
def test_a_refusal_names_what_is_not_exposed(what: Any) -> None:
    with federation():
        with pytest.raises(RefusedError) as refusal:
            RemoteModule("worker1", what)
        text = str(refusal.value)
        assert f"worker 'worker1' does not let 'worker0' use {what.__qualname__} of module {what.__module__}" in text
        assert "@rpc.expose(to='worker0')" in text
        assert f"class {what.__qualname__}(Party)" in text


def test_a_party_that_is_exposed_to_others_only() -> None:
    with federation(3) as workers, workers[2].as_current(), pytest.raises(RefusedError, match="to='worker2'"):
        RemoteModule("worker1", Shop)


def test_a_reference_to_something_other_than_a_party_is_refused() -> None:
    with federation(), pytest.raises(RefusedError, match="use this reference as a RemoteModule"):
        RemoteModule.init_from_module_rref("worker1", rpc.remote("worker1", party_models.plain_module))


def test_a_device_that_the_party_has_not_chosen() -> None:
    with federation(), pytest.raises(OptionError, match="has its module on cpu, not on cuda:0: omit the device"):
        RemoteModule("worker1/cuda:0", Shop)


REFUSED: dict[str, Callable[[RemoteModule], Any]] = {
    r"half\(\)": lambda shop: shop.half(),
    r"requires_grad_\(\)": lambda shop: shop.requires_grad_(False),
    r"to\(\)": lambda shop: shop.to("cpu"),
    "apply": lambda shop: shop.apply(print),
    "registering a hook": lambda shop: shop.register_forward_hook(print),
    r"get_parameter\(\)": lambda shop: shop.get_parameter("0.weight"),
    r"load_state_dict\(\)": lambda shop: shop.load_state_dict({}),
    "a conversion": lambda shop: nn.Sequential(shop).half(),
    "copying": lambda shop: __import__("copy").deepcopy(shop),
}


@pytest.mark.parametrize("what", REFUSED)
def test_operations_reserved_for_the_party_are_refused(what: str) -> None:
    with federation():
        shop = RemoteModule("worker1", Shop)
        with pytest.raises(MisuseError, match=f"{what}.* is not allowed on the module of a party: let 'worker1'"):
            REFUSED[what](shop)


def test_an_optimizer_over_another_worker_s_module_is_refused() -> None:
    with federation(), pytest.raises(MisuseError, match=r"only its owner may step it. Let 'worker1' expose a"):
        DistributedOptimizer(torch.optim.SGD, [rpc.remote("worker1", party_models.plain_module)], lr=0.1)


def test_options_are_for_the_parameters_of_this_worker() -> None:
    with federation():
        (shop,) = parameter_rrefs(RemoteModule("worker1", Shop))
        head = make_head()
        with pytest.raises(OptionError, match="a parameter group with lr contains a party"):
            DistributedOptimizer(torch.optim.SGD, [{"params": [shop, *head.parameters()], "lr": 0.1}], lr=1.0)
        optimizer = DistributedOptimizer(
            torch.optim.SGD, [{"params": list(head.parameters()), "lr": 0.1}, {"params": [shop]}], lr=1.0
        )
        assert [len(group["params"]) for group in optimizer.param_groups] == [2]
        for what in (optimizer, [shop]):
            with pytest.raises(OptionError, match="clip_grad_norm_ needs the gradients of all parameters"):
                clip_grad_norm_(None, what, 1.0)
        scaler = GradScaler()
        scaler.scale(torch.ones(1))
        with pytest.raises(OptionError, match="a GradScaler needs the gradients of all parameters"):
            scaler.unscale_(optimizer)


def test_a_party_that_does_not_step() -> None:
    with federation():
        given["one"] = Party(make_encoder())
        try:
            shop = RemoteModule("worker1", give_the_one)
            head = make_head()
            optimizer = DistributedOptimizer(torch.optim.SGD, parameter_rrefs(shop, head), lr=0.1)
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [head(shop(rows)).sum()])
                with pytest.raises(PartialError, match="Party has no optimizer") as failure:
                    optimizer.step(context_id)
            assert failure.value.done == ("worker0",)
            assert list(failure.value.errors) == ["worker1"]
        finally:
            del given["one"]


def test_each_party_saves_its_own_checkpoint(tmp_path: Path) -> None:
    with federation():
        shop, head = RemoteModule("worker1", Shop), make_head()
        optimizer = DistributedOptimizer(torch.optim.SGD, parameter_rrefs(shop, head), lr=0.1)
        with pytest.raises(MisuseError, match=r"RemoteModule\(Shop on worker1/cpu\) belongs to a party"):
            checkpoint.save({"model": nn.Sequential(shop, head)}, tmp_path / "all")
        checkpoint.save({"head": head, "optimizer": optimizer}, tmp_path / "mine")
        party = party_of(Shop)
        checkpoint.save({"module": party.module, "optimizer": party.optimizer}, tmp_path / "theirs")
        assert_same(checkpoint_into(make_encoder(2), tmp_path / "theirs"), party.module)


def checkpoint_into(module: nn.Module, directory: Path) -> nn.Module:
    checkpoint.load(directory, {"module": module})
    return module


def test_nothing_of_a_party_is_left_when_its_references_are_gone() -> None:
    with federation():
        shop = RemoteModule("worker1", Shop)
        shop(0)
        del shop
        gc.collect()
        rpc.rpc_sync("worker1", party_models.echo_number, (1,))
    gc.collect()
    assert not [each for each in Party._living if type(each) is Shop]
