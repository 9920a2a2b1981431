"""Device maps: to which device of a peer a tensor goes. Pure.

The caller's map decides for a request, and its inverse for the reply. A gradient goes to the device from which the
tensor came, so it needs no map.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from backhaul.devices.names import DeviceMap, index_of
from backhaul.errors import OptionError


class Devices(msgspec.Struct, frozen=True):
    """What a worker tells the others about its devices when it joins the group."""

    count: int = 0
    maps: dict[str, dict[str, str]] = {}
    same: bool = False
    """Whether its map to each peer connects devices of equal indices."""
    used: tuple[int, ...] = ()


def inverted(map: Mapping[str, str]) -> DeviceMap:
    return {target: source for source, target in map.items()}


def map_between(all: Mapping[str, Devices], source: str, target: str) -> DeviceMap:
    """The map of worker ``source`` for its calls to ``target``."""
    mine, theirs = all.get(source, Devices()), all.get(target, Devices())
    if mine.same:
        return {f"cuda:{index}": f"cuda:{index}" for index in range(min(mine.count, theirs.count))}
    return dict(mine.maps.get(target, {}))


def cross(all: Mapping[str, Devices]) -> bool:
    """Whether some map leads from a CPU to a GPU, or from a GPU to a CPU."""
    pairs = [pair for each in all.values() for map in each.maps.values() for pair in map.items()]
    return any((index_of(source) is None) != (index_of(target) is None) for source, target in pairs)


def check(all: Mapping[str, Devices]) -> None:
    """Raise `OptionError`, in torch's words, if a worker's map names a worker or a device that does not exist."""
    for name, devices in all.items():
        unknown = sorted(set(devices.maps) - set(all))
        if unknown:
            raise OptionError(
                f"Node {name} has invalid target node names in its device maps: {', '.join(map(repr, unknown))}; the "
                f"workers are {', '.join(map(repr, sorted(all)))}"
            )
        for target, entries in devices.maps.items():
            _check_map(name, devices, target, all[target], entries)


def _check_map(name: str, mine: Devices, target: str, theirs: Devices, entries: Mapping[str, str]) -> None:
    if len(set(entries.values())) != len(entries):
        raise OptionError(f"Node {name} has duplicated target devices in its device map for {target}: {dict(entries)}")
    for kind, owner, devices, found in (
        ("source", name, mine, list(entries)),
        ("target", target, theirs, list(entries.values())),
    ):
        indices = [index for each in found if (index := index_of(each)) is not None]
        listed = ", ".join(f"cuda:{index}" for index in devices.used or range(devices.count)) or "no GPU"
        if any(index >= devices.count for index in indices):
            raise OptionError(
                f"Node {name} has {kind} devices with invalid indices in its device map for {target}: "
                f"{', '.join(found)}, and {owner} has {listed}"
            )
        if devices.used and not set(indices) <= set(devices.used):
            raise OptionError(
                f"Node {name} has unexpected {kind} devices in its device map for {target}: {', '.join(found)}, and "
                f"{owner} has {listed}"
            )
