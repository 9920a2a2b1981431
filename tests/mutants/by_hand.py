"""Mistakes that an engineer could make in the modules that run threads, sockets and torch.

Locks are dropped, orders are swapped, checks are skipped, and resources are not released.
"""

from __future__ import annotations

from by_hand_calls import CALLS
from by_hand_devices import DEVICES
from by_hand_training import TRAINING
from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*TRAINING, *CALLS, *DEVICES)
