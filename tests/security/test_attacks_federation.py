"""A member of a federation that breaks all rules: it has a certificate, but cannot run code.

It connects with TLS, and the test writes what it sends, byte by byte or tree by tree. The attacked worker and the good
peer are processes with the functions of `exposed`.
"""

from __future__ import annotations

import functools
import random
import ssl
import sys
import threading
from collections.abc import Iterator
from typing import Any

import exposed
import pytest
import torch
from intruder import INTRUDER, Besieged, MiB, is_cut
from mallory import NAMED, TENSOR, TUPLE, Mallory, ask_federation, deposit, held_ref, hold, keep
from pickle_payloads import payloads
from test_attacks_pickles import CONTAINERS

import backhaul.autograd as dist_autograd
from backhaul import rpc, worker
from backhaul.ids import RefId, ShareId
from backhaul.trust.penalties import Penalties
from backhaul.trust.permissions import refusal
from backhaul.wire import headers, trees
from backhaul.wire.frames import HEADER, encode
from backhaul.wire.messages import (
    Call,
    Create,
    Failed,
    Failure,
    Fetch,
    Gradients,
    Inquire,
    Leave,
    Mark,
    Notices,
    Pass,
    Recall,
    Register,
    Registered,
    Release,
    Report,
    Resolved,
    Result,
    Sweep,
    Swept,
    TakePart,
    Unpin,
)

REFUSED = str(refusal("worker0"))


# In the workers.


def what_ran() -> list[str]:
    return list(exposed.called)


_state: dict[str, Any] = {}


def loaded(*modules: str) -> list[str]:
    return [module for module in modules if module in sys.modules]


# In the test.


@pytest.fixture
def mallory(federation: Besieged, mine: ssl.SSLContext) -> Iterator[Mallory]:
    """An intruder's connection, while the attacked worker is watched."""
    # The first call of any peer causes one-time work. A good peer causes it, or this one with a harmless request.
    Mallory(federation, mine).close()
    with federation.attack():
        made = Mallory(federation, mine)
        yield made
        made.close()
    assert federation.victim.run(what_ran) == []
    assert federation.victim.run(loaded, "backhaul.wire.pickles") == []


def assert_refused(answer: Any) -> None:
    """Check for the uniform answer to refused requests, whether the object exists or not."""
    assert answer == Failure(answer.id, "worker0", "backhaul.errors.RefusedError", REFUSED, "")


FUNCTIONS = [
    "os:system",
    "posix:system",
    "os:popen",
    "os:execv",
    "os:_exit",
    "builtins:eval",
    "builtins:exec",
    "builtins:compile",
    "builtins:__import__",
    "builtins:open",
    "builtins:getattr",
    "builtins:print",
    "builtins:len",
    "subprocess:Popen",
    "subprocess:run",
    "ctypes:CDLL",
    "_ctypes:dlopen",
    "importlib:import_module",
    "pickle:loads",
    "marshal:loads",
    "torch:load",
    "torch.hub:load",
    "torch:zeros",
    "torch:ops.aten.add",
    "torch:save",
    "torch:Tensor.__reduce_ex__",
    "torch:Tensor.numpy",
    "torch.serialization:load",
    "operator:add",
    "operator:attrgetter",
    "backhaul.rpc:shutdown",
    "backhaul.rpc:rpc_sync",
    "backhaul.rpc:expose",
    "backhaul.refs.proxy:type_of",
    "backhaul.refs.proxy:invoke_found",
    "backhaul.worker:current",
    "backhaul.optim.entries:step",
    "no.such.module:thing",
    "exposed:hidden",
    "exposed:Secret",
    "exposed:Base",
    "exposed:Savings",
    "exposed:Vault",
    "exposed:for_some.x",
    "exposed:weight",
    "exposed:called",
    "exposed:rpc.rpc_sync",
    "exposed:torch.load",
    "exposed:threading.Thread",
    "exposed:double.__class__",
    "exposed:double.__globals__",
    "exposed:double.__code__",
    "exposed:double.__call__",
    "exposed:Account.__init__",
    "exposed:Account.deposit",
    "exposed:Account._audit",
    "exposed:Account.__subclasses__",
    "exposed:Account.__class__",
    "exposed:Account.mro",
    "exposed:Account.__bases__",
    "exposed:Point.__init__",
    "exposed:Colour.__members__",
    "exposed:echo_later.__wrapped__",
    "exposed",
    "exposed:",
    ":double",
    "exposed:double:x",
    "../exposed:double",
    "exposed:double\x00",
]


