"""Fixtures that several suites of the wire share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# What they check is shown when it does not hold, as in the tests themselves.
pytest.register_assert_rewrite("recorded_exchange", "tensor_trips")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch checks sparse tensors in parallel: waking its threads takes longer than all the rest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
