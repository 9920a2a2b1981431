"""Segments of device memory: how tensors on a GPU go to another process of the same host.

A segment consists of device memory that its sender has allocated for this purpose (`memory`), two events that both
processes have, and a page of ordinary shared memory that says whether the segment is free (`pages`). The sender passes
it once, as two descriptors: first the page, then the memory. `discipline` describes the order of the other steps.

A receiver cannot always open a segment: it may not see the GPU (``CUDA_VISIBLE_DEVICES``, containers), or the driver
may refuse. So the first segment on a device is passed on trial: without data, beside the next message, whatever that
is. The receiver opens it at once, and says in the page whether that worked. Until then, and if it did not, data goes
through host memory.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable

import torch

from backhaul.devices import driver
from backhaul.devices.driver import DriverError, NoMemory
from backhaul.devices.pages import FIELDS_AT, MAGIC, OPENED, PAGE, SEALS, Opened, Segment, first_line
from backhaul.errors import ProtocolError

_MOST = 32
MAX_NEW = 16
"""The most new segments that one message may pass."""
_SMALLEST = 2 << 20
_IDLE_SECONDS = 10.0
_LOOK_AGAIN = 1.0


class Placed:
    """Data in a segment, for a message that is not sent yet. If it is deleted before `leave`, the segment is freed."""

    def __init__(self, segment: Segment, size: int) -> None:
        self.id = segment.id
        self.size = size
        self.descriptors = segment.descriptors
        segment.descriptors = []
        self._segment = segment
        self.sent = False

    def leave(self) -> list[int]:
        """Call this when the message is sent. Returns the descriptors to pass along; the caller must close them."""
        self.sent = True
        descriptors, self.descriptors = self.descriptors, []
        return descriptors

    def __del__(self) -> None:
        if not self.sent:
            self._segment.stay(self.descriptors)


class DeviceLending:
    """The segments that one end of a channel lends to the other. Thread-safe."""

    def __init__(self, limit: int, warn: Callable[[str], None], on_use: Callable[[], None] = lambda: None) -> None:
        """``limit``: the bytes of device memory that the segments may take.

        ``warn`` is called with the reason if segments cannot be made, or the peer cannot open them; the same reason may
        come again. ``on_use`` is called when there is a first segment, so that the caller arranges for `trim`.
        """
        self._on_use = on_use
        self._limit = limit
        self._warn = warn
        self._process = os.getpid()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._segments: list[Segment] = []
        self._count = 0
        self._impossible = limit == 0
        self._full_until = 0.0  # the time until which no segment is made, because a device had no memory for one
        self._trials: dict[int, Segment] = {}  # by device: the first segment, until the peer has opened it
        self.offers = False
        """Whether a segment on trial has not been passed yet: see `offer`."""
        self._opened: set[int] = set()  # devices whose segments the peer can open
        self._refused: set[int] = set()

    def offer(self) -> list[int]:
        """The descriptors of segments on trial, to pass along with any message; the caller must close them."""
        if not self.offers:
            return []
        with self._lock:
            self.offers = False
            trials = list(self._trials.values())
            passed = [descriptor for each in trials for descriptor in each.descriptors]
            for each in trials:
                each.descriptors = []
        return passed

    def takes(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the peer can open segments on the GPUs of these tensors. The first call for a GPU starts a trial."""
        with self._lock:
            return all(
                device in self._opened or self._is_opened(device)
                for device in {tensor.get_device() for tensor in tensors if tensor.is_cuda}
            )

    def place(self, memory: torch.Tensor, size: int) -> Placed | None:
        """Copy the first bytes of a tensor into a segment, on the current stream. None if no segment is available."""
        device = memory.get_device()
        with self._lock:
            known = device in self._opened or self._is_opened(device)
            segment = self._take(device, size) if known and not self._impossible else None
            if segment is None:
                return None
            segment.page[0] = 1
            segment.used_at = time.monotonic()
        try:
            # The message may drop the last reference to the tensor before the copy begins.
            driver.record_use(memory, driver.torch_stream(device))
            segment.outgoing.fill(memory.data_ptr(), size, driver.current_stream(device))
        except BaseException:
            self._give_up(segment)
            raise
        return Placed(segment, size)

    def _give_up(self, segment: Segment) -> None:
        """Give up a segment whose copy has failed: its events may be those of an earlier one."""
        with self._lock:
            if segment in self._segments:
                self._segments.remove(segment)
        segment.forget()
        segment.page[0] = 0

    def _is_opened(self, device: int) -> bool:
        """Whether the peer can open segments on a device. The first call starts the trial."""
        if self._impossible or device in self._refused:
            return False
        if device in self._trials:
            self._end_trial(device)
            return device in self._opened
        trial = self._make(device, _SMALLEST)
        if trial is not None:
            trial.page[2] = 1
            self._note_use()
            self._trials[device] = trial
            self.offers = True
        return False

    def _end_trial(self, device: int) -> None:
        """End a trial if the peer has answered."""
        trial = self._trials[device]
        answer = trial.trial
        if not answer:
            return
        del self._trials[device]
        if answer == OPENED:
            self._opened.add(device)
            self._keep(trial)
            return
        self._refused.add(device)
        trial.forget()
        self._warn(
            f"tensors on cuda:{device} go through host memory, because another worker of this host cannot open device "
            f"memory of this one: {trial.reason()}"
        )

    def _take(self, device: int, size: int) -> Segment | None:
        best: Segment | None = None
        for each in self._segments:
            if each.device == device and (best is None or each.size < best.size) and each.size >= size and each.is_free:
                best = each
        if best is not None:
            return best
        capacity = _SMALLEST
        while capacity < size:
            capacity *= 2
        segment = self._make(device, capacity)
        if segment is not None:
            self._keep(segment)
        return segment

    def _make(self, device: int, capacity: int) -> Segment | None:
        self._make_room(capacity)
        if self._total() + capacity > self._limit or len(self._segments) >= _MOST:
            return None
        if time.monotonic() < self._full_until:
            return None
        try:
            segment = Segment(self._count + 1, device, capacity)
        except NoMemory as error:
            # Torch may have all of it, for now. The segments that exist are still of use.
            self._full_until = time.monotonic() + _LOOK_AGAIN
            self._warn(
                f"some tensors on GPUs go through host memory, because there is no memory for a segment: {error}"
            )
            return None
        except (DriverError, RuntimeError, OSError) as error:
            self._impossible = True
            reason = first_line(error)
            self._warn(f"tensors on GPUs go through host memory, because device memory cannot be shared: {reason}")
            return None
        self._count += 1
        return segment

    def _keep(self, segment: Segment) -> None:
        segment.used_at = time.monotonic()
        self._note_use()
        self._segments.append(segment)

    def _note_use(self) -> None:
        if not self._segments and not self._trials:
            self._on_use()

    def _total(self) -> int:
        return sum(each.memory.size for each in (*self._segments, *self._trials.values()))

    def _make_room(self, size: int) -> None:
        for segment in sorted(self._segments, key=lambda each: each.used_at):
            if self._total() + size <= self._limit and len(self._segments) < _MOST:
                return
            if segment.is_free:
                self._segments.remove(segment)
                segment.forget()

    def trim(self, now: float) -> float:
        """Free segments that were not used for a while. Returns the seconds until the next call is due, or infinity."""
        # Freeing device memory may block until the device has done its work. Threads that send must not wait for that.
        dropped: list[Segment] = []
        with self._lock:
            for device in list(self._trials):
                self._end_trial(device)
            soonest = _IDLE_SECONDS if self._trials else math.inf
            for segment in list(self._segments):
                left = segment.used_at + _IDLE_SECONDS - now
                if left > 0 or not segment.is_free:
                    soonest = min(soonest, max(left, _LOOK_AGAIN))
                else:
                    self._segments.remove(segment)
                    segment.forget()
                    dropped.append(segment)
        return soonest

    def close(self) -> None:
        if os.getpid() != self._process:
            # A forked child must not take the lock: a thread that exists only in the parent may hold it.
            self._segments = []
            self._trials = {}
            return
        with self._lock:
            self._impossible = True
            dropped = [*self._segments, *self._trials.values()]
            self._segments = []
            self._trials = {}
        for segment in dropped:
            segment.forget()


