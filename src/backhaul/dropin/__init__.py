"""Drop-in: Backhaul behind the names of ``torch.distributed.rpc`` and its relatives.

Call `install` first, or run a script with ``python -m backhaul.dropin script.py`` or ``backhaul run --dropin``.
Libraries that import the torch names then get Backhaul, in child processes too. Names that are private in torch but
used by libraries live here and only here.

- `installing`     puts our modules in the places of torch's
- `children`       makes child processes do the same
- `rpc`, `autograd`, `optimizer`, `remote_module`   replace torch's modules
"""

from __future__ import annotations

from backhaul.dropin.installing import install, is_installed

__all__ = ["install", "is_installed"]
