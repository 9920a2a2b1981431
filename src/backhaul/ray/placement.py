"""Where Ray puts the workers: a placement group with one bundle for each, ranks by node, and missing resources.

`ranks`, `bundle_of` and `missing` are pure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from backhaul.errors import OptionError, RpcTimeoutError

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_WAIT_SECONDS = 1  # Ray accepts whole seconds only


@dataclass(frozen=True)
class Node:
    """A node of the Ray cluster: its resources, and the free ones; None if Ray does not tell."""

    address: str
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] | None = None


class Placement:
    """A placement group that is ready. Call `remove` at the end."""

    def __init__(self, n: int, resources: Mapping[str, float], strategy: str, deadline: float) -> None:
        """Wait for room until the deadline. Raises `RpcTimeoutError`, saying what is missing."""
        self._bundle = bundle_of(resources)
        check_strategy(strategy)
        began = time.monotonic()
        self._group = placement_group([self._bundle] * n, strategy=strategy)
        try:
            while not self._group.wait(_WAIT_SECONDS):
                if time.monotonic() >= deadline:
                    seconds = time.monotonic() - began
                    raise RpcTimeoutError(missing(self._bundle, n, strategy, nodes(), seconds))
        except BaseException:
            self.remove()
            raise

    def nodes_of_bundles(self) -> list[str]:
        """The id of the node of each bundle."""
        found: Mapping[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        return [found[index] for index in sorted(found)]

    def options(self, bundle: int) -> dict[str, Any]:
        """The options of an actor that takes this bundle."""
        found: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
        found |= {_OPTIONS[name]: amount for name, amount in self._bundle.items() if name in _OPTIONS}
        found["resources"] = {name: amount for name, amount in self._bundle.items() if name not in _OPTIONS}
        found["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        return found

    def remove(self) -> None:
        if ray.is_initialized():
            remove_placement_group(self._group)


def check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise OptionError(f"strategy {strategy!r} must be one of {', '.join(STRATEGIES)}")


def bundle_of(resources: Mapping[str, float]) -> dict[str, float]:
    """The resources that Ray must reserve for one worker. Raises `OptionError`."""
    if not isinstance(resources, Mapping):
        raise OptionError(f"resources {resources!r} must be a dict, as in {{'CPU': 1, 'GPU': 0}}")
    for name, amount in resources.items():
        if not isinstance(name, str) or isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
            raise OptionError(f"resources: {name!r}: {amount!r} must be the name of a resource and an amount")
    found = {name: float(amount) for name, amount in resources.items() if amount}
    if not found:
        raise OptionError("resources must ask for something, such as {'CPU': 1}: Ray does not place empty bundles")
    return found


def ranks(nodes_of_bundles: Sequence[str], first: str | None = None) -> list[int]:
    """The bundles in the order of ranks. Bundles of one node are consecutive; node ``first`` comes first."""
    order = list(dict.fromkeys([*([first] if first in nodes_of_bundles else []), *nodes_of_bundles]))
    return sorted(range(len(nodes_of_bundles)), key=lambda bundle: (order.index(nodes_of_bundles[bundle]), bundle))


def nodes() -> list[Node]:
    """The living nodes of the cluster, now."""
    free = _free_by_node()
    return [
        Node(each["NodeManagerAddress"], each["Resources"], free.get(each["NodeID"]) if free is not None else None)
        for each in ray.nodes()
        if each["Alive"]
    ]


def _free_by_node() -> Mapping[str, Mapping[str, float]] | None:
    # Ray's public functions give only the sum over all nodes.
    try:
        from ray._private.state import available_resources_per_node

        found: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    except Exception:  # another version of Ray: the message has fewer details
        return None
    return found


def missing(bundle: Mapping[str, float], n: int, strategy: str, nodes: Sequence[Node], seconds: float) -> str:
    """The message for a user whose workers find no room."""
    free = [node.total if node.free is None else node.free for node in nodes]
    now, ever = _room(bundle, strategy, free), _room(bundle, strategy, [node.total for node in nodes])
    lines = [
        f"Ray found no room for {n} workers within {seconds:.0f} s. Asked for: {n} times {_amounts(bundle)}, strategy "
        f"{strategy!r}; there is room for {min(now, n)} now, and for {min(ever, n)} when nothing else runs"
    ]
    lines += [f"  node {node.address}: {_offer(node, bundle)}" for node in nodes]
    for name, amount in bundle.items():
        there, all_free = sum(node.total.get(name, 0.0) for node in nodes), sum(each.get(name, 0.0) for each in free)
        if all_free < n * amount:
            lines.append(f"  missing: {name}: {n * amount:g} asked for, {all_free:g} free, {there:g} in the cluster")
    if strategy == "STRICT_SPREAD" and len(nodes) < n:
        lines.append(f"  missing: nodes: STRICT_SPREAD puts each worker on its own node, but there are {len(nodes)}")
    if strategy == "STRICT_PACK" and ever < n:
        lines.append("  missing: one node with room for all workers, as STRICT_PACK requires")
    lines.append("Ask for less, end other jobs, add nodes, or give cluster() a longer timeout.")
    return "\n".join(lines)


def _room(bundle: Mapping[str, float], strategy: str, offers: Sequence[Mapping[str, float]]) -> int:
    """How many workers find room."""
    fitting = [min(int(offer.get(name, 0.0) // amount) for name, amount in bundle.items()) for offer in offers]
    if strategy == "STRICT_PACK":
        return max(fitting, default=0)
    if strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in fitting)
    return sum(fitting)


def _offer(node: Node, bundle: Mapping[str, float]) -> str:
    parts = []
    for name in bundle:
        total = node.total.get(name, 0.0)
        free = "" if node.free is None else f"{node.free.get(name, 0.0):g} free of "
        parts.append(f"{name} {free}{total:g}")
    return ", ".join(parts)


def _amounts(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