def test_functions_that_are_not_exposed(mallory: Mallory, federation: Besieged) -> None:
    for name in FUNCTIONS:
        assert_refused(mallory.call(name, "true"))
        assert_refused(mallory.call(name))
    federation.assert_logged("refused worker worker2 the call of 'os:system'")
    for number, name in enumerate(FUNCTIONS[:20]):
        # The answer to an impossible creation is the same as to a possible one. Fetching the value raises.
        ref = RefId(0, INTRUDER, 1000 + number)
        answer = mallory.ask(Create, ref, [TUPLE, [NAMED, name], [TUPLE, "true"], {}])
        if isinstance(answer, Result):
            answer = mallory.ask(Fetch, ref)
        assert_refused(answer)


def test_an_exposed_function_is_not_refused(mallory: Mallory) -> None:
    """This shows that the refusals in the other tests have a reason."""
    assert mallory.call("exposed:double", 21).tree == 42
    assert mallory.call("torch:neg", [TENSOR, 0], tensors=[torch.ones(2)]).tree == [TENSOR, 0]


def test_functions_that_are_not_given_by_name(mallory: Mallory) -> None:
    exposed_function = [NAMED, "exposed:echo"]
    for function in (
        [trees.METHOD, [TENSOR, 0], "numpy"],
        [trees.METHOD, [TENSOR, 0], "tofile"],
        [trees.METHOD, "text", "format"],
        [trees.METHOD, exposed_function, "__call__"],
        [trees.PARTIAL, exposed_function, [TUPLE, 1], {}],
        [trees.PARTIAL, [NAMED, "os:system"], [TUPLE, "true"], {}],
        [trees.PICKLE, b"cos\nsystem\n."],
        [trees.DATACLASS, "exposed:Point", "x", 1, "y", 1],
        [NAMED, ["exposed:echo"]],
        [NAMED, b"exposed:echo"],
        [NAMED, "exposed:echo", "x"],
        [TUPLE, exposed_function],
        [trees.DICT, "__call__", exposed_function],
        [],
        None,
        7,
    ):
        assert_refused(mallory.call(function, 1, tensors=[torch.ones(2)]))
    for tree in (
        None,
        [],
        [TUPLE],
        "exposed:echo",
        [TUPLE, exposed_function],
        [TUPLE, exposed_function, {}, {}],
        [TUPLE, exposed_function, [TUPLE], [TUPLE]],
        [TUPLE, exposed_function, [TUPLE], [trees.DICT, 1, 2]],
        [TUPLE, exposed_function, [trees.LIST, 1], {}],
        [trees.LIST, exposed_function, [TUPLE, 1], {}],
    ):
        assert_refused(mallory.ask(Call, tree))


def test_values_that_name_what_is_not_exposed(mallory: Mallory) -> None:
    for value in (
        [NAMED, "os:system"],
        [NAMED, "builtins:eval"],
        [NAMED, "exposed:hidden"],
        [trees.DATACLASS, "exposed:Secret", "x", 1],
        [trees.ENUM, "exposed:Weather", "RAIN"],
        [trees.NAMED_TUPLE, "exposed:Couple", 1, 2],
        [trees.FLAG, "re:RegexFlag", 2],
        [trees.METHOD, [TENSOR, 0], "numpy"],
        [trees.PARTIAL, [NAMED, "exposed:echo"], [TUPLE], {}],
        [trees.EXTENSION, "exception", "os:system"],
        [trees.EXTENSION, "no such", 1],
        [trees.DATACLASS, "exposed:Account", "balance", 1],
        [trees.DATACLASS, "exposed:Point", "x", 1, "y", 1, "__class__", 1],
        [trees.DATACLASS, "exposed:Point", "__class__", 1, "y", 1],
    ):
        assert_refused(mallory.call("exposed:echo", value, tensors=[torch.ones(2)]))
        assert_refused(mallory.call("exposed:echo", [trees.LIST, [trees.DICT, "a", value]], tensors=[torch.ones(2)]))


