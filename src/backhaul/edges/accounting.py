"""What noise is worth: epsilon, as a library for differential privacy computes it. Nothing is computed here.

``pip install backhaul[privacy]`` installs dp-accounting, whose accountant is taken; without it, that of Opacus is.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from backhaul.errors import MisuseError


class Mechanism(NamedTuple):
    """Gaussian noise that was added so many times, to what one row can change by ``1 / multiplier`` deviations."""

    multiplier: float
    times: int


def epsilon_of(mechanisms: Sequence[Mechanism], delta: float) -> float:
    """The epsilon of all of these together, for that delta, by the Rényi accountant of an installed library."""
    spent = [each for each in mechanisms if each.times]
    if not spent:
        return 0.0
    library = _imported("dp_accounting")
    if library is not None:
        accountant = _imported("dp_accounting.rdp").RdpAccountant()
        for each in spent:
            accountant.compose(library.GaussianDpEvent(each.multiplier), each.times)
        return float(accountant.get_epsilon(delta))
    opacus = _imported("opacus.accountants")
    if opacus is not None:
        accountant = opacus.RDPAccountant()
        accountant.history = [(each.multiplier, 1.0, each.times) for each in spent]
        return float(accountant.get_epsilon(delta))
    raise MisuseError(
        "epsilon is computed by dp-accounting or by Opacus, and neither is installed: pip install 'backhaul[privacy]'"
    )


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
