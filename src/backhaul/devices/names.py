"""Names of devices, and device maps as users write them. Pure, without torch and msgspec: the launcher imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from backhaul.errors import OptionError

CPU = "cpu"

DeviceMap = dict[str, str]
"""Maps devices of one worker to devices of another, both by name: ``cpu`` or ``cuda:1``."""

DeviceMaps = Mapping[str, Mapping[Any, Any]] | Literal["same"] | None
"""The option: for each worker a device map, whose devices may be given in any way that `name_of` accepts."""


def name_of(device: Any) -> str:
    """``cpu`` or ``cuda:1``, for a `torch.device`, an index or a name. Raises `OptionError` for other values."""
    if isinstance(device, bool):
        raise OptionError(f"{device!r} is not a device")
    if isinstance(device, int):
        if device < 0:
            raise OptionError(f"{device!r} is not a device")
        return f"cuda:{device}"
    text = str(device)
    kind, colon, index = text.partition(":")
    if kind == CPU and index in ("", "0"):
        return CPU
    if kind == "cuda" and (index.isdecimal() or not colon):
        return f"cuda:{int(index or 0)}"
    raise OptionError(f"{device!r} is not a device that tensors can be sent from or to: cpu, cuda:0, cuda:1, …")


def index_of(name: str) -> int | None:
    """The index of a GPU; None for the CPU."""
    return None if name == CPU else int(name.partition(":")[2])


def parse_map(given: Mapping[Any, Any]) -> DeviceMap:
    """The map that a user gives, without entries from the CPU to itself. Raises `OptionError` if it is not 1-to-1."""
    found: DeviceMap = {}
    for source, target in given.items():
        here, there = name_of(source), name_of(target)
        if here == there == CPU:
            continue
        if there in found.values():
            raise OptionError(
                f"`set_device_map` only supports 1-to-1 mapping, trying to map {source!r} to {target!r}, which another "
                "device is mapped to already"
            )
        found[here] = there
    return found