def test_pickles(mallory: Mallory) -> None:
    for data in payloads()[::3]:
        assert_refused(mallory.call("exposed:echo", [trees.PICKLE, data]))
    for container in CONTAINERS.values():
        assert_refused(mallory.call("exposed:echo", container([trees.PICKLE, payloads()[0]])))
        assert_refused(mallory.ask(Call, container([trees.PICKLE, payloads()[0]])))


METHODS = [
    "_audit",
    "__init__",
    "__class__",
    "__dict__",
    "__getattribute__",
    "__getattr__",
    "__reduce__",
    "__reduce_ex__",
    "__setattr__",
    "__init_subclass__",
    "__subclasshook__",
    "__doc__",
    "owner",
    "hook",
    "kind",
    "balance",
    "inherited",
    "deposit.__globals__",
    "deposit.__class__",
    "no_such",
    "__class__.__bases__",
    "mro",
    "title.__func__",
]


def test_methods_that_are_not_exposed(mallory: Mallory) -> None:
    account = mallory.create(1, "exposed:Account", 100)
    assert mallory.invoke(account, "deposit", 5).tree == 105
    for name in (*METHODS, "", 7, None, b"deposit", [trees.LIST, "deposit"]):
        assert_refused(mallory.invoke(account, name))
    assert mallory.invoke(account, "deposit", 5).tree == 110
    # For a value whose class is not exposed, or not to this peer, no method at all.
    for number, maker in ((2, "exposed:savings"), (3, "exposed:vault")):
        made = mallory.create(number, maker)
        for name in ("withdraw", "deposit", "open", "to_here", "local_value", "owner"):
            assert_refused(mallory.invoke(made, name))


def test_references_that_were_made_up(mallory: Mallory, federation: Besieged) -> None:
    federation.victim.run(keep)
    federation.peer.run(hold)
    real = RefId(*federation.victim.run(held_ref))
    held = RefId(*federation.peer.run(held_ref))
    share = functools.partial(ShareId, INTRUDER)
    for ref in (
        real,
        held,
        RefId(0, 0, 1),
        RefId(0, 1, 1),
        RefId(1, 1, 1),
        RefId(1, INTRUDER, 1),
        RefId(7, 7, 7),
        RefId(0, INTRUDER, 99),
    ):
        rref = [trees.EXTENSION, "rref", [TUPLE, ref.owner, ref.creator, ref.number]]
        assert_refused(mallory.ask(Fetch, ref))
        assert_refused(mallory.call("exposed:value_of", rref))
        assert_refused(mallory.call("exposed:value_of", rref, refs=((ref, share(1)),)))
        assert_refused(mallory.call("exposed:echo", rref, refs=((ref, ShareId(0, 1)),)))
        assert_refused(mallory.invoke(ref, "deposit", 1))
    for tree in ([TUPLE, 0, 0], [TUPLE, 0, 0, "x"], [TUPLE, 0, 0, 1.5], None, "rref", [trees.LIST, 0, 0, 1]):
        assert_refused(mallory.call("exposed:value_of", [trees.EXTENSION, "rref", tree]))
    # The good peer's reference still works.
    assert federation.peer.run(deposit) == 8


