"""The heap of a process stays sound, with glibc's own check of it.

Torch's ``record_stream`` damages the heap if its tensor is conjugated or negated lazily.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from backhaul.devices import streams
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster

TIMES = 300


def conjugate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.conj(), x.conj().imag


def send(**options: Any) -> None:
    """Send tensors that are conjugated or negated lazily, there and back."""
    way = RpcOptions(device_maps="same", **options)
    x = torch.randn(3, 3, dtype=torch.complex128, device="cuda")
    with InProcessCluster(2, sockets=True, options=way) as workers, workers[0].as_current():
        for _ in range(TIMES):
            back, negative = workers[0].rpc_async("worker1", conjugate, args=(x.conj(),)).wait()
            assert back.is_conj() == x.is_conj()
            assert torch.equal(back, x)
            assert torch.equal(negative, x.imag)
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                streams.use([x.conj(), x.conj().imag])


WAYS = {"device segments": {}, "host memory": {"device_pool_bytes": 0}}


@pytest.mark.parametrize("way", WAYS)
def test_lazily_conjugated_tensors_leave_the_heap_alone(way: str) -> None:
    checks = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3", "PYTHONMALLOC": "malloc"}
    subprocess.run([sys.executable, __file__, way], env={**os.environ, **checks}, check=True, timeout=100)


if __name__ == "__main__":
    send(**WAYS[sys.argv[1]])
