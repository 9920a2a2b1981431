"""The driver of `test_two_hosts`: runs on the first host, with a worker there and two on the second.

It announces what must happen to the second host, which it cannot reach into. Ray itself prints to the same output.
"""

from __future__ import annotations

import sys
import time

import parts
import ray
import torch

import backhaul.ray
from backhaul import rpc
from backhaul.worker import current

QUICK = 10.0
"""A call fails as soon as the kernel closes the connection. Ray considers a silent host dead after 15 s or more."""


def say(*words: object) -> None:
    print(">", *words, flush=True)


def verdict(name: str, within: float) -> tuple[str, float]:
    """What this worker knows about a peer once the peer is known to be over, and how long that took."""
    link = current().agent.link(rpc.get_worker_info(name))
    began = time.monotonic()
    while not link.fate.over:
        assert time.monotonic() < began + within, (name, link.fate.state, link.fate.reason)
        time.sleep(0.02)
    assert link.fate.certain
    return link.fate.reason, time.monotonic() - began


def main() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False)
    with backhaul.ray.cluster(3, names=["near", "far", "farther"], timeout=200.0) as workers:
        near, far, farther = workers
        assert near.node != far.node == farther.node
        large = torch.ones(1 << 20)
        for worker in workers:
            for other in ("driver", *(each.name for each in workers if each is not worker)):
                for _ in range(2):  # the first large tensor goes through the socket
                    assert worker.rpc_sync(parts.peer_sum, (other, large)) == 1 << 20
        ways = {worker.name: worker.rpc_sync(parts.ways) for worker in workers}
        assert {name: way for name, (way, _) in ways["far"].items()} == {
            "driver": "tls",
            "near": "tls",
            "farther": "unix",
        }
        assert ways["near"]["driver"][0] == "unix"
        assert ways["far"]["driver"][1] == 0  # nothing is shared between hosts
        assert ways["far"]["farther"][1] > large.nbytes / 2
        say("ways")

        # A process on the other host dies. Only Ray knows; its host sees the end, this one sees a closed connection.
        value = rpc.remote("farther", list, args=([1],))
        assert value.to_here() == [1]
        waiting = farther.rpc_async(parts.sleep, (1000,))
        began = time.monotonic()
        say("kill", farther.pid)
        try:
            waiting.wait()
        except rpc.WorkerLostError as error:
            assert "'farther'" in str(error)  # noqa: PT017
        else:
            raise AssertionError("the call has returned")
        took = time.monotonic() - began
        assert took < QUICK, took
        reason, seconds = verdict("farther", 60.0)
        assert "Ray says: the actor is dead because its worker process has died" in reason, reason
        say(f"lost after {took:.2f} s, known to be over after {took + seconds:.2f} s: {reason}")
        assert workers.restart("farther").rpc_sync(parts.name_here) == "farther"
        try:
            value.to_here()
        except rpc.WorkerLostError:
            say("restarted")

        # The other host is cut off. After a while Ray considers its node dead, and so does the group.
        say("cut")
        for name in ("far", "farther"):
            reason, seconds = verdict(name, 120.0)
            say(f"{name}: {reason}")
            assert "Ray says: " in reason, reason
        assert near.rpc_sync(parts.name_here) == "near"
    say("done")


if __name__ == "__main__":
    main()
