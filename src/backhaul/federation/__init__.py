"""For parties that train a model together and do not trust each other: see docs/federation.md.

::

    @rpc.expose(to="bank")
    class Shop(Party):
        def __init__(self):
            module = make_encoder()
            super().__init__(module, torch.optim.Adam(module.parameters()), loader=rows_of)

A `Party` offers others the use of a party's module; they write ``RemoteModule("shop", Shop)``. An `Edge` says what the
party does to everything that it sends to a peer.
"""

from __future__ import annotations

from backhaul.edges.compression import BFloat16, Int8, TopK
from backhaul.edges.edge import Edge, Transform
from backhaul.edges.transforms import Clip, GaussianNoise
from backhaul.federation.party import Party
from backhaul.federation.privacy import epsilon

__all__ = ["BFloat16", "Clip", "Edge", "GaussianNoise", "Int8", "Party", "TopK", "Transform", "epsilon"]
