"""Rank 0, which hosts the TCP store, is killed: the group continues, and newcomers find it. Real processes."""

from __future__ import annotations

import datetime
import os
import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from backhaul import rpc
from crew import Hand

WITHIN = 10.0


def call(to: str) -> int:
    return rpc.rpc_sync(to, os.getpid)


def place(method: str, rank: int, world_size: int | None) -> dict[str, Any]:
    options = rpc.RpcOptions(init_method=method)
    return {"name": f"worker{rank}", "rank": rank, "world_size": world_size, "rpc_backend_options": options}


def join(where: dict[str, Any]) -> float:
    began = time.monotonic()
    rpc.init_rpc(**where)
    return time.monotonic() - began


def test_a_worker_that_waits_for_others_says_that_the_store_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    hands = [Hand(None, None) for _ in range(2)]
    try:
        for rank, hand in enumerate(hands):
            hand.await_start()
            joining = hand.start(join, place(f"tcp://127.0.0.1:{port}", rank, 3))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=WITHIN))
        store.wait(["backhaul/1/member/1"])
        hands[0].kill()
        with pytest.raises(rpc.WorkerLostError, match=r"store was lost before all workers had joined: .*\(rank 0"):
            joining.result(WITHIN)
    finally:
        for hand in hands:
            hand.close()


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "newcomer"), [(2, 0), (None, 2)], ids=["rank 0 again", "a new rank"])
def test_the_host_of_the_store_dies(world_size: int | None, newcomer: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    hands = [Hand(None, place(method, rank, world_size)) for rank in range(2)] + [Hand(None, None)]
    try:
        for hand in hands:
            hand.await_start()
        hands[1].run(call, "worker0")
        hands[0].kill()
        assert hands[2].run(join, place(method, newcomer, world_size)) < WITHIN
        assert hands[2].run(call, "worker1") == hands[1].process.pid
        assert hands[1].run(call, f"worker{newcomer}") == hands[2].process.pid
    finally:
        for hand in hands:
            hand.close()
