"""Parcel: the gradients of a message, and which of its tensors they belong to."""

from __future__ import annotations

import torch

from backhaul.autograd.run import Parcel
from backhaul.ids import WorkerInfo
from backhaul.wire.messages import Pass

PASS = Pass(1, 2, 1, False, False)


def parcel() -> Parcel:
    return Parcel(WorkerInfo(0, "peer"))


def test_outputs_are_sent_for_the_sources_that_are_reached() -> None:
    found = parcel()
    a, b, c = torch.ones(3, 2).unbind()
    assert list(found.add_outputs(50, {0, 1}, (a, b))) == [50, 51]
    assert list(found.add_outputs(60, {2, 0}, (a, b, c))) == [60, 62]
    assert list(found.add_outputs(70, {0}, (c,))) == [70]
    message = found.message(PASS)
    assert message.sources == (50, 51, 60, 62, 70)
    assert message.present == (0, 1, 2, 3, 4)
    assert [each.data_ptr() for each in found.tensors] == [each.data_ptr() for each in (a, b, a, c, c)]
    assert found.nbytes == 5 * a.nbytes


def test_sources_without_gradients_are_listed_by_place() -> None:
    found = parcel()
    found.add((50, 51, 52), (None, torch.ones(2), None))
    found.add((60,), (None,))
    found.add((50, 51), (torch.ones(2), None))
    message = found.message(PASS)
    assert message.sources == (50, 51, 52, 60, 50, 51)
    assert message.present == (1, 4)
    assert len(found.tensors) == 2


def test_small_gradients_are_made_contiguous_and_large_ones_are_not() -> None:
    found = parcel()
    small, large = torch.ones(()).expand(4, 4), torch.ones(()).expand(100, 100)
    found.add((50, 51), (small, large))
    assert [each.is_contiguous() for each in found.tensors] == [True, False]
    assert found.nbytes == small.nbytes + large.nbytes