def test_lies_about_references_of_others(mallory: Mallory, federation: Besieged) -> None:
    federation.peer.run(hold)
    held = RefId(*federation.peer.run(held_ref))
    shares = tuple(ShareId(0, number) for number in range(1, 50))
    lies: list[Any] = [
        Release(held),
        Register(held),
        Registered(held, False),
        Registered(RefId(1, 0, 1), False),
        Sweep((1,)),
        Sweep((0, 1, 2)),
        Swept((1,)),
        Recall(shares),
        *(Unpin(ShareId(sharer, number)) for sharer in (0, 1) for number in range(50)),
    ]
    for number, lie in enumerate(lies, 1):
        answer = mallory.ask(Notices, 1, number, (lie,))
        assert isinstance(answer, Result | Failure)
    assert federation.peer.run(deposit) == 8


def without_pauses() -> None:
    """Switch off the pauses, so that guesses are answered at once."""
    worker.current().agent.permissions.refusals = Penalties(1 << 40, 1.0)


def guess(mallory: Mallory, federation: Besieged, count: int) -> None:
    federation.victim.run(without_pauses)
    choose = random.Random(8)
    for start in range(0, count, 50):
        names = [RefId(0, choose.choice((0, 1, 2)), choose.choice((start, choose.getrandbits(62)))) for _ in range(50)]
        for place, name in enumerate(names):
            mallory.send(Fetch(start + place, name))
        for _ in names:
            assert_refused(mallory.line.answer())


