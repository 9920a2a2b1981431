"""Epsilon of added noise, as a library for differential privacy computes it. Nothing is computed here.

``pip install backhaul[privacy]`` installs dp-accounting, whose accountant is used. Without it, that of Opacus is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from backhaul.errors import MisuseError


class Mechanism(NamedTuple):
    """Gaussian noise, added ``times`` times to values that one row can change by ``1 / multiplier`` deviations."""

    multiplier: float
    times: int


def epsilon_of(mechanisms: Sequence[Mechanism], delta: float) -> float:
    """The epsilon of all mechanisms together, for ``delta``, from the Rényi accountant of an installed library.

    Raises `MisuseError` if no such library is installed.
    """
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
        "dp-accounting or Opacus computes epsilon, and neither is installed: pip install 'backhaul[privacy]'"
    )


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
