"""TorchScript under the drop-in: a scripted function that makes a call or takes an RRef raises an explanation.

Code inside TorchScript uses torch's RPC agent in C++, which Python cannot replace. Without that agent torch raises at
once, but its message asks whether `init_rpc` was called, which it was. So all calls of scripted functions and methods
from Python go through `_explained`, on the worker that makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from backhaul.dropin.rpc.rrefs import require_python

NO_CALLS = (
    "a call made inside TorchScript needs torch's own RPC agent, written in C++, and backhaul.dropin has replaced "
    "it: make the call from Python, and script the functions that it runs"
)
_NO_AGENT = "Current RPC agent is not set!"


def adopt() -> None:
    """From now on, in this process, scripted functions and methods explain calls that they cannot make."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = _explained(kind.__call__)  # type: ignore[method-assign]


def _explained(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def explained(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except RuntimeError as error:
            # The outermost scripted function explains a call inside another one, once.
            if _NO_AGENT in str(error) and NO_CALLS not in str(error):
                raise RuntimeError(f"{NO_CALLS}. {error}") from error
            require_python(self, (args, kwargs))
            raise

    return explained
