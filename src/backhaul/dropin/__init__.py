"""Drop-in: Backhaul behind the names of ``torch.distributed.rpc`` and its relatives.

Call `install` first of all, or run a script with ``python -m backhaul.dropin script.py`` or ``backhaul run --dropin``;
libraries that import the torch names then get Backhaul, in child processes too. What torch keeps private but libraries
use lives here and only here.

- `installing`     puts our modules in the places of torch's
- `children`       has processes that are started from here do the same
- `rpc`, `autograd`, `optimizer`, `remote_module`   what stands for torch's modules
"""

from __future__ import annotations

from backhaul.dropin.installing import install, is_installed

__all__ = ["install", "is_installed"]
