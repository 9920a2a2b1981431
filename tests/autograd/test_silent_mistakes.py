"""Programs that would train nothing, or only in part, get an error or a warning; correct programs do not."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from typing import Any

import pytest
import torch
from models import WITHIN, W, double, layer, leaf, multiply
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import ContextError, MisuseError
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer, GradScaler, clip_grad_norm_
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.usefixtures("quiet")

ENDS = r"a gradient ends at a tensor that worker 'worker1' computed.*with backhaul\.autograd\.context\(\)"


def test_backward_without_a_context(pair: InProcessCluster) -> None:
    with pair[0].as_current():
        module = RemoteModule("worker1", nn.Linear, args=(3, 2))
        loss = module(torch.ones(1, 3)).sum()
        with pytest.warns(UserWarning, match=ENDS):
            loss.backward()
        y = rpc.rpc_sync("worker1", multiply, args=("a", leaf(4, 4)))
        assert y.is_leaf
        with pytest.warns(UserWarning, match=ENDS):
            torch.autograd.grad(y.sum(), y)


def test_forward_outside_and_backward_inside(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current():
        y = rpc.rpc_sync("worker1", multiply, args=("a", x))
        with dist_autograd.context() as context_id, pytest.warns(UserWarning, match=ENDS):
            context_id.backward((y * x).sum())


def parts(x: Tensor) -> dict[str, Any]:
    return {
        "computed": x * W["a"],
        "leaf": W["a"],
        "detached": (x * W["a"]).detach().requires_grad_(),
        "parameter": nn.Parameter(torch.ones(2)),
        "module": nn.Linear(2, 2),
    }


def use_up(x: Tensor) -> Tensor:
    """Manual split learning: the gradient of a received tensor goes back as a value."""
    x.square().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def test_intended_leaves_cause_no_warning(pair: InProcessCluster) -> None:
    """Leaves on purpose cause no warning. (Warnings are errors in these tests.)"""
    x = leaf(4, 4)
    with pair[0].as_current():
        got = rpc.rpc_sync("worker1", parts, args=(x,))
        total = got["leaf"].sum() + got["detached"].sum() + got["parameter"].sum()
        (total + got["module"](torch.ones(2)).sum() + got["computed"].detach().sum()).backward()
        assert torch.equal(rpc.rpc_sync("worker1", use_up, args=(x * 1,)), 2 * x)
        file = io.BytesIO()
        torch.save(got["computed"], file)  # torch warns of tensors that have hooks
        copy.deepcopy(got["computed"])
        with torch.no_grad():
            assert not (got["computed"] * 2).requires_grad
        with torch.inference_mode():
            rpc.rpc_sync("worker1", multiply, args=("a", x.detach()))
        again = rpc.rpc_sync("worker1", double, args=(got["computed"].detach(),))
        assert not again.requires_grad


def test_a_gradient_that_would_be_incomplete(pair: InProcessCluster) -> None:
    says = r"do not go through other workers: the gradient of an input that worker 'worker1' used"
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as context_id:
        h = x * 2
        y = rpc.rpc_sync("worker1", layer, args=("a", h))
        for loss in (y.sum(), (y * h + x).sum()):
            for inputs in ([x], [h], [get_gradient_edge(h)], [x, h]):
                for allow_unused in (False, True):
                    with pytest.raises(ContextError, match=says):
                        torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=allow_unused)
            for inputs in (x, [h]):
                with pytest.raises(ContextError, match=says):
                    loss.backward(inputs=inputs, retain_graph=True)
        # Tensors that do not depend on sent tensors behave as in one process.
        z = leaf(4, 4, seed=5)
        assert torch.equal(torch.autograd.grad((y * z).sum(), z, retain_graph=True)[0], y)
        assert torch.equal(torch.autograd.grad((y * 3).sum(), y, retain_graph=True)[0], torch.full_like(y, 3))
        assert torch.equal(torch.autograd.grad((h * 3).sum(), x, retain_graph=True)[0], torch.full_like(x, 6))
        context_id.backward((y * h + x).sum())
        assert x in context_id.gradients()


def there_and_on(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker2", double, args=(x,)) + rpc.rpc_sync("worker0", double, args=(x,))


def test_a_gradient_through_several_workers(trio: InProcessCluster) -> None:
    """The graph has more sources than a message lists, so every sent tensor may be affected."""
    x, z = leaf(2), leaf(2)
    with trio[0].as_current(), dist_autograd.context():
        y = rpc.rpc_sync("worker1", there_and_on, args=(x * 1,))
        for _ in range(4):
            y = rpc.rpc_sync("worker1", there_and_on, args=(y,))
        with pytest.raises(ContextError, match="do not go through other workers"):
            torch.autograd.grad(y.sum(), x)
        assert torch.autograd.grad((y * z).sum(), z)[0].eq(y).all()


def test_a_missing_context_id(pair: InProcessCluster) -> None:
    with pair[0].as_current(), dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", layer, args=("a", leaf(4, 4))).sum()
        rref = rpc.remote("worker1", double, args=(torch.ones(2),))
        for given in ([loss], loss, (loss,), rref):
            with pytest.raises(TypeError, match=r"the context id is missing\. Write backward\(context_id, \[loss\]\)"):
                dist_autograd.backward(given)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="the context id is missing"):
                dist_autograd.backward(given, True)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="roots must be a tensor"):
            dist_autograd.backward(context_id)
        context_id.backward(loss)


def test_a_step_without_the_context_id(pair: InProcessCluster) -> None:
    says = r"are in the open autograd context: pass context_id to step\(\)"
    with pair[0].as_current():
        module = RemoteModule("worker1", nn.Linear, args=(3, 2))
        optimizer = DistributedOptimizer(torch.optim.SGD, parameter_rrefs(module), lr=0.1)
        scaler = GradScaler()

        def run(context_id: Any, **options: Any) -> None:
            context_id.backward(module(torch.ones(1, 3)).sum(), **options)

        with dist_autograd.context() as context_id:
            optimizer.step()  # it misses no gradients
            run(context_id)
            for mistake in (
                optimizer.step,
                lambda: clip_grad_norm_(None, optimizer, 1.0),
                lambda: scaler.step(optimizer),
            ):
                with pytest.raises(MisuseError, match=says):
                    mistake()
            optimizer.step(context_id)
            optimizer.step()  # the gradients were read
        with dist_autograd.context() as context_id:
            run(context_id)
            optimizer.accumulate(context_id)
            optimizer.step()
            run(context_id)
            dist_autograd.get_gradients(context_id)
            optimizer.step()
        optimizer.zero_grad()
        with dist_autograd.context() as context_id:
            run(context_id, accumulate="grad")
            optimizer.step()
        with dist_autograd.context() as context_id:
            run(context_id)
        optimizer.step()  # outside the context


def test_an_optimizer_of_torch_that_finds_no_gradient(pair: InProcessCluster) -> None:
    model = nn.Linear(4, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([leaf(2)], lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with pair[0].as_current(), dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", layer, args=("a", model(leaf(4, 4)))).sum()
        context_id.backward(loss, retain_graph=True)
        with pytest.raises(MisuseError, match=r"SGD\.step\(\) would change nothing.*DistributedOptimizer"):
            optimizer.step()
        other.step()
        context_id.backward(loss, accumulate="grad")
        optimizer.step()
    assert not torch.equal(model.weight, before["weight"])


def test_the_warning_comes_once(pair: InProcessCluster) -> None:
    with pair[0].as_current(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            rpc.rpc_sync("worker1", multiply, args=("a", leaf(4, 4))).sum().backward()
    assert len([each for each in caught if "a gradient ends" in str(each.message)]) == 1


STAGE = nn.Linear(4, 2).double()


def run_stage(x: Tensor) -> Tensor:
    result: Tensor = STAGE(x)
    return result


def stage_rrefs() -> list[Any]:
    STAGE.requires_grad_(True)
    return [rpc.RRef(each) for each in STAGE.parameters()]


def stage_copies() -> list[Tensor]:
    return list(STAGE.parameters())


def replace_all() -> None:
    STAGE.load_state_dict({name: each.clone() for name, each in STAGE.state_dict().items()}, assign=True)


def freeze() -> None:
    STAGE.requires_grad_(False)


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("params", "between", "passes"),
    [
        (stage_rrefs, nothing, 0),
        (stage_rrefs, replace_all, 1),
        (stage_rrefs, freeze, 1),
        (stage_copies, nothing, 1),
    ],
    ids=["before backward", "parameters that were replaced", "parameters that were frozen", "copies of parameters"],
)
def test_a_step_without_any_gradient(pair: InProcessCluster, params: Any, between: Any, passes: int) -> None:
    says = r"step\(context_id\) has changed nothing: none of the 2 parameters .*parameter_rrefs\(model\)"
    with pair[0].as_current():
        optimizer = DistributedOptimizer(torch.optim.SGD, rpc.rpc_sync("worker1", params), lr=0.1)
        good = DistributedOptimizer(torch.optim.SGD, [x := leaf(4, 4)], lr=0.1)
        rpc.rpc_sync("worker1", between)
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", run_stage, args=(x,)).sum()
            for _ in range(passes):
                context_id.backward(loss)
                good.step(context_id)
            with pytest.warns(UserWarning, match=says) as caught:
                optimizer.step(context_id)
            assert caught[0].filename == __file__


def test_a_step_with_one_gradient_causes_no_warning(pair: InProcessCluster) -> None:
    """Parameters that a pass does not reach are normal, so nothing warns. (Warnings are errors in these tests.)"""
    with pair[0].as_current():
        optimizer = DistributedOptimizer(
            torch.optim.SGD, [*rpc.rpc_sync("worker1", stage_rrefs), leaf(2), x := leaf(4, 4)], lr=0.1
        )
        with dist_autograd.context() as context_id:
            context_id.backward(x.sum())
            optimizer.step(context_id)


def detached(x: Tensor) -> Tensor:
    return (x * 2).detach()


def by_item(x: Tensor) -> Tensor:
    return torch.tensor((x * 2).sum().item())


@torch.no_grad()
def without_grad(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("function", [detached, by_item, without_grad])
def test_a_function_that_cuts_the_graph(pair: InProcessCluster, function: Any) -> None:
    with pair[0].as_current(), dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", function, args=(leaf(4, 4),)).sum()
        with pytest.raises(MisuseError, match="requires_grad not set on root"):
            context_id.backward(loss)


def test_calls_on_a_thread_of_the_user_s_own(pair: InProcessCluster) -> None:
    """A thread that is started inside a context is not in that context."""
    x, found = leaf(4, 4), []

    def call() -> None:
        with pair[0].as_current():
            found.append(rpc.rpc_sync("worker1", multiply, args=("a", x)))

    with pair[0].as_current(), dist_autograd.context() as context_id:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        with pytest.warns(UserWarning, match=ENDS):
            context_id.backward(found[0].sum())


def test_the_id_of_a_context_of_another_thread(pair: InProcessCluster) -> None:
    entered, over, ids = threading.Event(), threading.Event(), []

    def hold() -> None:
        with pair[0].as_current(), dist_autograd.context() as context_id:
            ids.append(context_id)
            entered.set()
            over.wait(WITHIN)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert entered.wait(WITHIN)
        with pair[0].as_current(), dist_autograd.context():
            loss = rpc.rpc_sync("worker1", double, args=(leaf(2),)).sum()
            with pytest.raises(ContextError, match="gradients cannot go back across contexts"):
                dist_autograd.backward(ids[0], [loss])
    finally:
        over.set()
        thread.join()


# What torch refuses or computes in one process, and the same with a call in between.


def forward(x: Tensor) -> Tensor:
    result: Tensor = rpc.rpc_sync("worker1", multiply, args=("a", x))
    return result


def in_no_grad(x: Tensor) -> None:
    with torch.no_grad(), dist_autograd.context() as context_id:
        context_id.backward(forward(x).sum())


def in_inference_mode(x: Tensor) -> None:
    with torch.inference_mode(), dist_autograd.context() as context_id:
        context_id.backward(forward(x).sum())


def twice_without_the_graph(x: Tensor) -> None:
    with dist_autograd.context() as context_id:
        loss = forward(x).sum()
        context_id.backward(loss)
        context_id.backward(loss)


def a_result_is_changed_in_place(x: Tensor) -> None:
    with dist_autograd.context() as context_id:
        y = forward(x)
        loss = (y * y).sum()
        y.add_(1)
        context_id.backward(loss)


def a_weight_is_changed_in_place(x: Tensor) -> None:
    with dist_autograd.context() as context_id:
        loss = forward(x).sum()
        with torch.no_grad():
            W["a"].add_(1)
        context_id.backward(loss)


def the_number(x: Tensor) -> None:
    with dist_autograd.context() as context_id:
        context_id.backward([forward(x).sum().item()])  # type: ignore[list-item]


def the_number_as_a_tensor(x: Tensor) -> None:
    with dist_autograd.context() as context_id:
        context_id.backward(torch.tensor(forward(x).sum().item()))


def the_number_as_a_leaf(x: Tensor) -> None:
    with dist_autograd.context() as context_id:
        context_id.backward(torch.tensor(forward(x).sum().item(), requires_grad=True))


def a_value_of_another_context(x: Tensor) -> None:
    with dist_autograd.context():
        rref = rpc.remote("worker1", multiply, args=("a", x))
        rref.to_here()
    with dist_autograd.context() as context_id:
        context_id.backward(rref.to_here().sum())


def the_gradient_of_a_gradient(x: Tensor) -> None:
    with dist_autograd.context() as context_id:
        context_id.backward(forward(x).square().sum())
        context_id.backward(context_id.gradients()[x].sum())


def with_create_graph(x: Tensor) -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward(x).sum()], create_graph=True)  # type: ignore[call-arg]


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (in_no_grad, MisuseError, "requires_grad not set on root"),
    (in_inference_mode, MisuseError, "requires_grad not set on root"),
    (twice_without_the_graph, RuntimeError, "backward through the graph a second time"),
    (a_result_is_changed_in_place, RuntimeError, "modified by an inplace operation"),
    (a_weight_is_changed_in_place, RuntimeError, "modified by an inplace operation"),
    (the_number, TypeError, r"such as loss\.item\(\), has no autograd graph: give the tensor itself"),
    (the_number_as_a_tensor, MisuseError, "requires_grad not set on root"),
    (the_number_as_a_leaf, MisuseError, "it is a leaf, not computed from anything"),
    (a_value_of_another_context, ContextError, "gradients cannot go back across contexts"),
    (the_gradient_of_a_gradient, MisuseError, "requires_grad not set on root"),
    (with_create_graph, TypeError, "create_graph"),
]


@pytest.mark.parametrize(("program", "error", "says"), REFUSED, ids=lambda each: getattr(each, "__name__", ""))
def test_programs_that_would_train_nothing_are_refused(
    pair: InProcessCluster, program: Any, error: type[Exception], says: str
) -> None:
    W["a"] = leaf(4, 4, seed=2)
    with pair[0].as_current(), pytest.raises(error, match=says):
        program(leaf(4, 4))


def a_value_is_fetched_after_the_context(x: Tensor) -> None:
    with dist_autograd.context():
        rref = rpc.remote("worker1", multiply, args=("a", x))
    rref.to_here().sum().backward()


def a_value_is_fetched_before_the_context(x: Tensor) -> None:
    y = rpc.remote("worker1", multiply, args=("a", x)).to_here()
    with dist_autograd.context() as context_id:
        context_id.backward((y * 2).sum())


@pytest.mark.parametrize("program", [a_value_is_fetched_after_the_context, a_value_is_fetched_before_the_context])
def test_values_of_references_warn_like_results(pair: InProcessCluster, program: Any) -> None:
    W["a"] = leaf(4, 4, seed=2)
    with pair[0].as_current(), pytest.warns(UserWarning, match=ENDS):
        program(leaf(4, 4))


def test_an_argument_is_a_copy_from_the_moment_of_the_call(pair: InProcessCluster) -> None:
    """Changed in place, made to require grad, or made in inference mode: the call behaves as with a clone."""
    weight = W["a"] = leaf(4, 4, seed=2)
    with torch.inference_mode():
        inferred = torch.full((4, 4), 5.0, dtype=torch.float64)
    with pair[0].as_current(), dist_autograd.context() as context_id:
        x, late = leaf(4, 4), torch.ones(4, 4, dtype=torch.float64)
        sent = x * 3
        loss = forward(sent).sum() + rpc.rpc_sync("worker1", torch.mul, args=(x, inferred)).sum() + forward(late).sum()
        sent.mul_(10)
        late.requires_grad_()
        context_id.backward(loss)
        assert torch.equal(context_id.gradients()[x], 3 * weight.detach() + 5)
        assert late not in context_id.gradients()


def widen() -> None:
    STAGE.to(torch.float32)
    STAGE.to(torch.float64)


def test_parameters_that_were_moved_are_trained(pair: InProcessCluster) -> None:
    with pair[0].as_current():
        optimizer = DistributedOptimizer(torch.optim.SGD, rpc.rpc_sync("worker1", stage_rrefs), lr=0.1)
        rpc.rpc_sync("worker1", widen)
        before = STAGE.weight.detach().clone()
        with dist_autograd.context() as context_id:
            context_id.backward(rpc.rpc_sync("worker1", run_stage, args=(leaf(4, 4),)).sum())
            optimizer.step(context_id)
    assert not torch.equal(STAGE.weight, before)
