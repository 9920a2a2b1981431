"""Large tensors between processes of one host use shared memory, and still belong to the receiver."""

from __future__ import annotations

import gc
import pickle
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from segment_links import (
    Link,
    MiB,
    data_of,
    descriptors,
    in_segment,
    numbered,
    resident,
)
from transport_group import SOON, receive, run, send

from backhaul.errors import ProtocolError
from backhaul.transport import segments
from backhaul.transport.segments import MAX_PASSED, THRESHOLD, Budget
from backhaul.transport.stream import StreamChannel
from backhaul.wire import headers
from backhaul.wire.frames import PLACED, encode
from backhaul.wire.messages import Ping


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread: waking torch's threads takes longer than their work here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def links() -> Iterator[Callable[..., Link]]:
    """Makes links, and closes them."""
    made: list[Link] = []

    def make(*args: Any, **options: Any) -> Link:
        made.append(Link(*args, **options))
        return made[-1]

    yield make
    for link in made:
        link.close()


@pytest.fixture
def link(links: Callable[..., Link]) -> Link:
    return links()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make idle segments count as idle for long enough."""
    monkeypatch.setattr(segments, "_IDLE_SECONDS", 0.0)


def test_the_first_tensor_goes_by_the_stream_and_the_next_through_a_segment(link: Link) -> None:
    x = numbered(1)
    (first,) = link.trip(x)
    assert not in_segment(first)
    assert link.passed == 0
    (second,) = link.trip(x)
    assert in_segment(second)
    assert link.passed == 1
    assert torch.equal(first, x)
    assert torch.equal(second, x)


def test_a_segment_is_used_again_once_its_tensor_is_gone(link: Link) -> None:
    link.expect(MiB)
    places = set()
    for number in range(10):
        (got,) = link.trip(numbered(number))
        assert torch.equal(got, numbered(number))
        places.add(got.data_ptr())
        del got
    assert len(places) == 1
    assert link.passed == 1
    assert link.budget.warm == MiB


def test_a_view_keeps_the_segment(link: Link) -> None:
    """The memory counts, not the received tensor object."""
    link.expect(MiB)
    (got,) = link.trip(numbered(1))
    part = got[1000:1010]
    del got
    link.trip(numbered(2))
    assert torch.equal(part, numbered(1)[1000:1010])


def test_neither_end_keeps_descriptors(link: Link) -> None:
    """Descriptors are limited, so a kept tensor must not need one."""
    link.expect(MiB)
    before = descriptors()
    kept = [link.trip(numbered(number))[0] for number in range(40)]
    assert all(map(in_segment, kept))
    assert link.passed == 40
    assert descriptors() <= before + 1


def test_small_tensors_stay_in_the_message(link: Link) -> None:
    link.expect(MiB)
    small, below, large = torch.arange(10), numbered(1, THRESHOLD - 8), numbered(2)
    got = link.trip(small, large, below, large[: MiB // 2].clone(), torch.zeros(0))
    assert [in_segment(tensor) for tensor in got[:4]] == [False, True, False, True]
    for one, other in zip(got, [small, large, below, large[: MiB // 2], torch.zeros(0)], strict=True):
        assert torch.equal(one, other)
    assert link.passed == 2


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [dtype for dtype in headers.DTYPES if dtype is not None], ids=str)
def test_every_dtype(link: Link, dtype: torch.dtype) -> None:
    size = 480 * 1024
    link.expect(size)
    memory = torch.arange(size).remainder(2).to(torch.uint8)  # valid in every dtype, bool included
    shape = (size // dtype.itemsize // 12, 12)
    sent = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, shape)  # a few dtypes have no views
    (got,) = link.trip(sent)
    assert in_segment(got)
    assert got.dtype is dtype
    assert got.shape == shape
    assert data_of(got) == data_of(memory)


def strided() -> dict[str, torch.Tensor]:
    base = torch.arange(1 << 18, dtype=torch.float64).reshape(512, 512)
    return {
        "transposed": base.t(),
        "permuted": base.reshape(8, 64, 512).permute(2, 0, 1),
        "gaps": base[:, ::2],
        "rows": base[::3],
        "offset": base[17:],
        "expanded": base.reshape(-1, 1).expand(-1, 3),
        "channels last": base.reshape(4, 8, 64, 128).to(memory_format=torch.channels_last),
        "conj": torch.complex(base, base).conj(),
        "neg": torch.complex(base, base).conj().imag,
    }


@pytest.mark.parametrize("kind", strided())
def test_strided_views(link: Link, kind: str) -> None:
    sent = strided()[kind]
    link.trip(sent)
    (got,) = link.trip(sent)
    assert in_segment(got)
    assert torch.equal(got, sent)
    assert (got.is_conj(), got.is_neg()) == (sent.is_conj(), sent.is_neg())
    assert not got._is_view()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors(link: Link, layout: torch.layout) -> None:
    sent = torch.ones(1, 1 << 17).to_sparse(layout=layout)
    link.trip(sent)
    (got,) = link.trip(sent)
    assert in_segment(got.values() if layout is torch.sparse_csr else got._values())
    assert got.layout is layout
    assert torch.equal(got.to_dense(), sent.to_dense())


def test_tensors_that_share_memory_share_it_again(link: Link) -> None:
    base = numbered(1)
    tensors = base, base[4096:], base.view(torch.int64), numbered(2)
    link.trip(*tensors)
    whole, tail, wide, other = link.trip(*tensors)
    assert all(map(in_segment, (whole, tail, wide, other)))
    whole.fill_(3)
    assert tail.eq(3).all()
    assert wide.eq(0x0303030303030303).all()
    assert torch.equal(other, numbered(2))
    assert link.passed == 2


def test_leaves_and_parameters(link: Link) -> None:
    weight = torch.nn.Parameter(torch.randn(512, 512))
    frozen = torch.nn.Parameter(torch.randn(512, 512), requires_grad=False)
    leaf = torch.randn(512, 512, requires_grad=True)
    link.trip(weight, frozen, leaf)
    got = link.trip(weight, frozen, leaf)
    assert all(map(in_segment, got))
    assert [type(tensor) for tensor in got] == [torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]
    assert [tensor.requires_grad for tensor in got] == [True, False, True]
    assert all(tensor.is_leaf for tensor in got)
    (got[0] * got[2]).sum().backward()
    assert got[0].grad is not None
    assert torch.equal(got[0].grad, leaf)


def test_a_reader_in_inference_mode_makes_ordinary_tensors(link: Link) -> None:
    leaf = torch.randn(512, 512, requires_grad=True)
    link.trip(leaf)
    send(link.near, Ping(1), [leaf])
    with torch.inference_mode():
        (got,) = receive(link.far).tensors
    assert in_segment(got)
    assert not got.is_inference()
    (got * 2).sum().backward()


def test_both_directions_have_segments_of_their_own(link: Link) -> None:
    x, y = numbered(1), numbered(2)
    link.trip(x)
    run(lambda: send(link.far, Ping(1), [y]), lambda: receive(link.near))
    (one,) = link.trip(x)
    send(link.far, Ping(1), [y])
    (other,) = receive(link.near).tensors
    assert in_segment(one)
    assert in_segment(other)
    assert torch.equal(one, x)
    assert torch.equal(other, y)


# The memory is the receiver's.


def test_neither_side_sees_what_the_other_writes(link: Link) -> None:
    link.expect(MiB)
    sent = numbered(1)
    (got,) = link.trip(sent)
    got.fill_(7)
    assert torch.equal(sent, numbered(1))
    sent.fill_(8)
    assert got.eq(7).all()


def test_a_segment_whose_tensor_is_kept_is_never_reused(link: Link) -> None:
    link.expect(MiB)
    kept = {number: link.trip(numbered(number))[0] for number in range(20)}
    assert all(map(in_segment, kept.values()))
    for number in range(100, 150):
        (got,) = link.trip(numbered(number))
        assert torch.equal(got, numbered(number))
        del got
    assert link.passed == 21
    for number, tensor in kept.items():
        assert torch.equal(tensor, numbered(number))
    for number in (3, 11):
        del kept[number]
    more = [link.trip(numbered(number))[0] for number in range(200, 203)]
    assert link.passed == 21
    for number, tensor in [*kept.items(), *zip(range(200, 203), more, strict=True)]:
        assert torch.equal(tensor, numbered(number))


def test_messages_on_their_way_do_not_share_memory(link: Link) -> None:
    """The sender is several messages ahead of the receiver."""
    link.expect(MiB)
    for number in range(12):
        send(link.near, Ping(number), [numbered(number)])
    for number in range(12):
        (got,) = receive(link.far).tensors
        assert torch.equal(got, numbered(number))
        del got
    assert link.passed == 12


def test_tensors_outlive_the_channel(link: Link) -> None:
    link.expect(MiB)
    (got,) = link.trip(numbered(1))
    link.close()
    gc.collect()
    assert torch.equal(got, numbered(1))
    got.add_(1)
    assert torch.equal(got, numbered(1) + 1)
    assert resident() >= MiB
    del got
    gc.collect()
    assert resident() == 0


def test_tensors_sent_before_the_end_arrive(link: Link) -> None:
    link.expect(MiB)
    send(link.near, Ping(1), [numbered(1)])
    link.near.close()
    (got,) = receive(link.far).tensors
    assert torch.equal(got, numbered(1))


def test_received_tensors_can_be_used_like_ordinary_ones(link: Link) -> None:
    link.expect(MiB)
    x = numbered(1).view(torch.float32)
    (got,) = link.trip(x)
    assert in_segment(got)
    assert torch.equal(pickle.loads(pickle.dumps(got)), x)
    assert (got.numpy() == x.numpy()).all()
    shared = got.share_memory_()
    assert shared.is_shared()
    assert torch.equal(shared, x)


def test_a_received_tensor_can_be_shrunk_but_not_grown(link: Link) -> None:
    """As with all tensors over memory that torch did not allocate."""
    link.expect(MiB)
    (got,) = link.trip(numbered(1))
    got.resize_(1000)
    assert torch.equal(got, numbered(1)[:1000])
    got.resize_(MiB)
    assert torch.equal(got, numbered(1))
    with pytest.raises(RuntimeError, match="not resizable"):
        got.view(-1).resize_(2 * MiB)
    assert torch.equal(got, numbered(1))


# The budget.


def test_the_budget_bounds_the_memory(links: Callable[..., Link]) -> None:
    link = links(4 * MiB)
    link.expect(MiB)
    kept = []
    for number in range(8):
        kept += link.trip(numbered(number))
        assert link.budget.warm <= 4 * MiB
        assert resident() <= 4 * MiB + 8 * 4096
    assert [in_segment(tensor) for tensor in kept] == [True] * 4 + [False] * 4
    for number, tensor in enumerate(kept):
        assert torch.equal(tensor, numbered(number))


def test_segments_that_are_free_make_room_for_others(links: Callable[..., Link]) -> None:
    link = links(4 * MiB)
    link.expect(4 * MiB)
    kept = [link.trip(numbered(number))[0] for number in range(4)]
    del kept
    (got,) = link.trip(numbered(9, 4 * MiB))
    assert in_segment(got)
    assert torch.equal(got, numbered(9, 4 * MiB))
    assert link.budget.warm == 4 * MiB
    assert resident() <= 4 * MiB + 8 * 4096


def test_channels_share_a_budget(links: Callable[..., Link]) -> None:
    budget = Budget(2 * MiB)
    three = [links(budget=budget) for _ in range(3)]
    for link in three:
        link.expect(MiB)
    kept = [link.trip(numbered(number))[0] for number, link in enumerate(three)]
    assert [in_segment(tensor) for tensor in kept] == [True, True, False]
    del kept[0]
    kept += three[2].trip(numbered(2))  # uses the memory of the first
    assert in_segment(kept[-1])
    for number, tensor in zip([1, 2, 2], kept, strict=True):
        assert torch.equal(tensor, numbered(number))
    three[1].close()
    assert budget.warm == MiB
    for link in three:
        link.close()
    assert budget.warm == 0


def test_without_a_budget_all_tensors_go_by_the_stream(links: Callable[..., Link]) -> None:
    link = links(0)
    for number in range(3):
        (got,) = link.trip(numbered(number))
        assert not in_segment(got)
        assert torch.equal(got, numbered(number))
    assert link.passed == 0


def test_tensors_larger_than_the_budget_go_by_the_stream(links: Callable[..., Link]) -> None:
    link = links(MiB)
    link.expect(4 * MiB)
    (got,) = link.trip(numbered(1, 2 * MiB))
    assert not in_segment(got)
    assert torch.equal(got, numbered(1, 2 * MiB))
    assert link.passed == 0


def test_more_buffers_than_descriptors_may_pass(link: Link) -> None:
    link.expect(THRESHOLD)
    tensors = [numbered(number, THRESHOLD) for number in range(MAX_PASSED + 4)]
    got = link.trip(*tensors)
    assert sum(map(in_segment, got)) == MAX_PASSED
    for one, other in zip(got, tensors, strict=True):
        assert torch.equal(one, other)
    del got, one
    again = link.trip(*tensors)
    assert all(map(in_segment, again))
    for one, other in zip(again, tensors, strict=True):
        assert torch.equal(one, other)


# Memory that is given back.


def test_idle_memory_is_given_back(link: Link, at_once: None) -> None:
    link.expect(4 * MiB)
    (got,) = link.trip(numbered(1, 4 * MiB))
    place = got.data_ptr()
    del got
    assert resident() >= 4 * MiB
    link.budget.trim()
    assert link.budget.warm == 0
    assert resident() <= 4 * 4096
    (got,) = link.trip(numbered(2, 4 * MiB))
    assert torch.equal(got, numbered(2, 4 * MiB))
    assert got.data_ptr() == place
    assert link.passed == 1
    assert link.budget.warm == 4 * MiB


def test_recently_used_memory_stays(link: Link) -> None:
    link.expect(MiB)
    link.trip(numbered(1))
    assert 0 < link.budget.trim() <= segments._IDLE_SECONDS
    assert link.budget.warm == MiB


def test_nothing_to_give_back(link: Link, at_once: None) -> None:
    assert link.budget.trim() == float("inf")
    link.expect(MiB)
    link.trip(numbered(1))
    link.budget.trim()
    assert link.budget.trim() == float("inf")


def test_a_tensor_that_is_kept_for_long_counts_for_the_receiver(link: Link, at_once: None) -> None:
    link.expect(MiB)
    (kept,) = link.trip(numbered(1))
    link.budget.trim()
    assert link.budget.warm == 0
    assert link.lending.segments == []
    assert torch.equal(kept, numbered(1))
    (other,) = link.trip(numbered(2))
    assert link.passed == 2
    assert torch.equal(kept, numbered(1))
    assert torch.equal(other, numbered(2))
    assert list(link.borrowing._mappings) == [1, 2]
    before = resident()
    del kept
    assert resident() <= before - MiB
    assert list(link.borrowing._mappings) == [2]
    assert torch.equal(other, numbered(2))


def test_a_segment_is_given_up_before_the_receiver_has_read_it(link: Link, at_once: None) -> None:
    """The receiver was busy, or stopped, for so long that the sender assumes that it keeps the tensor."""
    link.expect(MiB)
    for number in range(3):
        send(link.near, Ping(number), [numbered(number)])
    link.budget.trim()
    assert link.lending.segments == []
    for number in range(3):
        (got,) = receive(link.far).tensors
        assert torch.equal(got, numbered(number))
        del got
    assert not link.borrowing._mappings
    assert resident() == 0


def test_a_segment_that_is_used_again_and_given_up_at_once(link: Link, at_once: None) -> None:
    link.expect(MiB)
    link.trip(numbered(1))
    send(link.near, Ping(2), [numbered(2)])
    link.budget.trim()
    (got,) = receive(link.far).tensors
    assert torch.equal(got, numbered(2))
    assert link.passed == 1
    del got
    assert not link.borrowing._mappings


# Sockets that are full, processes that have no descriptors left.


def fill(channel: StreamChannel) -> int:
    """Send pings until there is no room. Returns how many."""
    count = 0
    ping = bytes(encode(Ping(0)))
    try:
        while True:
            assert channel._socket.send(ping, socket.MSG_DONTWAIT) == len(ping)
            count += 1
    except BlockingIOError:
        return count


def test_a_full_socket_passes_the_descriptors_later(link: Link) -> None:
    link.expect(MiB)
    pings = fill(link.near)
    assert link.near.write(encode(Ping(1), [numbered(1)])) is False
    assert link.near._passing
    # It does not matter how long that takes.
    segments_before = list(link.lending.segments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_IDLE_SECONDS", 0.0)
        link.budget.trim()
    assert segments_before
    assert link.lending.segments == []
    assert link.near.flush() is False
    for _ in range(pings):
        assert receive(link.far).message == Ping(0)
    assert link.near.flush() is True
    (got,) = receive(link.far).tensors
    assert in_segment(got)
    assert torch.equal(got, numbered(1))
    (again,) = link.trip(numbered(2))
    assert torch.equal(again, numbered(2))
    assert link.passed == 2


def test_a_socket_that_takes_a_part_passes_the_descriptors_once(link: Link) -> None:
    link.expect(MiB)
    link.near._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
    before = descriptors()
    tensors = [numbered(1), *(numbered(number, THRESHOLD - 8) for number in range(2, 8)), numbered(9)]
    assert link.near.write(encode(Ping(1), tensors)) is False
    assert link.near._passing == []  # they were sent with the first part
    got: list[torch.Tensor] = []

    def write() -> None:
        while not link.near.flush():
            link.near.wait(read=False, write=True, timeout=SOON)

    run(write, lambda: got.extend(receive(link.far).tensors))
    for one, other in zip(got, tensors, strict=True):
        assert torch.equal(one, other)
    assert link.passed == 2
    assert descriptors() <= before + 2
    link.trip(numbered(1))
    assert descriptors() <= before + 1


@pytest.fixture
def few() -> Iterator[None]:
    """Restore the limit of descriptors after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def use_up_descriptors() -> None:
    """Open descriptors until no more can be opened."""
    probe = socket.socket()
    lowest = probe.fileno()
    probe.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_a_sender_without_descriptors_uses_the_stream(link: Link, few: None) -> None:
    link.expect(MiB)
    use_up_descriptors()
    for number in range(3):
        (got,) = link.trip(numbered(number))
        assert not in_segment(got)
        assert torch.equal(got, numbered(number))
    assert link.budget.warm == 0


