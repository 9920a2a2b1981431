"""Waiting for a device that still copies data into a frame. See `wire.filling`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from backhaul.devices.driver import DriverError
from backhaul.transport.base import ChannelClosed
from backhaul.wire.filling import Filling
from backhaul.wire.frames import Frame

_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
_A_MOMENT = 1e-4


def missing(filling: Filling) -> int:
    """The number of bytes that the device has not copied yet."""
    try:
        return filling.missing
    except DriverError as error:
        raise ChannelClosed(f"a tensor could not be copied from its GPU: {error}") from error


def wait_while(fills: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``fills()`` is false. Returns whether it was, within this many seconds."""
    end = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while fills():
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(left, pause))  # a device has no descriptor to poll, and ``poll`` rounds up to a millisecond
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def fills_for_long(frame: Frame) -> bool:
    """Whether a device still copies data into the frame.

    A small copy on an idle device ends within a moment, and this function waits for that: if another thread had to send
    the frame, it would leave later.
    """
    filling = frame.filling
    return filling is not None and not wait_while(lambda: missing(filling) > 0, _A_MOMENT)


def whole(frame: Frame) -> bytes:
    """All bytes of a frame, when they are there."""
    if (filling := frame.filling) is not None:
        wait_while(lambda: missing(filling) > 0, math.inf)
    return bytes(frame)
