"""Device maps between different GPUs, on a machine that has several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU, if any")

THERE = {"worker1": {0: 1, 1: 0}}


def where_and_double(x: Tensor) -> tuple[str, Tensor]:
    return str(x.device), x * 2


@pytest.mark.parametrize("pool", [0, 1 << 30], ids=["host memory", "device segments"])
@pytest.mark.parametrize("here", [0, 1])
def test_a_tensor_goes_to_the_other_gpu_and_its_gradient_comes_back(here: int, pool: int) -> None:
    options = RpcOptions(device_maps=THERE, device_pool_bytes=pool)
    x = torch.randn(1 << 16, device=f"cuda:{here}", requires_grad=True)
    with InProcessCluster(2, sockets=True, options=[options, RpcOptions()]) as workers, workers[0].as_current():
        for _ in range(3):  # the first segment is on trial
            with dist_autograd.context() as context:
                device, y = workers[0].rpc_sync("worker1", where_and_double, args=(x,))
                assert (device, y.device) == (f"cuda:{1 - here}", x.device)
                torch.testing.assert_close(y, x * 2)
                dist_autograd.backward(context, [y.sin().sum()])
                gradient = dist_autograd.get_gradients(context)[x]
            assert gradient.device == x.device
            torch.testing.assert_close(gradient, 2 * (2 * x).cos())
