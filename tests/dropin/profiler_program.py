"""One worker under torch's names: profiles of calls, and what TorchScript cannot do. Prints its findings as JSON.

Run it with ``python -m backhaul.dropin``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor


@torch.jit.script
def add_one(x: Tensor) -> Tensor:
    return x + 1


@torch.jit.script
def call_inside(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(to, add_one, (x,))


@torch.jit.script
def takes_reference(x: rpc.RRef[Tensor]) -> Tensor:
    return x.to_here()


@torch.jit.script
def takes_anything(x: Any) -> Any:
    return x


class CallsInside(torch.nn.Module):
    def forward(self, to: str, x: Tensor) -> Tensor:
        return rpc.rpc_async(to, add_one, (x,)).wait()


def call_scripted(to: str, x: Tensor) -> Tensor:
    return call_inside(to, x)


def error_of(call: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        return {"value": repr(call())}
    except Exception as error:
        return {
            "type": type(error).__name__,
            "is_runtime_error": isinstance(error, RuntimeError),
            "text": str(error),
            "seconds": time.monotonic() - began,
        }


def profiled() -> dict[str, Any]:
    x = torch.ones(2)
    with torch.profiler.profile() as profile:
        rpc.rpc_sync("worker0", torch.mul, args=(x, 2))
        rref = rpc.remote("worker0", add_one, args=(x,))
        rref._get_profiling_future().wait()
        assert rref._get_type() is torch.Tensor
    unwatched = rpc.remote("worker0", add_one, args=(x,))
    return {
        "names": [event.name for event in profile.events()],
        "no future": error_of(unwatched._get_profiling_future),
    }


def main() -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    x = torch.ones(2)
    rref = rpc.RRef(x)
    found = {
        "profile": profiled(),
        "a call inside": error_of(lambda: rpc.rpc_sync("worker0", call_inside, args=("worker0", x))),
        "for a reference": error_of(lambda: rpc.remote("worker0", call_inside, args=("worker0", x)).to_here()),
        "below Python": error_of(lambda: rpc.rpc_sync("worker0", call_scripted, args=("worker0", x))),
        "a function here": error_of(lambda: call_inside("worker0", x)),
        "a module here": error_of(lambda: torch.jit.script(CallsInside())("worker0", x)),
        "an RRef here": error_of(lambda: takes_reference(rref)),
        "an RRef": error_of(lambda: rpc.rpc_sync("worker0", takes_anything, args=(rref,))),
        "an RRef inside a list": error_of(lambda: rpc.rpc_async("worker0", takes_anything, kwargs={"x": [rref]})),
        "scripted": rpc.rpc_sync("worker0", add_one, args=(x,)).tolist(),
    }
    rpc.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
