"""Replicas: modules under `DistributedDataParallel`, whose gradients are averaged over processes as they are made.

Its reducer hangs on the `AccumulateGrad` nodes of the module's parameters, where it cannot be seen from Python. It
counts them in one run of torch's engine, starts to average a bucket of gradients when all of the bucket are in
``.grad``, and has the engine wait for all buckets at the end of the run. So all parameters of a replica have to be
in one run, and the run has to put their gradients into ``.grad``.

All processes have to average in the same order, too: a process group knows its operations by nothing else. So the
parameters of all replicas of a process are in one run, whose order is that of the forward pass.

To know the replicas, this module has torch tell it of modules that get a submodule, which costs nothing otherwise.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel


class Replica:
    """A module under DDP, as far as its gradients go."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.lends_memory: bool = wrapper.gradient_as_bucket_view
        """Whether ``.grad`` is a view of memory that the next pass will use again."""

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """None if it is gone."""
        return self._wrapper()

    @property
    def parameters(self) -> list[torch.Tensor]:
        wrapper = self._wrapper()
        return [] if wrapper is None else [each for each in wrapper.parameters() if each.requires_grad]


class Replicas:
    """The replicas of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._any = False  # quicker to look at than the set
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._known: list[Replica] = []
        self._by_leaf: dict[int, list[Replica]] = {}

    def notice(self, parent: torch.nn.Module, name: str, child: Any) -> None:
        """Called by torch for each module that becomes a part of another."""
        if name == "module" and isinstance(parent, DistributedDataParallel):
            with self._lock:
                self._any = True
                self._wrappers.add(parent)

    def by_leaf(self) -> Mapping[int, Sequence[Replica]]:
        """The replicas of each leaf that is in one, by the leaf's id. A module can be wrapped more than once."""
        if not self._any:
            return {}
        with self._lock:
            wrappers = [wrapper for wrapper in self._wrappers if hasattr(wrapper, "reducer")]
            if [replica.wrapper for replica in self._known] != wrappers:
                self._known = [Replica(wrapper) for wrapper in wrappers]
                self._by_leaf = {}
                for replica in self._known:
                    for leaf in replica.parameters:
                        self._by_leaf.setdefault(id(leaf), []).append(replica)
            return self._by_leaf

    def of(self, leaves: Iterable[torch.Tensor]) -> list[Replica]:
        """The replicas that have some of these leaves."""
        by_leaf = self.by_leaf()
        if not by_leaf:
            return []
        return list(dict.fromkeys(replica for leaf in leaves for replica in by_leaf.get(id(leaf), ())))


replicas = Replicas()
register_module_module_registration_hook(replicas.notice)
if torch.distributed.is_available() and torch.distributed.is_initialized():  # else there is none yet
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel):
            replicas.notice(found, "module", found.module)

_set_state = DistributedDataParallel.__setstate__


def _notice_copy(self: DistributedDataParallel, state: Any) -> None:
    _set_state(self, state)  # type: ignore[no-untyped-call]
    replicas.notice(self, "module", self.module)


# A copy, or one that was unpickled, is made without a submodule being registered.
DistributedDataParallel.__setstate__ = _notice_copy  # type: ignore[method-assign]
