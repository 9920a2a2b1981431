"""Peers of a federation that lie: hand-written requests and replies that no honest worker sends."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import exposed
import pytest
import torch
from liars import SECONDS, Liar, attack, federation, is_refused, is_value, liar, without_pauses

from backhaul import rpc
from backhaul.agent.line import Line
from backhaul.errors import MisuseError, ProtocolError, QuotaError, RemoteError, UnsendableError, WorkerLostError
from backhaul.ids import RefId, ShareId
from backhaul.options import Quotas
from backhaul.testing import InProcessCluster
from backhaul.wire import trees
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, encode, join, with_trace
from backhaul.wire.messages import (
    AwaitReady,
    Call,
    Failure,
    Inspect,
    Mark,
    Ping,
    Result,
    Tally,
)


@pytest.fixture
def workers() -> Iterator[InProcessCluster]:
    with federation() as made:
        yield made


NAMES = [
    "os:system",
    "builtins:eval",
    "builtins:exec",
    "builtins:__import__",
    "builtins:getattr",
    "builtins:open",
    "subprocess:Popen",
    "pickle:loads",
    "importlib:import_module",
    "torch:load",
    "torch:zeros",
    "torch:from_file",
    "torch:Tensor.numpy",
    "torch:ops.aten.add",
    "torch.utils.cpp_extension:load",
    "antigravity:fly_url",
    "this:s",
    "exposed:hidden",
    "exposed:for_some",
    "exposed:double.__globals__",
    "exposed:double.__code__.__class__",
    "exposed:Account.deposit",
    "exposed:Account.__init__.__globals__",
    "exposed:Account.__subclasses__",
    "exposed:Secret",
    "exposed:os",
    "backhaul.refs.proxy:type_of",
    "backhaul.autograd.autograd:backward_here",
    "backhaul.launch.interactive:apply",
    "backhaul.nn.members:create",
    "backhaul.rpc:shutdown",
    "backhaul.rpc:expose",
    "backhaul.trust.exposure:registry.expose",
    "",
    ":",
    "double",
    "exposed:",
    "exposed:double ",
    "exposed:\x1b[2Jdouble",
    "x" * 100_000,
]


def test_calls_of_unexposed_functions_are_refused(workers: InProcessCluster) -> None:
    with liar(workers) as peer, attack(workers):
        for name in NAMES:
            assert is_refused(peer.call(name, "touch /tmp/owned")), name
        assert is_value(peer.call("exposed:double", 4), 8)


FUNCTIONS = [
    [trees.METHOD, "text", "format"],
    [trees.METHOD, [trees.TENSOR, 0], "numpy"],
    [trees.METHOD, [trees.TENSOR, 0], "share_memory_"],
    [trees.METHOD, [trees.ARRAY, "|u1", 0, 4], "tofile"],
    [trees.METHOD, [trees.NAMED, "exposed:double"], "__globals__"],
    [trees.PARTIAL, [trees.NAMED, "exposed:double"], [trees.TUPLE, 1], {}],
    [trees.PICKLE, pickle.dumps(os.system)],
    [trees.NAMED, "exposed:double", 1],
    [trees.NAMED, 7],
    [trees.NAMED],
    [trees.EXTENSION, "rref", [trees.TUPLE, 0, 0, 1]],
    [],
    None,
    7,
    [trees.DICT, "a", 1],
    "exposed:double",
]


def test_calls_of_functions_that_are_not_names_are_refused(workers: InProcessCluster) -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    with liar(workers) as peer, attack(workers):
        for function in FUNCTIONS:
            tree = [trees.TUPLE, function, [trees.TUPLE, 1], {}]
            assert is_refused(peer.ask(Call, tree, tensors=[tensor])), function


CALLS = [
    None,
    [],
    [trees.TUPLE],
    [trees.LIST, [trees.NAMED, "exposed:double"], [trees.TUPLE, 1], {}],
    [trees.TUPLE, [trees.NAMED, "exposed:double"], [trees.TUPLE, 1]],
    [trees.TUPLE, [trees.NAMED, "exposed:double"], [trees.LIST, 1], {}],
    [trees.TUPLE, [trees.NAMED, "exposed:double"], 7, {}],
    [trees.TUPLE, [trees.NAMED, "exposed:double"], [trees.TUPLE, 1], [trees.LIST]],
    [trees.TUPLE, [trees.NAMED, "exposed:double"], [trees.TUPLE], [trees.DICT, 7, 7]],
    [trees.TUPLE, [trees.NAMED, "exposed:double"], [trees.TUPLE, [trees.TENSOR, 7]], {}],
    [trees.TUPLE, [trees.NAMED, "exposed:double"], [trees.TUPLE, [99]], {}],
]


def test_malformed_calls_are_refused(workers: InProcessCluster) -> None:
    with liar(workers) as peer, attack(workers):
        for tree in CALLS:
            assert is_refused(peer.ask(Call, tree)), tree


class Explosive:
    def __reduce__(self) -> Any:
        return exposed.hidden, ("pickled",)


PICKLE = [trees.PICKLE, pickle.dumps(Explosive())]

VALUES = [
    PICKLE,
    [trees.LIST, PICKLE],
    [trees.TUPLE, [trees.TUPLE, PICKLE]],
    [trees.DICT, "a", PICKLE],
    [trees.DICT, 1, PICKLE],
    [trees.DICT, PICKLE, 1],
    [trees.ORDERED_DICT, 1, PICKLE],
    [trees.SET, PICKLE],
    [trees.SLICE, PICKLE, None, None],
    [trees.DATACLASS, "exposed:Point", "x", PICKLE, "y", None],
    [trees.NAMED_TUPLE, "exposed:Pair", PICKLE, 1],
    [trees.EXTENSION, "context", PICKLE],
    [trees.EXTENSION, "rref", PICKLE],
    [trees.METHOD, "text", "format"],
    [trees.PARTIAL, [trees.NAMED, "exposed:double"], [trees.TUPLE], {}],
    [trees.NAMED, "os:system"],
    [trees.NAMED, "exposed:hidden"],
    [trees.NAMED, "backhaul.refs.proxy:invoke"],
    [trees.ENUM, "exposed:Weather", "RAIN"],
    [trees.ENUM, "exposed:Colour", "__class__"],
    [trees.ENUM, "exposed:Account", "deposit"],
    [trees.ENUM, "signal:Signals", "SIGKILL"],
    [trees.FLAG, "re:RegexFlag", 1],
    [trees.NAMED_TUPLE, "exposed:Couple", 1, 2],
    [trees.NAMED_TUPLE, "exposed:Pair", 1],
    [trees.DATACLASS, "exposed:Secret", "x", 1],
    [trees.DATACLASS, "exposed:Account", "balance", 1],
    [trees.DATACLASS, "exposed:Point", "x", 1],
    [trees.DATACLASS, "exposed:Point", "x", 1, "y", 1, "z", 1],
    [trees.DATACLASS, "exposed:Point", "__class__", 1, "y", 1],
    [trees.RETURN_TYPE, "__builtins__"],
    [trees.EXTENSION, "nothing", 1],
    [trees.EXTENSION, "context", "text"],
]


def test_values_that_are_not_for_this_peer(workers: InProcessCluster) -> None:
    with liar(workers) as peer, attack(workers):
        for value in VALUES:
            assert is_refused(peer.call("exposed:echo", value)), value
        assert is_value(peer.call("exposed:echo", [trees.ENUM, "exposed:Colour", "RED"]), [21, "exposed:Colour", "RED"])


def test_keys_that_all_have_the_same_hash(workers: InProcessCluster) -> None:
    """Twenty thousand of them would need two hundred million comparisons, while no other thread could run."""
    # hash(-1) == hash(-2), and so tuples of them collide too.
    keys = [[trees.TUPLE, *(-1 - (number >> bit & 1) for bit in range(15))] for number in range(20_000)]
    numbers = [[trees.BIG_INT, ((2**61 - 1) * number << 64).to_bytes(24, "little")] for number in range(1, 20_000)]
    with liar(workers) as peer, attack(workers):
        for many in (keys, numbers):
            start = time.process_time()  # other work on the machine must not count
            pairs = [part for key in many for part in (key, 1)]
            for tree in ([trees.SET, *many], [trees.FROZEN_SET, *many], [trees.DICT, *pairs]):
                assert is_refused(peer.call("exposed:echo", tree))
                workers[0].agent.permissions.refusals.forgive()
            assert time.process_time() - start < 3.0
        assert isinstance(peer.call("exposed:echo", [trees.SET, *range(4_000)]), Result)
        assert isinstance(peer.call("exposed:echo", [trees.SET, *map(str, range(20_000))]), Result)


def test_keys_are_counted_over_all_of_a_message(workers: InProcessCluster) -> None:
    with liar(workers) as peer, attack(workers):
        assert is_refused(peer.call("exposed:echo", [trees.LIST, *([trees.SET, *range(1000)] for _ in range(5))]))
    with workers[1].as_current():
        with pytest.raises(UnsendableError, match="4096 keys of sets and dicts in one message that are not text"):
            rpc.rpc_sync("worker0", exposed.echo, (set(range(5000)),))
        assert rpc.rpc_sync("worker0", exposed.echo, ({number: number for number in range(4000)},))[7] == 7


@pytest.mark.parametrize("tree", [{"a": 1}, {1: 2}, [trees.LIST, {(1, 2): 3}], [trees.LIST, "x" * 500, {b"a": []}]])
def test_a_map_in_a_message_ends_the_connection(workers: InProcessCluster, tree: Any) -> None:
    """The keys of a map would be hashed while the message is decoded."""
    with liar(workers) as peer, attack(workers):
        peer.send(Call(1, [trees.TUPLE, [trees.NAMED, "exposed:echo"], [trees.TUPLE, tree], {}]))
        assert peer.is_cut_off()


@pytest.mark.parametrize("message", [Call(1, {"a": 1}), Inspect(1, "x", {"a": {1: 2}})])
def test_the_mark_of_a_tracer_changes_nothing(workers: InProcessCluster, message: Any) -> None:
    with liar(workers) as peer, attack(workers):
        assert peer.channel.write(with_trace(encode(message), "x"))
        assert peer.is_cut_off()


CLAIMS = {
    "expanded": lambda: torch.zeros(1).expand(1 << 40),
    "expanded twice": lambda: torch.zeros(1).expand(1 << 20, 1 << 20),
    "empty": lambda: torch.zeros(0, 1 << 29),
    "empty in the middle": lambda: torch.zeros(1 << 20, 0, 1 << 20),
    "meta": lambda: torch.empty(1 << 50, device="meta"),
    "COO": lambda: torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (1 << 30, 1 << 30)),
    "COO, empty": lambda: torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.ones(0), (0, 1 << 40)),
    "CSR": lambda: torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1 << 40)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about sparse tensors
@pytest.mark.parametrize("kind", CLAIMS)
def test_a_tensor_that_is_larger_than_it_looks(workers: InProcessCluster, kind: str) -> None:
    """Using it would take all memory. The decoder refuses it in a request, a reply or a gradient."""
    huge = CLAIMS[kind]()
    with liar(workers) as peer, attack(workers):
        peer.send(Call(1, [trees.TUPLE, [trees.NAMED, "exposed:echo"], [trees.TUPLE, [trees.TENSOR, 0]], {}]), [huge])
        assert peer.is_cut_off()
    with workers[1].as_current(), pytest.raises(UnsendableError, match="shapes stand for more than 268435456 bytes"):
        rpc.rpc_sync("worker0", exposed.echo, (huge,))


@pytest.mark.parametrize(
    "tree",
    [[trees.ARRAY, "<f4", None, 0, 1 << 40], [trees.ARRAY, "<U999999999", None, 0], [trees.RANGE, 0, 1 << 60, 1]],
)
def test_other_values_that_are_larger_than_they_look(workers: InProcessCluster, tree: Any) -> None:
    with liar(workers) as peer, attack(workers):
        assert is_refused(peer.call("exposed:echo", tree))


def test_an_operator_makes_no_more_than_a_message(workers: InProcessCluster) -> None:
    wide, tall = torch.ones(1, 1 << 16), torch.ones(1 << 16, 1)
    two = [[trees.TENSOR, 0], [trees.TENSOR, 1]]
    with liar(workers) as peer, attack(workers):
        for name in ("torch:add", "torch:matmul"):
            answer = peer.call(name, *two, tensors=[tall, wide])
            assert answer.type_name == "backhaul.errors.QuotaError"


def test_replies_on_a_line_for_requests_end_the_connection(workers: InProcessCluster) -> None:
    for message in (Result(1, None), Failure(1, "worker2", "x", "y", "z")):
        with liar(workers) as peer, attack(workers):
            peer.send(message)
            assert peer.is_cut_off()


def test_a_peer_that_waits_for_the_end_ten_thousand_times(workers: InProcessCluster) -> None:
    with liar(workers) as peer, attack(workers):
        for number in range(10_000):
            try:
                peer.send(AwaitReady(number, 0))
            except Exception:
                break
        assert peer.is_cut_off()


def test_requests_among_replies_are_judged_like_others(workers: InProcessCluster) -> None:
    """The thread that waits for the reply reads them, and passes them on."""

    def handle(line: Line, envelope: Envelope) -> Frame:
        line.count_finished(releases=False)
        return join([encode(AwaitReady(number, 0)) for number in range(65)])

    workers[2].agent.register(Call, handle)
    with attack(workers), pytest.raises(WorkerLostError, match="more than 64 times"):
        workers[0].rpc_sync("worker2", exposed.double, (1,), timeout=SECONDS)


def test_a_peer_may_also_ping_and_ask_for_a_tally(workers: InProcessCluster) -> None:
    with liar(workers) as peer:
        assert isinstance(peer.ask(Ping), Result)
        assert isinstance(peer.ask(Tally), Result)


def test_a_peer_that_is_refused_all_the_time_does_not_fill_the_log(
    workers: InProcessCluster, caplog: pytest.LogCaptureFixture
) -> None:
    without_pauses(workers[0])
    with liar(workers) as peer, attack(workers):
        for _ in range(500):
            assert is_refused(peer.call("os:system\x1b[2J" * 20, "x"))
    lines = [record.getMessage() for record in caplog.records if record.name == "backhaul.security"]
    assert 0 < len(lines) < 100
    assert all(line.isprintable() and len(line) < 1500 for line in lines)


# Replies.


def lie(workers: InProcessCluster, answer: Any, tensors: Any = ()) -> None:
    """Make worker2 answer every call with ``answer(id)``."""

    def handle(line: Line, envelope: Envelope) -> Frame:
        line.count_finished(releases=False)
        return encode(answer(envelope.message.id), tensors)

    workers[2].agent.register(Call, handle)


@pytest.mark.parametrize("value", VALUES)
def test_forbidden_values_in_replies_are_refused(workers: InProcessCluster, value: Any) -> None:
    lie(workers, lambda id: Result(id, value))
    with attack(workers), pytest.raises((MisuseError, ProtocolError)):
        workers[0].rpc_sync("worker2", exposed.double, (1,))


@pytest.mark.parametrize(
    "ref",
    [RefId(0, 0, 1), RefId(0, 2, 1), RefId(1, 0, 1), RefId(1, 1, 1), RefId(2, 2, 1), RefId(77, 0, 1)],
)
def test_references_in_replies_that_no_worker_gave(workers: InProcessCluster, ref: RefId) -> None:
    """A peer can only send references that it owns or was given. Its own references must come from itself."""
    tree = [trees.EXTENSION, "rref", [trees.TUPLE, ref.owner, ref.creator, ref.number]]
    sharer = 1 if ref.owner == 2 else 2
    with attack(workers):
        lie(workers, lambda id: Result(id, tree, ((ref, ShareId(sharer, 1)),)))
        with pytest.raises(WorkerLostError):
            workers[0].rpc_sync("worker2", exposed.double, (1,))
        lie(workers, lambda id: Result(id, tree))
        with pytest.raises(ProtocolError, match="does not announce"):
            workers[0].rpc_sync("worker2", exposed.double, (1,))


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.SystemExit", "builtins.KeyboardInterrupt", "exposed.Unknown", "\x1b[2J" * 1000]
)
def test_exceptions_in_replies_are_only_text(workers: InProcessCluster, name: str) -> None:
    lie(workers, lambda id: Failure(id, "worker1", name, "te\x1b[2Jxt", "line 1", PICKLE))
    with attack(workers), pytest.raises(RemoteError, match=r"te\\x1b\[2Jxt") as failure:
        workers[0].rpc_sync("worker2", exposed.double, (1,))
    assert "worker2" in str(failure.value)  # whatever name the peer claims
    assert "line 1" not in str(failure.value.__cause__)
    assert str(failure.value).isprintable()
    assert len(str(failure.value)) < 1000


def test_a_recorded_reply_of_a_context_that_no_worker_made(workers: InProcessCluster) -> None:
    context = (2 << 48) + 5
    tensor = torch.ones(1, requires_grad=True)
    lie(workers, lambda id: Result(id, [trees.TENSOR, 0], (), Mark(context + id, (2 << 48) + 1)), [tensor])
    with attack(workers):
        for _ in range(64):
            assert workers[0].rpc_sync("worker2", exposed.double, (1,)).requires_grad
        with pytest.raises(QuotaError, match="this peer has 64 open autograd contexts already"):
            workers[0].rpc_sync("worker2", exposed.double, (1,))
        lie(workers, lambda id: Result(id, [trees.TENSOR, 0], (), Mark(context, (1 << 48) + 1)), [tensor])
        with pytest.raises(ProtocolError, match="does not belong to its sender"):
            workers[0].rpc_sync("worker2", exposed.double, (1,))


# Quotas.


def test_the_quota_of_calls_under_way() -> None:
    gate = exposed.gates["liar"] = threading.Event()
    with federation(quotas=Quotas(calls=5)) as workers:
        peers = [Liar(workers) for _ in range(3)]
        try:
            with attack(workers):
                for peer in peers:  # they count as one peer, over all connections
                    for number in range(1 if peer is peers[2] else 2):
                        tree = [trees.TUPLE, [trees.NAMED, "exposed:wait"], [trees.TUPLE, "liar"], {}]
                        peer.send(Call(number + 1, tree))
                        peer.ask(Ping)  # messages are read in order, so the others are done
                answer = peers[0].call("exposed:double", 1)
                assert answer.type_name == "backhaul.errors.QuotaError"
                assert answer.text == "worker 'worker0' refused this: 5 calls of this peer are under way"
                peers[1].close()  # calls that have started go on
                assert peers[2].call("exposed:double", 1).type_name == "backhaul.errors.QuotaError"
            gate.set()
            done = peers[0].receive(), peers[0].receive()
            assert all(is_value(answer, "liar") for answer in done)
        finally:
            gate.set()
            for peer in peers:
                peer.close()


def test_calls_whose_replies_cannot_leave_are_over() -> None:
    call = encode(Call(1, [trees.TUPLE, [trees.NAMED, "exposed:double"], [trees.TUPLE, 4], {}]))
    with federation(quotas=Quotas(calls=5)) as workers:
        for _ in range(3):
            with liar(workers) as peer, attack(workers):
                # All in one read: the replies are held back until the last frame ends the connection.
                assert peer.channel.write(join([call, call, call, encode(Result(1, None))]))
                assert peer.is_cut_off()
        with liar(workers) as peer:
            assert is_value(peer.call("exposed:double", 4), 8)


def test_the_quota_of_bytes_of_calls_under_way() -> None:
    large = torch.zeros(150_000)
    gate = exposed.gates["bytes"] = threading.Event()
    with federation(quotas=Quotas(request_bytes=1 << 20)) as workers:
        waiting = workers[1].rpc_async("worker0", exposed.wait, ("bytes", large))
        try:
            with pytest.raises(QuotaError, match="bytes are under way, and the limit is 1048576"):
                workers[1].rpc_sync("worker0", exposed.double, (large,))
            assert workers[1].rpc_sync("worker0", exposed.double, (4,)) == 8
            assert workers[2].rpc_sync("worker0", exposed.double, (large,)).shape == large.shape
        finally:
            gate.set()
        assert waiting.wait() == "bytes"
        for _ in range(5):
            for function in (exposed.echo, exposed.echo_later):
                assert workers[1].rpc_sync("worker0", function, (large,)).shape == large.shape
            with workers[1].as_current():
                assert rpc.remote("worker0", exposed.Account, (7,)).rpc_sync().deposit(0) == 7


def test_a_message_beyond_the_quota_ends_the_connection() -> None:
    with federation(quotas=Quotas(message_bytes=1 << 20)) as workers:
        with liar(workers) as peer, attack(workers):
            peer.send(Call(1, None), [torch.zeros(1 << 20)])
            assert peer.is_cut_off()
        with pytest.raises(Exception, match="over the limit of 1048576"):
            workers[1].rpc_sync("worker0", exposed.double, (torch.zeros(1 << 20),))
        with liar(workers) as peer:
            assert is_value(peer.call("exposed:double", 4), 8)


def test_a_new_connection_of_a_peer_replaces_the_old_one(workers: InProcessCluster) -> None:
    """Forty connections at once: all but eight are cut off, and the next one works."""
    ended = threading.Semaphore(0)
    serving = workers[0].agent.serving
    on_end = serving.on_end

    def count(line: Line, error: Exception) -> None:
        on_end(line, error)
        ended.release()

    serving.on_end = count
    # As itself: when a connection ends, the victim asks the member. A liar that seemed to be another process would then
    # take the place of the member, which ends all connections, also those that it has just opened.
    peers = [Liar(workers, as_itself=True) for _ in range(40)]
    try:
        with attack(workers):
            assert all(ended.acquire(timeout=SECONDS) for _ in range(32))
            # They are admitted in parallel, so it is not certain which came last.
            assert sum(peer.is_cut_off(0) for peer in peers) == 32
            peers.append(Liar(workers, as_itself=True))
            assert is_value(peers[-1].call("exposed:double", 4), 8)
    finally:
        serving.on_end = on_end
        for peer in peers:
            peer.close()


def test_the_quota_of_contexts() -> None:
    with federation(quotas=Quotas(contexts=4)) as workers:
        with liar(workers) as peer, attack(workers):
            for number in range(4):
                assert is_value(peer.call("exposed:double", 1, mark=Mark((2 << 48) + number)), 2)
                assert is_value(peer.call("exposed:double", 1, mark=Mark((2 << 48) + number)), 2)
            answer = peer.call("exposed:double", 1, mark=Mark((2 << 48) + 4))
            assert answer.type_name == "backhaul.errors.QuotaError"
            assert "this peer has 4 open autograd contexts already" in answer.text
        with workers[1].as_current():  # this peer has its own quota
            assert rpc.rpc_sync("worker0", exposed.double, (1,)) == 2
