"""A script in torch's own style: every worker adds its rank to a tensor that goes round."""

import os

import torch

import backhaul.rpc as rpc


def go_round(x: torch.Tensor, left: int, world_size: int) -> torch.Tensor:
    rank = rpc.get_worker_info().id
    x = x + rank
    if left == 0:
        return x
    return rpc.rpc_sync((rank + 1) % world_size, go_round, args=(x, left - 1, world_size))


def say(line: str) -> None:
    """Write a line to the output that the workers share, in one write. `print` may make several."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    rpc.init_rpc()
    info = rpc.get_worker_info()
    world_size = int(os.environ["WORLD_SIZE"])
    if info.id == 0:
        total = rpc.rpc_sync("worker1", go_round, args=(torch.zeros(2), world_size - 1, world_size))
        assert total.tolist() == [sum(range(world_size))] * 2, total
        say(f"the ring is {total.tolist()}")
    rpc.shutdown()
    say(f"{info.name} is done")


if __name__ == "__main__":
    main()
