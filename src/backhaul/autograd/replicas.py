"""Replicas: modules under `DistributedDataParallel` and its kind, whose gradients several processes make together.

The reducer of DDP hangs on the `AccumulateGrad` nodes of the module's parameters, where it cannot be seen from Python.
It counts them in one run of torch's engine, starts to average a bucket of gradients when all of the bucket are in
``.grad``, and has the engine wait for all buckets at the end of the run. So all parameters of a replica have to be
in one run, and the run has to put their gradients into ``.grad``.

All processes have to average in the same order, too: a process group knows its operations by nothing else. So the
parameters of all replicas of a process are in one run, whose order is that of the forward pass.

Modules that are sharded, by `fully_shard` or `FullyShardedDataParallel`, work alike. The leaves of their graph are not
the parameters that the user knows: when gradients are in ``.grad`` of such a leaf, they are reduced, and each process
gets its part in ``.grad`` of its parameters.

To know the replicas, this module has torch tell it of modules that get a submodule, which costs nothing otherwise, and
looks at torch's list of those that `fully_shard` and the like were applied to.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from backhaul.compat import shard_groups
from backhaul.errors import MisuseError

_composed: Mapping[torch.nn.Module, Any] = {}
"""Modules that `fully_shard` and the like were applied to -> weak references to their states. Torch's own."""
if torch.distributed.is_available():
    from torch.distributed._composable_state import _module_state_mapping as _composed
_some_composed: Any = getattr(_composed, "data", _composed)
"""Not empty if there are some: quicker to look at than the mapping itself."""


