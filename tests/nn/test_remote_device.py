"""Strings that name a worker and one of its devices."""

from __future__ import annotations

from typing import Any

import pytest

from backhaul.errors import OptionError, UnknownWorkerError
from backhaul.nn.device import place
from backhaul.testing import InProcessCluster


@pytest.mark.parametrize(
    ("text", "worker", "device"),
    [
        ("worker1/cpu", 1, "cpu"),
        ("worker1", 1, "cpu"),
        ("rank:1/cpu", 1, "cpu"),
        ("rank:2", 2, "cpu"),
        ("worker2/cuda:0", 2, "cuda:0"),
        ("rank:0/cuda:3", 0, "cuda:3"),
        ("worker0/meta", 0, "meta"),
        ("worker0", 0, "cpu"),
    ],
)
def test_the_formats(three: InProcessCluster, text: str, worker: int, device: str) -> None:
    assert place(text) == (three[worker].info, device)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "/cpu",
        "worker1/",
        "worker1/banana",
        "worker1/cpu/0",
        "rank:",
        "rank:x",
        "rank:-1/cpu",
        1,
        None,
        b"worker1",
    ],
)
def test_other_formats_are_refused(three: InProcessCluster, text: Any) -> None:
    with pytest.raises(OptionError, match=r'a remote device is "<worker>/<device>".*as in "worker1/cpu"'):
        place(text)


@pytest.mark.parametrize("text", ["worker7", "worker7/cpu", "rank:7", "cpu", "cuda:0/cpu"])
def test_an_unknown_worker_is_refused(three: InProcessCluster, text: str) -> None:
    with pytest.raises(UnknownWorkerError, match=r"'worker1' \(rank 1\).*a remote device is") as caught:
        place(text)
    assert repr(text) in str(caught.value)