def test_guessed_references(mallory: Mallory, federation: Besieged) -> None:
    guess(mallory, federation, 2_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_100_000_guessed_references(mallory: Mallory, federation: Besieged) -> None:
    guess(mallory, federation, 100_000)


def test_contexts_and_passes_that_were_made_up(mallory: Mallory, federation: Besieged) -> None:
    """Each is refused, or ends the connection. The good peer's context stays open, and others cannot end it."""
    context = federation.peer.run(_open_context)
    mallory.send(Leave(context))
    for guessed in (context + 1, context ^ 1 << 40, 1 << 48, (2 << 48) + 1, 0, -1, (1 << 64) - 1):
        backward = Pass(guessed, guessed, guessed, False, True)
        mine = Pass((INTRUDER << 48) + 1, guessed, (INTRUDER << 48) + 1, False, True)
        for message in (
            Leave(guessed),
            TakePart(mine, (1, 2)),
            Resolved(mine),
            Resolved(backward),
            Report(backward, False, (1,), (2,)),
            Failed(backward, "worker1", "builtins.ValueError", "it failed", ""),
            Gradients(backward, (1, 2), (0,)),
            Gradients(mine, (1,), (5,)),
            Inquire(1, (guessed,)),
            Call(2, [TUPLE, [NAMED, "exposed:double"], [TUPLE, 1], {}], (), Mark(guessed, 1)),
        ):
            line = Mallory(federation, mallory.tls.context)
            tensors = [torch.ones(2)] if isinstance(message, Gradients) else ()
            line.send(message, tensors)
            line.send(Call(99, [TUPLE, [NAMED, "exposed:double"], [TUPLE, 4], {}]))
            while (answer := line.line.answer(within=5)) is not None and answer.id != 99:
                pass
            assert answer is None or answer.tree == 8
            line.close()
    assert federation.peer.run(_finish_context) == [2.0, 2.0, 2.0]


def _open_context() -> int:
    _state["context"] = context = dist_autograd.context()
    _state["number"] = number = context.__enter__()
    _state["leaf"] = leaf = torch.ones(3, requires_grad=True)
    _state["out"] = rpc.rpc_sync("worker0", exposed.double, (leaf,))
    return int(number)


def _finish_context() -> list[float]:
    try:
        dist_autograd.backward(_state["number"], [_state["out"].sum()])
        return list(dist_autograd.get_gradients(_state["number"])[_state["leaf"]].tolist())
    finally:
        _state["context"].__exit__(None, None, None)


# Quotas.


def test_messages_that_are_too_large(mallory: Mallory, federation: Besieged) -> None:
    for metadata, table, payload in ((2, 41, 256 * MiB), (256 * MiB, 0, 0), (2, 41, (1 << 63) - 1)):
        line = Mallory(federation, mallory.tls.context)
        line.line.send(HEADER.pack(b"BH", 1, 1, metadata, table, payload) + bytes(64))
        assert is_cut(line.tls)
        line.close()


def test_tensors_that_are_larger_than_their_message(mallory: Mallory, federation: Besieged) -> None:
    """One element that claims to be many, or an empty tensor with a huge shape."""
    corner = torch.zeros(2, 1, dtype=torch.int64)
    for tensor in (
        torch.ones(1).expand(1 << 40),
        torch.ones(1).expand(1 << 20, 1 << 20),
        torch.empty(1 << 50, device="meta"),
        torch.empty(0, 1 << 29),
        torch.sparse_coo_tensor(corner, torch.ones(1), (1 << 30, 1 << 30), check_invariants=True),
    ):
        line = Mallory(federation, mallory.tls.context)
        line.send(Call(1, [TUPLE, [NAMED, "exposed:double"], [TUPLE, [TENSOR, 0]], {}]), [tensor])
        assert is_cut(line.tls)
        line.close()
    rows, columns = torch.ones(1 << 19, 1), torch.ones(1, 1 << 19)
    for name in ("torch:add", "torch:mm", "torch:matmul"):
        answer = mallory.call(name, [TENSOR, 0], [TENSOR, 1], tensors=[rows, columns])
        assert answer.type_name == "backhaul.errors.QuotaError"


def test_more_calls_than_the_quota(mallory: Mallory, federation: Besieged) -> None:
    federation.victim.run(_open_gate)
    for number in range(70):
        mallory.send(Call(1000 + number, [TUPLE, [NAMED, "exposed:wait"], [TUPLE, "gate"], {}]))
    refused = [mallory.line.answer() for _ in range(6)]
    assert {answer.type_name for answer in refused} == {"backhaul.errors.QuotaError"}
    assert federation.peer.run(ask_federation) < 1.0  # while all calls run
    federation.victim.run(_close_gate)
    assert all(mallory.line.answer().tree == "gate" for _ in range(64))


def _open_gate() -> None:
    exposed.gates["gate"] = threading.Event()


def _close_gate() -> None:
    exposed.gates["gate"].set()


def test_replies_that_wait_count_over_all_connections(mallory: Mallory, federation: Besieged) -> None:
    first, second = (Mallory(federation, mallory.tls.context) for _ in range(2))
    first.send(Call(1, [TUPLE, [NAMED, "exposed:much"], [TUPLE, 40 * MiB], {}]))
    first.tls.recv(1)  # so the reply is under way
    refused = second.call("exposed:much", 40 * MiB)
    assert refused.type_name == "backhaul.errors.QuotaError"
    assert "bytes of replies wait for this peer to read them" in refused.text
    first.close()
    federation.victim.run(_await_end_of_unread)
    assert isinstance(second.call("exposed:much", 40 * MiB), Result)
    second.close()


def _await_end_of_unread() -> None:
    """Wait for the end of those connections of the intruder that have something to send."""
    for line in worker.current().agent.serving.lines_of(INTRUDER):
        assert not line.under_way or line.over.wait(20)


def test_frames_that_lie(mallory: Mallory, federation: Besieged) -> None:
    """As in a cluster, only the connection ends."""
    table = headers.encode_single(headers.DTYPE_CODES[torch.float32], 0, (1 << 40,), 16)
    for data in (
        HEADER.pack(b"BH", 1, 1, 2, len(table), 16) + b"\x91\x01" + table + bytes(16),
        HEADER.pack(b"BH", 1, 1, 100_002, 0, 0) + b"\x92\x01" + b"\x91" * 100_000,
        HEADER.pack(b"BH", 1, 0x81, 2, 41, 0) + bytes(43),
        bytes(encode(Result(1, None))),
        b"BX" + bytes(18),
    ):
        line = Mallory(federation, mallory.tls.context)
        line.line.send(data)
        assert is_cut(line.tls), data[:24]
        line.close()
