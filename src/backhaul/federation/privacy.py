"""epsilon: how much a peer may have learnt about a row from what this worker has sent to it."""

from __future__ import annotations

import math

from backhaul.edges.accounting import Mechanism, epsilon_of
from backhaul.edges.crossing import Released
from backhaul.errors import MisuseError, OptionError
from backhaul.worker import current


def epsilon(to: str, delta: float, *, releases: int | None = None, sensitivity: float = 1.0) -> float:
    """The epsilon, for ``delta``, of all values and gradients that this worker has sent to peer ``to``.

    Each sent tensor counts as a release of every row, so the result holds for a row that was in all of them. If no row
    was in more than ``releases`` tensors of a direction, give that number: in training, it is the number of epochs.

    ``sensitivity`` is how much one row can change what is sent, as a multiple of the norm of the `Clip`: 1 if you
    compare a row with zeros in its place, 2 if you compare it with another row.

    The result is infinite if a floating-point tensor, or a gradient, was sent without noise. Each worker counts from
    its own start. The result does not cover integers, texts, shapes, times, and what the edge lets pass unchanged.

    Raises `MisuseError` if there is no edge to that peer, no `Clip` before the noise, or no library to compute it.
    """
    if isinstance(delta, bool) or not isinstance(delta, float) or not 0 < delta < 1:
        raise OptionError(f"delta={delta!r} must be between 0 and 1: choose it below 1 / (number of rows)")
    if releases is not None and (isinstance(releases, bool) or not isinstance(releases, int) or releases < 0):
        raise OptionError(f"releases={releases!r} must be a whole number, or None for all")
    if not isinstance(sensitivity, int | float) or not 0 < sensitivity < math.inf:
        raise OptionError(f"sensitivity={sensitivity!r} must be a positive number: 1, or 2 for rows that are replaced")
    worker = current()
    edges = worker.agent.execution.edges
    crossing = None if edges is None else edges.to(worker.get_worker_info(to).name)
    if crossing is None:
        raise MisuseError(f"there is no edge to {to!r}: give RpcOptions(edges={{{to!r}: Edge(...)}}), with noise in it")
    both = [crossing.released("on_send"), crossing.released("on_gradient")]
    if any(each.bare for each in both):
        return math.inf
    return epsilon_of([_mechanism(to, each, releases, sensitivity) for each in both if each.tensors], delta)


def _mechanism(to: str, released: Released, releases: int | None, sensitivity: float) -> Mechanism:
    if released.multiplier is None:
        raise MisuseError(
            f"the noise of the edge to {to!r} has a std and no multiplier, so the size of what it hides is unknown: "
            "put a Clip before it, and give GaussianNoise(multiplier)"
        )
    times = released.tensors if releases is None else min(releases, released.tensors)
    return Mechanism(released.multiplier / sensitivity, times)
