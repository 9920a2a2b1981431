"""What parties do that learn together and do not trust each other: see docs/federation.md.

::

    @rpc.expose(to="bank")
    class Shop(Party):
        def __init__(self):
            module = make_encoder()
            super().__init__(module, torch.optim.Adam(module.parameters()), loader=rows_of)

`Party` is what a party lets others use; they write ``RemoteModule("shop", Shop)``. `Edge` is what the party does to
all that it sends to a peer.
"""

from __future__ import annotations

from backhaul.edges.compression import BFloat16, Int8, TopK
from backhaul.edges.edge import Edge, Transform
from backhaul.edges.transforms import Clip, GaussianNoise
from backhaul.federation.party import Party
from backhaul.federation.privacy import epsilon

__all__ = ["BFloat16", "Clip", "Edge", "GaussianNoise", "Int8", "Party", "TopK", "Transform", "epsilon"]
