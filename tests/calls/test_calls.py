"""Calls between workers of one process: the callee, and the values."""

from __future__ import annotations

import operator
import threading
import warnings

import pytest
import torch
from callees import Counter, bounce, identity, who

from backhaul import rpc
from backhaul.rpc import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.worker import current


def keywords(a: int, *, b: int = 2) -> tuple[int, int]:
    return a, b


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 3 + 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about the future of TorchScript
    scripted = torch.jit.script(scripted)


def test_target_by_name_rank_and_info(pair: InProcessCluster) -> None:
    info = pair[0].get_worker_info("worker1")
    assert info == rpc.WorkerInfo(1, "worker1")
    for to in ("worker1", 1, info):
        assert pair[0].rpc_sync(to, who) == "worker1"
        assert pair[0].rpc_async(to, who).wait() == "worker1"


def test_a_worker_can_call_itself(pair: InProcessCluster) -> None:
    assert pair[0].rpc_sync("worker0", who) == "worker0"
    assert pair[0].rpc_sync(0, bounce, args=("worker0", "worker0", 5)) == 5


def test_the_error_for_an_unknown_worker_lists_all_workers(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.UnknownWorkerError, match=r"named 'workr1'.*'worker0' \(rank 0\), 'worker1' \(rank 1\)"):
        pair[0].rpc_sync("workr1", who)
    with pytest.raises(rpc.UnknownWorkerError, match="rank 7"):
        pair[0].rpc_async(7, who)
    with pytest.raises(rpc.OptionError, match="name, rank or WorkerInfo"):
        pair[0].rpc_sync(None, who)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (operator.add, (1, 2), 3),
        (len, ([1, 2, 3],), 3),
        (torch.add, (torch.ones(2), 1), torch.full((2,), 2.0)),
        (torch.nn.functional.relu, (torch.tensor([-1.0, 2.0]),), torch.tensor([0.0, 2.0])),
        (torch.ops.aten.mul.Tensor, (torch.ones(2), torch.tensor(3.0)), torch.full((2,), 3.0)),
        (torch.Tensor.sum, (torch.ones(4),), torch.tensor(4.0)),
        (scripted, (torch.ones(2),), torch.full((2,), 4.0)),
        (Counter.double, (4,), 8),
        (Counter.plus, (Counter(5), 2), 7),
        (Counter(5).plus, (3,), 8),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_callables(pair: InProcessCluster, func: object, args: tuple[object, ...], expected: object) -> None:
    value = pair[0].rpc_sync("worker1", func, args=args)  # type: ignore[arg-type]
    torch.testing.assert_close(value, expected)


def test_classes_and_class_methods_make_objects(pair: InProcessCluster) -> None:
    assert pair[0].rpc_sync("worker1", Counter, args=(3,)).value == 3
    assert pair[0].rpc_sync("worker1", Counter.made, args=(4,)).value == 4


def test_keyword_arguments(pair: InProcessCluster) -> None:
    assert pair[0].rpc_sync("worker1", keywords, args=(1,), kwargs={"b": 5}) == (1, 5)
    assert pair[0].rpc_sync("worker1", keywords, kwargs={"a": 7}) == (7, 2)


def test_lambda_and_local_function_say_what_to_do(pair: InProcessCluster) -> None:
    def local() -> None: ...

    for function in (lambda: 1, local):
        with pytest.raises(rpc.UnsendableError, match="module level"):
            pair[0].rpc_sync("worker1", function)


def test_a_function_that_the_callee_lacks(pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, packing = pair[0].codec.pack((keywords, (), {}))
    name = f"{__name__}:keywords"
    assert name in str(tree)
    monkeypatch.setattr(pair[0].codec, "pack_call", lambda *call: (_renamed(tree, name, f"{__name__}:gone"), packing))
    with pytest.raises(rpc.MisuseError, match="gone"):
        pair[0].rpc_sync("worker1", keywords)


def _renamed(tree: object, old: str, new: str) -> object:
    if isinstance(tree, list):
        return [_renamed(item, old, new) for item in tree]
    return new if tree == old else tree


def test_rpc_functions_act_for_the_current_worker(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.NotInitializedError, match="init_rpc"):
        rpc.rpc_sync("worker1", who)
    with pair[0].as_current():
        assert current() is pair[0]
        assert rpc.get_worker_info().name == "worker0"
        assert rpc.rpc_sync("worker1", who) == "worker1"
        with pair[1].as_current():
            assert rpc.rpc_async("worker0", who).wait() == "worker0"
            assert rpc.get_worker_info().id == 1
    with pytest.raises(rpc.NotInitializedError):
        rpc.get_worker_info()


# Values.


def test_received_tensors_are_the_receivers_own(pair: InProcessCluster) -> None:
    for size in (10, 3_000_000):
        sent = torch.zeros(size)
        back = pair[0].rpc_sync("worker1", identity, args=(sent,))
        back += 1
        assert sent.sum() == 0
        assert back.sum() == size


def test_one_tensor_twice_arrives_as_one(pair: InProcessCluster) -> None:
    x = torch.randn(3)
    a, b = pair[0].rpc_sync("worker1", identity, args=((x, x),))
    assert a is b


_weights = torch.zeros(40_000)


def get_weights() -> torch.Tensor:
    return _weights


def change_weights() -> None:
    _weights.add_(1)


def test_a_result_keeps_its_value_from_the_function_s_return(pair: InProcessCluster) -> None:
    """The next request, which changes the tensor in place, may have arrived already."""
    for _ in range(40):
        before = int(_weights[0])
        first = pair[0].rpc_async("worker1", get_weights)
        second = pair[0].rpc_async("worker1", change_weights)
        assert int(first.wait()[0]) == before
        second.wait()


def test_messages_over_the_limit() -> None:
    for sockets in (False, True):
        with InProcessCluster(2, sockets=sockets, options=RpcOptions(max_message_bytes=100_000)) as workers:
            with pytest.raises(rpc.UnsendableError, match="max_message_bytes"):
                workers[0].rpc_sync("worker1", identity, args=(torch.zeros(100_000),))
            with pytest.raises(rpc.UnsendableError, match="max_message_bytes"):
                workers[0].rpc_sync("worker1", torch.zeros, args=(100_000,))
            assert workers[0].rpc_sync("worker1", who) == "worker1"
            assert workers[0].agent.calling()[0].outstanding == 0


def test_arguments_of_the_wrong_kind(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.OptionError, match="args must be a tuple"):
        pair[0].rpc_sync("worker1", identity, args=torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(rpc.OptionError, match="args must be a tuple"):
        pair[0].rpc_async("worker1", identity, args=0)  # type: ignore[arg-type]
    with pytest.raises(rpc.OptionError, match="kwargs must be a dict"):
        pair[0].rpc_sync("worker1", identity, kwargs=[1])  # type: ignore[arg-type]
    with pytest.raises(rpc.OptionError, match="timeout"):
        pair[0].rpc_sync("worker1", who, timeout=None)  # type: ignore[arg-type]


def test_unsendable_argument_and_result(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.UnsendableError, match="lock"):
        pair[0].rpc_sync("worker1", identity, args=(threading.Lock(),))
    with pytest.raises(rpc.UnsendableError, match="lock"):
        pair[0].rpc_sync("worker1", threading.Lock)
    assert pair[0].rpc_sync("worker1", who) == "worker1"
