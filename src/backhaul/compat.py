"""Compat: what one Python or torch does differently from another that Backhaul runs with.

Each difference is one function, or one name, here, and has a test in ``tests/test_compat.py``. ``make matrix`` runs the
tests with the Pythons and torches in docs/versions.md. What a torch can do is looked at rather than its version: a
build between two releases may have it or not.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._dynamo import eval_frame as _frames

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = os.path.dirname(__file__) + os.sep

if TYPE_CHECKING:
    StreamHandler = logging.StreamHandler[Any]
else:
    StreamHandler = logging.StreamHandler
    """A class to derive from. Python 3.10 cannot subscript it."""


def is_at(frame: FrameType, place: tuple[int, int | None, int, int | None]) -> bool:
    """Whether a frame is at the instruction of this part of the source: first and last line, first and last column.

    Python 3.10 knows the line only.
    """
    if sys.version_info < (3, 11):
        return place[0] == frame.f_lineno
    for number, found in enumerate(frame.f_code.co_positions()):
        if number == frame.f_lasti // 2:
            return found == place
    return False


def never_compile(function: F) -> F:
    """A function that ``torch.compile`` leaves to the interpreter, with all that it calls.

    It is the same function, except before torch 2.7, which has no mark for what a function calls.
    """
    strategy = getattr(_frames, "_FrameExecStrategy", None)
    if strategy is None:
        return _without_compiler(function)
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, strategy(skip, skip))
    return function


def _without_compiler(function: F) -> F:
    """Switch the compiler off for this thread during each call."""
    switch: Any = _frames.set_eval_frame

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = switch(None)
        try:
            return function(*args, **kwargs)
        finally:
            switch(before)

    _frames.skip_code(call.__code__)  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def level_of_the_user() -> int:
    """The ``stacklevel`` of a warning that the caller gives, so that it shows the user's line.

    Python can leave out the frames of a package since 3.12. Their number depends on torch: see `never_compile`.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    return level


def asked_by_compiler() -> bool:
    """Whether ``torch.compile`` itself calls, while it makes a graph of something.

    Before torch 2.8 it asks each module of a model for its parameters, and has no use for references to remote ones.
    What the user's code asks for is not meant: the interpreter runs that, outside of graphs.
    """
    guards: Any = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


dtype_of_gradient: Callable[[torch.Tensor], torch.dtype | None]
dtype_of_gradient = attrgetter("grad_dtype" if hasattr(torch.Tensor, "grad_dtype") else "dtype")
"""The dtype that the gradient of a leaf has; None for any. A user can choose it since torch 2.10."""


def shard_groups(state: Any) -> Sequence[Any]:
    """The groups of parameters of one module under `fully_shard`. Before torch 2.10 there was one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def tolerate_streams() -> None:
    """Have torch not warn that a leaf is used on the streams of several threads. Torch does since 2.10."""
    tolerate = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if tolerate is not None:
        tolerate(False)


def records_cuda(profile: Any) -> bool:
    """Whether one of torch's profiles records GPUs. The older kind has ``use_cuda``, the other one until torch 2.13."""
    return bool(getattr(profile, "use_cuda", False)) or getattr(profile, "use_device", None) == "cuda"


def store_on(listening: socket.socket, *args: Any, **options: Any) -> torch.distributed.TCPStore:
    """A store that serves on this socket, which belongs to the store from now on.

    Before torch 2.7 the newer one of torch's two kinds of stores cannot be given a socket.
    """
    store: Any = torch.distributed.TCPStore
    options["master_listen_fd"] = listening.detach()
    try:
        made: torch.distributed.TCPStore = store(*args, **options)
    except NotImplementedError:
        made = store(*args, **options, use_libuv=False)
    return made


@lru_cache(maxsize=16)
def use_up_warning(kind: torch.dtype | torch.layout) -> None:
    """Take the warning that torch gives once, at the first tensor of this kind: it is not about the user's code.

    All torches warn of complex32 and of the compressed layouts. Some before 2.13 warn at the first COO tensor that its
    invariants are not checked, even where they are.
    """
    cpu = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(kind, torch.dtype):
            torch.empty(1, dtype=kind, device=cpu)
            return
        values = torch.ones(1, device=cpu)
        bounds = torch.arange(2, device=cpu)
        if kind is torch.sparse_coo:
            torch.sparse_coo_tensor(bounds[None, :1], values, (1,), check_invariants=True)
            return
        if kind in (torch.sparse_bsr, torch.sparse_bsc):
            values = values.reshape(1, 1, 1)
        torch.sparse_compressed_tensor(bounds, bounds[:1], values, (1, 1), layout=kind, check_invariants=True)
