"""A leaf that one thread sends while another computes with it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from backhaul.autograd import functions
from crew import Crew

SECONDS = 3.0
"""Seconds. If two threads could block each other, they did so within 1.2 s each time."""


def send_and_use(layout: str) -> tuple[int, int]:
    """Send a leaf while another thread uses it, without keeping its `AccumulateGrad` node. Returns the counts."""
    leaf = torch.ones(3, 3)
    leaf = (leaf.to_sparse() if layout == "sparse" else leaf).requires_grad_()
    sent = used = 0
    over = False

    def use() -> None:
        nonlocal used
        while not over:
            leaf * 2
            used += 1

    thread = threading.Thread(target=use)
    thread.start()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        functions.send(1, [leaf])
        sent += 1
    over = True
    thread.join()
    return sent, used


@pytest.mark.parametrize("layout", ["strided", "sparse"])
def test_a_leaf_that_is_sent_while_it_is_used(layout: str) -> None:
    """In a separate process, because a deadlock in torch would stop the whole process."""
    with Crew(1, group=False) as crew:
        sent, used = crew[0].run(send_and_use, layout, timeout=SECONDS + 20)
    assert sent > 100
    assert used > 100
