"""Compat: the differences between the versions of Python and torch that Backhaul supports.

Each difference is one function or name here, and has a test in ``tests/test_compat.py``. ``make matrix`` runs the
tests with the versions that docs/versions.md lists. The code checks for a feature of torch, not for its version: a
build between two releases may or may not have the feature.
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
    """A base class. Python 3.10 cannot subscript it."""


def is_at(frame: FrameType, place: tuple[int, int | None, int, int | None]) -> bool:
    """Whether a frame is at this place in its source: first and last line, first and last column.

    Python 3.10 knows only the line.
    """
    if sys.version_info < (3, 11):
        return place[0] == frame.f_lineno
    for number, found in enumerate(frame.f_code.co_positions()):
        if number == frame.f_lasti // 2:
            return found == place
    return False


def never_compile(function: F) -> F:
    """The function, marked so that ``torch.compile`` leaves it and everything that it calls to the interpreter.

    Before torch 2.7 the result is a wrapper, because those versions have no mark that covers nested calls.
    """
    strategy = getattr(_frames, "_FrameExecStrategy", None)
    if strategy is None:
        return _without_compiler(function)
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, strategy(skip, skip))
    return function


def _without_compiler(function: F) -> F:
    """A wrapper that switches the compiler off for the calling thread during each call."""
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
    """The ``stacklevel`` with which the caller must warn, so that the warning shows the user's line.

    Since 3.12 Python itself can skip the frames of a package. Their number depends on torch: see `never_compile`.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    return level


def asked_by_compiler() -> bool:
    """Whether the caller is ``torch.compile`` itself, while it traces a graph.

    Before torch 2.8 the compiler asks each module of a model for its parameters, and cannot use references to remote
    parameters. Calls by user code do not count: the interpreter runs those, outside of graphs.
    """
    guards: Any = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


dtype_of_gradient: Callable[[torch.Tensor], torch.dtype | None]
dtype_of_gradient = attrgetter("grad_dtype" if hasattr(torch.Tensor, "grad_dtype") else "dtype")
"""The dtype of a leaf's gradient; None for any. Users can choose it since torch 2.10."""


def shard_groups(state: Any) -> Sequence[Any]:
    """The parameter groups of one module under `fully_shard`. Before torch 2.10 there was at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def tolerate_streams() -> None:
    """Silence torch's warning about a leaf that is used on the streams of several threads. Torch 2.10 added it."""
    tolerate = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if tolerate is not None:
        tolerate(False)


def records_cuda(profile: Any) -> bool:
    """Whether one of torch's profiles records GPUs.

    The older kind of profile has ``use_cuda``. The newer kind had it until torch 2.13.
    """
    return bool(getattr(profile, "use_cuda", False)) or getattr(profile, "use_device", None) == "cuda"


def store_on(listening: socket.socket, *args: Any, **options: Any) -> torch.distributed.TCPStore:
    """A store that serves on this socket. The store owns the socket from now on.

    Before torch 2.7 the newer of torch's two implementations of the store cannot take a socket.
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
    """Trigger and hide the warning that torch gives once, at the first tensor of this kind.

    The warning is not about the user's code. All versions of torch warn about complex32 and the compressed layouts.
    Some before 2.13 warn at the first COO tensor that its invariants are not checked, even if they are.
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
