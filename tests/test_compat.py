"""Differences between versions of Python and torch: each function works with the versions that run this."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from backhaul import compat
from backhaul.autograd.functions import send
from backhaul.wire.headers import LAYOUTS
from backhaul.wire.tensors import pack_tensors

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def test_a_stream_handler_can_be_derived_from() -> None:
    class Handler(compat.StreamHandler): ...

    assert isinstance(Handler(), logging.StreamHandler)


def frames() -> Iterator[FrameType]:
    yield sys._getframe()


def test_is_at_tells_whether_a_frame_is_at_a_place() -> None:
    frame = next(found := frames())
    line = frame.f_lineno
    place = (line, line, 4, 4 + len("yield sys._getframe()"))
    assert compat.is_at(frame, place)
    assert not compat.is_at(frame, (line + 1, line + 1, *place[2:]))
    # Python 3.10 knows only lines.
    assert compat.is_at(frame, (line, line, 10, 12)) is (sys.version_info < (3, 11))
    del found


def test_some_code_is_never_compiled() -> None:
    seen: list[bool] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    compiled = torch.compile(compat.never_compile(outer), backend="eager")
    assert compiled(torch.ones(1)).item() == 2
    assert seen == [False]


def test_asked_by_compiler_is_true_only_while_tracing() -> None:
    from torch._guards import TracingContext, tracing

    assert not compat.asked_by_compiler()
    with tracing(TracingContext(None)):
        assert compat.asked_by_compiler()


def test_the_dtype_of_a_gradient() -> None:
    leaf = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    assert compat.dtype_of_gradient(leaf) is torch.bfloat16
    if VERSION >= (2, 10):  # before that, users cannot choose it
        leaf.grad_dtype = torch.float32
        assert compat.dtype_of_gradient(leaf) is torch.float32
        leaf.grad_dtype = None
        assert compat.dtype_of_gradient(leaf) is None


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        ({"_fsdp_param_groups": []}, []),
        ({"_fsdp_param_groups": ["a", "b"], "_fsdp_param_group": "a"}, ["a", "b"]),
        ({"_fsdp_param_group": "a"}, ["a"]),
        ({"_fsdp_param_group": None}, []),
    ],
)
def test_the_groups_of_a_sharded_module(state: dict[str, Any], wanted: list[str]) -> None:
    assert compat.shard_groups(SimpleNamespace(**state)) == wanted


def test_this_torch_has_groups_of_sharded_modules() -> None:
    """The groups exist under one of the known names. tests/autograd/test_parallel.py trains with them."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    assert compat.shard_groups(FSDPState()) == []


@pytest.mark.parametrize("kind", [torch.autograd.profiler.profile, torch.autograd.profiler_legacy.profile])
def test_a_profile_of_this_torch_says_whether_it_records_gpus(kind: Any) -> None:
    assert not compat.records_cuda(kind())


@pytest.mark.parametrize(
    ("profile", "wanted"),
    [({"use_cuda": True}, True), ({"use_cuda": False, "use_device": "cuda"}, True), ({"use_device": None}, False)],
)
def test_whether_a_profile_records_gpus(profile: dict[str, Any], wanted: bool) -> None:
    assert compat.records_cuda(SimpleNamespace(**profile)) is wanted


def test_streams_are_tolerated() -> None:
    compat.tolerate_streams()
    set_warning = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    assert (set_warning is not None) is (VERSION >= (2, 10))
    if set_warning is not None:
        set_warning(True)


def sparse(layout: torch.layout) -> torch.Tensor:
    compat.use_up_warning(layout)
    options = {"blocksize": (1, 1)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return torch.eye(2).to_sparse(layout=layout, **options)


def test_tensors_that_torch_warns_of_once_are_received_without_a_warning() -> None:
    """In a fresh process, because a warning that is an error would close the connection.

    One process for all kinds: importing torch takes seconds.
    """
    compat.use_up_warning(torch.complex32)
    sent = [torch.empty(2, 2, dtype=torch.complex32), *map(sparse, LAYOUTS[1:])]
    packed = pack_tensors(sent)
    program = f"""
from backhaul.wire.landing import Landing
landing = Landing.parse({bytes(packed.table)!r}, {sum(map(len, packed.buffers))})
for place, buffer in enumerate({[bytes(buffer) for buffer in packed.buffers]!r}):
    landing.put(place, buffer)
for tensor in landing.tensors():
    assert tensor.shape == (2, 2)
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_node_of_a_send_is_usable_while_its_output_is_kept() -> None:
    """Before torch 2.12 the node lives no longer than its output. So a context keeps the output and not the node."""
    output = send(1, [torch.ones(2, requires_grad=True) * 2])
    node: Any = output.grad_fn
    assert [type(following).__name__ for following, _ in node.next_functions] == ["MulBackward0"]
    del output
    if VERSION >= (2, 13):
        assert node.next_functions
    elif VERSION < (2, 12):
        with pytest.raises(RuntimeError, match="next_functions"):
            _ = node.next_functions


def test_a_store_on_a_socket() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = compat.store_on(listening, "127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert listening.fileno() == -1
    torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("key", "value")
    assert store.get("key") == b"value"


def test_a_warning_shows_the_line_of_the_user() -> None:
    """Here no frame of the package lies between; `test_silent_mistakes` has a warning of an optimizer."""
    assert compat.level_of_the_user() == 1