class Replica(Protocol):
    """A module of which several processes have a copy, or a part, as far as its gradients go."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What the user knows as its parameters: their ``.grad`` is what comes of a run."""

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves of the graph that stand for the parameters."""

    @property
    def sums(self) -> bool:
        """Whether a run averages all that is in ``.grad``, also what passes before it have added."""

    @property
    def lends_memory(self) -> bool:
        """Whether ``.grad`` is a view of memory that the next pass will use again."""

    @property
    def scratch(self) -> list[torch.Tensor]:
        """Leaves that are no parameters, and whose ``.grad`` a run needs empty."""

    def check(self) -> None:
        """Raise if its gradients cannot be moved into a context."""


class Averaged:
    """A module under `DistributedDataParallel`."""

    sums = True
    scratch: list[torch.Tensor] = []  # noqa: RUF012 nobody adds to it

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.lends_memory: bool = wrapper.gradient_as_bucket_view

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """None if it is gone."""
        return self._wrapper()

    @property
    def parameters(self) -> list[torch.Tensor]:
        wrapper = self._wrapper()
        return [] if wrapper is None else [each for each in wrapper.parameters() if each.requires_grad]

    leaves = parameters

    def check(self) -> None: ...


class Flattened:
    """A module under `FullyShardedDataParallel`, the older of the two: its parameters are parts of a flat one.

    With ``use_orig_params`` the user knows the parameters, and the flat one is hidden.
    """

    sums = False
    lends_memory = False

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        handle = wrapper._handle
        flat = handle.flat_param
        hidden = bool(handle._use_orig_params)
        self.leaves: list[torch.Tensor] = [flat]
        self.scratch = [flat] if hidden else []
        self.parameters: list[torch.Tensor] = (
            [each for each in flat._params if each.requires_grad] if hidden else [flat]
        )

    def check(self) -> None:
        if not self._wrapper._sync_gradients:
            raise MisuseError(
                "no_sync() of FullyShardedDataParallel keeps gradients in .grad until the next pass: use "
                'accumulate="grad", or fully_shard with set_requires_gradient_sync(False)'
            )


class Sharded:
    """The modules under one root of `fully_shard`, or of a `replicate` that is made like it.

    In the graph there are parameters that are gathered for a while. After a run the sharded ones have gradients.
    """

    sums = False
    lends_memory = False
    scratch: list[torch.Tensor] = []  # noqa: RUF012 nobody adds to it

    def __init__(self, states: Sequence[Any]) -> None:
        parts = [part for state in states for group in shard_groups(state) for part in group.fsdp_params]
        self.parameters: list[torch.Tensor] = [part.sharded_param for part in parts if part.sharded_param.requires_grad]
        self.leaves: list[torch.Tensor] = [
            part._unsharded_param for part in parts if getattr(part, "_unsharded_param", None) is not None
        ]

    def check(self) -> None: ...


_NONE: Mapping[int, Sequence[Replica]] = {}


class Replicas:
    """The replicas of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._any = False  # quicker to look at than the set
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._flattened: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._known: list[Averaged] = []
        self._by_leaf: dict[int, list[Replica]] = {}

    def notice(self, parent: torch.nn.Module, name: str, child: Any) -> None:
        """Called by torch for each module that becomes a part of another."""
        if name == "module" and isinstance(parent, DistributedDataParallel):
            with self._lock:
                self._any = True
                self._wrappers.add(parent)
        elif name == "_fsdp_wrapped_module" and hasattr(parent, "_handle"):
            with self._lock:
                self._any = True
                self._flattened.add(parent)

    def by_leaf(self) -> Mapping[int, Sequence[Replica]]:
        """The replicas of each leaf that is in one, by the leaf's id. A module can be wrapped more than once."""
        if not self._any and not _some_composed:
            return _NONE
        with self._lock:
            wrappers = [wrapper for wrapper in self._wrappers if hasattr(wrapper, "reducer")]
            if [replica.wrapper for replica in self._known] != wrappers:
                self._known = [Averaged(wrapper) for wrapper in wrappers]
                self._by_leaf = {}
                for replica in self._known:
                    _list(replica, self._by_leaf)
            # Those that shard make the leaves of the graph as they go.
            flattened = [wrapper for wrapper in self._flattened if getattr(wrapper, "_handle", None) is not None]
            roots = _sharded_roots()
            if not flattened and not roots:
                return self._by_leaf
            found = {leaf: list(replicas) for leaf, replicas in self._by_leaf.items()}
            for wrapper in flattened:
                _list(Flattened(wrapper), found)
            for states in roots:
                _list(Sharded(states), found)
            return found

    def of(self, leaves: Iterable[torch.Tensor]) -> list[Replica]:
        """The replicas that have some of these leaves."""
        by_leaf = self.by_leaf()
        if not by_leaf:
            return []
        return list(dict.fromkeys(replica for leaf in leaves for replica in by_leaf.get(id(leaf), ())))

    def is_joint(self) -> Callable[[torch.Tensor], bool] | None:
        """Tells whether processes work together on the gradient of a leaf; None if there is no such leaf.

        Those of replicas, and `DTensor`s, as tensor parallelism makes them.
        """
        by_leaf = self.by_leaf()
        tensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        if tensor is None:
            return (lambda leaf: id(leaf) in by_leaf) if by_leaf else None
        return lambda leaf: isinstance(leaf, tensor) or id(leaf) in by_leaf


def _list(replica: Replica, by_leaf: dict[int, list[Replica]]) -> None:
    for leaf in replica.leaves:
        by_leaf.setdefault(id(leaf), []).append(replica)


def _sharded_roots() -> list[Sequence[Any]]:
    """The states of `fully_shard` in this process, those of each root together."""
    if not _some_composed:
        return []
    roots: dict[int, Sequence[Any]] = {}
    for reference in list(_composed.values()):
        state = reference()
        context = getattr(state, "_state_ctx", None)
        if context is not None:
            roots[id(context)] = context.all_states
    return [states for states in roots.values() if states]


# Of the process: modules belong to no worker, and process groups order their work by process.
replicas = Replicas()
register_module_module_registration_hook(replicas.notice)
if torch.distributed.is_available() and torch.distributed.is_initialized():  # else there is none yet
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel):
            replicas.notice(found, "module", found.module)
        elif issubclass(type(found), torch.nn.Module) and "_fsdp_wrapped_module" in found._modules:
            replicas.notice(found, "_fsdp_wrapped_module", None)

_set_state = DistributedDataParallel.__setstate__


def _notice_copy(self: DistributedDataParallel, state: Any) -> None:
    _set_state(self, state)  # type: ignore[no-untyped-call]
    replicas.notice(self, "module", self.module)


# A copy, or one that was unpickled, is made without a submodule being registered.
DistributedDataParallel.__setstate__ = _notice_copy  # type: ignore[method-assign]