def test_a_sender_without_descriptors_reuses_its_segments(link: Link, few: None) -> None:
    link.expect(MiB)
    for number in range(2):
        link.trip(numbered(number))
    use_up_descriptors()
    (kept,) = link.trip(numbered(1))
    (other,) = link.trip(numbered(2))
    assert in_segment(kept)
    assert not in_segment(other)
    assert torch.equal(kept, numbered(1))
    assert torch.equal(other, numbered(2))


def test_a_receiver_without_descriptors_says_so(link: Link, few: None) -> None:
    link.expect(MiB)
    send(link.near, Ping(1), [numbered(1)])
    before = descriptors()
    use_up_descriptors()
    with pytest.raises(ProtocolError, match="or this process has used up its"):
        receive(link.far)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    assert descriptors() == before


def test_segments_can_be_told_from_the_stream(links: Callable[..., Link]) -> None:
    """The tests above rely on this: a frame has the flag if a buffer is in a segment."""
    link = links()
    link.expect(MiB)
    frame, passed = link.lending.place(encode(Ping(1), [numbered(1)]))
    assert frame.pieces[0][3] & PLACED
    assert len(passed) == 1
    assert frame.size < 1000


def test_there_are_no_segments_over_tcp(links: Callable[..., Link]) -> None:
    link = links(family=socket.AF_INET)
    for number in range(3):
        (got,) = link.trip(numbered(number))
        assert not in_segment(got)
    assert link.near._lending is None
    assert link.far._borrowing is None
