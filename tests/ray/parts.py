"""Functions that the tests run on workers: a separate module, which actors import."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from backhaul import rpc

kept: dict[str, Any] = {}


def keep(key: str, value: Any) -> None:
    kept[key] = value


def fetch(key: str) -> Any:
    return kept.get(key)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def chain(x: torch.Tensor, *names: str) -> torch.Tensor:
    """Send a tensor from worker to worker; each does something of its own to it."""
    x = x.sin() * (len(names) + 1)
    return rpc.rpc_sync(names[0], chain, args=(x, *names[1:])) if names else x


def own_weight() -> torch.nn.Parameter:
    return kept["weight"]  # type: ignore[no-any-return]


def apply_weight(x: torch.Tensor) -> torch.Tensor:
    return x @ kept["weight"]


def make_weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    kept["weight"] = torch.nn.Parameter(torch.randn(rows, columns, dtype=torch.float64))
    return kept["weight"].detach().clone()  # type: ignore[no-any-return]


def gradient_of_weight(context_id: Any) -> torch.Tensor:
    import backhaul.autograd as dist_autograd

    return dist_autograd.get_gradients(context_id)[kept["weight"]]


def ways() -> dict[str, tuple[str, int]]:
    """For each peer: the path of the bytes, and how many went through shared memory."""
    return {peer["name"]: (peer["path"], peer["shared"]) for peer in rpc.debug_info()["peers"]}


def peer_sum(to: str, x: torch.Tensor) -> float:
    return float(rpc.rpc_sync(to, torch.sum, args=(x,)))


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def name_here() -> str:
    return rpc.get_worker_info().name


def node_here() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def fail(text: str) -> None:
    raise ValueError(text)


def secret_in_sight(secret: bytes) -> list[str]:
    """Where this process shows a secret: its initial and current environment, and its command line."""
    shown = {
        "environ": Path("/proc/self/environ").read_bytes(),
        "os.environ": repr(dict(os.environ)).encode(),
        "cmdline": Path("/proc/self/cmdline").read_bytes(),
    }
    return [where for where, data in shown.items() if secret in data or secret.hex().encode() in data]
