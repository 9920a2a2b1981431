"""Adversarial programs in one process, with plain torch.

``rpc`` is a stand-in that calls functions in this process, and clones arguments and results as a message does: the
receiver may change a tensor in place, and the graph continues through it. A function runs as at a callee, on a new
thread, with the autocast of its caller.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

import adversarial_words as words
import torch
from adversarial import Program
from adversarial_places import Outcome, grads_of, load, make_place, optimize, outcome_of, trainable
from adversarial_words import Place, standing
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from backhaul import rpc
from backhaul.eager import eager


def crossed(value: Any) -> Any:
    """The value that another worker gets: a clone. A tensor that occurs twice arrives as one."""
    clones: dict[int, Any] = {}
    grad = torch.is_grad_enabled()

    def clone(each: Any) -> Any:
        if isinstance(each, tuple):
            return tuple(map(clone, each))
        if not isinstance(each, Tensor):
            return each
        if id(each) not in clones:
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                clones[id(each)] = each.clone()
        return clones[id(each)]

    return clone(value)


class _LocalFuture:
    def __init__(self, value: Any) -> None:
        self.value = value

    def wait(self) -> Any:
        return self.value

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.value
        yield

    def then(self, callback: Callable[[Any], Any]) -> _LocalFuture:
        return _LocalFuture(callback(self))


class _LocalRef:
    def __init__(self, value: Any, place: Place) -> None:
        self.value = value
        self.place = place

    def to_here(self) -> Any:
        return self.value if words.place_here() is self.place else crossed(self.value)

    def rpc_sync(self) -> _LocalRef:
        return self

    def sin(self) -> Any:
        return crossed(self.value.sin())


def _elsewhere(place: Place, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function as at a callee: on a new thread, which takes only the autocast from its caller."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    result: Future[Any] = Future()

    def run() -> None:
        try:
            with standing(place), torch.autocast("cpu", autocast[1], enabled=autocast[0]):
                value = function(*args)
                if inspect.iscoroutine(value):
                    try:
                        value.send(None)
                    except StopIteration as end:
                        value = end.value
                result.set_result(value.value if isinstance(value, _LocalFuture) else value)
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result.result()


class _LocalRpc:
    functions = rpc.functions

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places

    def _run(self, to: str, function: Callable[..., Any], args: Any) -> tuple[Place, Any]:
        place = self.places[int(to.removeprefix("worker"))]
        return place, _elsewhere(place, function, *crossed(args))

    @eager
    def rpc_sync(self, to: str, function: Callable[..., Any], args: Any = ()) -> Any:
        return crossed(self._run(to, function, args)[1])

    @eager
    def rpc_async(self, to: str, function: Callable[..., Any], args: Any = ()) -> Any:
        return _LocalFuture(self.rpc_sync(to, function, args))

    @eager
    def remote(self, to: str, function: Callable[..., Any], args: Any = ()) -> Any:
        place, value = self._run(to, function, args)
        return _LocalRef(value, place)


class _LocalModule:
    def __init__(self, place: Place, module: nn.Module) -> None:
        self.place = place
        self.module = module

    @eager
    def __call__(self, x: Tensor) -> Any:
        return crossed(_elsewhere(self.place, self.module, crossed(x)))


def run_locally(program: Program) -> list[Outcome]:
    """The outcome on every worker, if all were one process."""
    into_grad = program.accumulate == "grad"
    places = [make_place(program, worker, grads=into_grad) for worker in range(program.size)]
    for module in program.modules:
        if module.remote:
            there = places[module.worker]
            places[0].things[f"remote {module.name}"] = _LocalModule(there, there.things[module.name])
    text = load(program, f"local_{program.seed}", _LocalRpc(places))
    gradients: list[list[dict[str, Tensor]]] = [[] for _ in places]
    orders: list[list[tuple[str, str]]] = []
    for _ in range(program.iterations):
        if not into_grad:
            for place in places:
                for leaf in trainable(place).values():
                    leaf.grad = None
        with standing(places[0]):
            roots = text.main()
        roots = roots if isinstance(roots, tuple) else (roots,)
        orders = [_orders(place, roots) for place in places]
        for each in program.passes:
            with standing(places[0]):
                chosen = [roots[root] for root in each.roots]
                # As in `backhaul.autograd.backward`, roots that do not require grad are skipped, but not a single root.
                chosen = [root for root in chosen if root.requires_grad] or chosen
                torch.autograd.backward(chosen, retain_graph=each.retain_graph)
        for place, found in zip(places, gradients, strict=True):
            found.append(grads_of(place))
        if program.optimizer:
            for place in places:
                optimize(program, place)
    outcomes = [outcome_of(place, found) for place, found in zip(places, gradients, strict=True)]
    for outcome, found in zip(outcomes, orders, strict=True):
        outcome.orders = found
    return outcomes


def _orders(place: Place, roots: Sequence[Tensor]) -> list[tuple[str, str]]:
    """Pairs of hooks that torch calls in this order. A node that no root reaches may be freed already."""
    alive = _below(*(get_gradient_edge(root).node for root in roots if root.requires_grad))
    watched = {name: node for name, node in place.watched.items() if node in alive}
    found = []
    for first, node in watched.items():
        below = _below(node)
        found += [(first, second) for second, other in watched.items() if other in below]
    return found


def _below(*nodes: Any) -> set[Any]:
    """All nodes that a backward pass reaches from these."""
    found: set[Any] = set()
    stack = list(nodes)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None and following not in found:
                found.add(following)
                stack.append(following)
    return found