class DeviceLease:
    """Data in a peer's segment that has not been copied out yet. Deleting it marks the segment as free."""

    def __init__(self, segment: Opened, size: int) -> None:
        self._segment = segment
        self.size = size
        self._free = False

    def take(self, device: torch.device) -> torch.Tensor:
        """The bytes, in new memory on a device, ready on its current stream. Call it, or `fill`, once."""
        return self.fill(torch.empty(self.size, dtype=torch.uint8, device=device))

    def fill(self, target: torch.Tensor) -> torch.Tensor:
        """Copy the bytes into ``target``, and return it. Call it, or `take`, once."""
        try:
            self._segment.drain(target, self.size)
        finally:
            self._release()
        return target

    def _release(self) -> None:
        if not self._free:
            self._free = True
            self._segment.page[0] = 0

    def __del__(self) -> None:
        self._release()


class DeviceBorrowing:
    """The segments of device memory that the peer of a channel has passed. Not thread-safe."""

    def __init__(self) -> None:
        self._segments: dict[int, Opened] = {}

    def add(self, page: int, memory: int) -> None:
        """Take over two received descriptors, and close them when done. Raises `ProtocolError` if they are invalid."""
        kept = False
        try:
            if fcntl.fcntl(page, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(page).st_size != PAGE:
                raise ProtocolError("a descriptor that is not the page of a segment of device memory")
            mapped = mmap.mmap(page, PAGE)
            if mapped[FIELDS_AT : FIELDS_AT + len(MAGIC)] != MAGIC:
                raise ProtocolError("a descriptor that is not the page of a segment of device memory")
            if len(self._segments) >= 4 * _MOST:
                raise ProtocolError(f"more than {4 * _MOST} segments of device memory")
            opened = Opened(mapped, memory)
            self._segments[opened.id] = opened
            kept = True
        except (OSError, ValueError) as error:
            raise ProtocolError(f"a descriptor that is not the page of a segment of device memory: {error}") from error
        finally:
            os.close(page)
            if not kept:
                os.close(memory)
        for id in [id for id, segment in self._segments.items() if segment.page[1] and not segment.page[0]]:
            del self._segments[id]
        if mapped[2]:
            opened.try_to_open()

    def lend(self, id: int, size: int) -> DeviceLease:
        segment = self._segments.get(id)
        if segment is None or size > segment.size:
            raise ProtocolError(
                f"{size} bytes in segment {id} of device memory, which has not been passed or is smaller"
            )
        return DeviceLease(segment, size)


def is_page(descriptor: int) -> bool:
    """Whether a received descriptor is the page of a segment. The descriptor of its memory follows."""
    try:
        if os.fstat(descriptor).st_size != PAGE:
            return False
        with mmap.mmap(descriptor, PAGE) as page:
            return page[FIELDS_AT : FIELDS_AT + len(MAGIC)] == MAGIC
    except (OSError, ValueError):
        return False
