"""Replicas: modules under `DistributedDataParallel` and similar wrappers, whose gradients several processes compute.

The reducer of DDP is attached to the `AccumulateGrad` nodes of the module's parameters, where Python cannot see it. It
counts these nodes in one run of torch's engine. It starts to average a bucket when all gradients of the bucket are in
``.grad``, and makes the engine wait for all buckets at the end of the run. So all parameters of a replica must be in
one run, and the run must put their gradients into ``.grad``.

All processes must also average in the same order, since a process group matches operations by their order alone. So the
parameters of all replicas of a process are in one run, in the order of the forward pass.

Modules that are sharded, by `fully_shard` or `FullyShardedDataParallel`, work in a similar way. The leaves of their
graph are not the parameters that the user sees. When gradients are in ``.grad`` of such a leaf, they are reduced, and
each process gets its part in ``.grad`` of its parameters.

To find the replicas, this module registers torch's hook for modules that get a submodule, which costs nothing
otherwise, and reads torch's list of the modules that `fully_shard` and similar functions were applied to.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from backhaul.compat import shard_groups
from backhaul.errors import MisuseError

_composed: Mapping[torch.nn.Module, Any] = {}
"""Modules that `fully_shard` and similar functions were applied to -> weak references to states. Torch owns it."""
if torch.distributed.is_available():
    from torch.distributed._composable_state import _module_state_mapping as _composed
_some_composed: Any = getattr(_composed, "data", _composed)
"""Not empty if there are such modules: quicker to test than the mapping itself."""


class Replica(Protocol):
    """A module of which several processes have a copy or a part: what autograd needs to know of it."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the user sees. After a run, their gradients are in ``.grad``."""

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves of the graph that stand for the parameters."""

    @property
    def sums(self) -> bool:
        """Whether a run averages all of ``.grad``, including what earlier passes have added."""

    @property
    def lends_memory(self) -> bool:
        """Whether ``.grad`` is a view of memory that the next pass will use again."""

    @property
    def scratch(self) -> list[torch.Tensor]:
        """Leaves that are not parameters, and whose ``.grad`` must be empty before a run."""

    def check(self) -> None:
        """Raise `MisuseError` if its gradients cannot be moved into a context."""


class Averaged:
    """A module under `DistributedDataParallel`."""

    sums = True
    scratch: list[torch.Tensor] = []  # noqa: RUF012 never changed

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.lends_memory: bool = wrapper.gradient_as_bucket_view

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """The DDP module; None if it was freed."""
        return self._wrapper()

    @property
    def parameters(self) -> list[torch.Tensor]:
        wrapper = self._wrapper()
        return [] if wrapper is None else [each for each in wrapper.parameters() if each.requires_grad]

    leaves = parameters

    def check(self) -> None: ...


class Flattened:
    """A module under `FullyShardedDataParallel`, the older API: its parameters are parts of one flat parameter.

    With ``use_orig_params`` the user sees the original parameters, and the flat one is hidden.
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
    """The modules under one root of `fully_shard`, or of a `replicate` that is built in the same way.

    The graph has temporary, gathered parameters. After a run the sharded parameters have gradients.
    """

    sums = False
    lends_memory = False
    scratch: list[torch.Tensor] = []  # noqa: RUF012 never changed

    def __init__(self, states: Sequence[Any]) -> None:
        parts = [part for state in states for group in shard_groups(state) for part in group.fsdp_params]
        self.parameters: list[torch.Tensor] = [part.sharded_param for part in parts if part.sharded_param.requires_grad]
        self.leaves: list[torch.Tensor] = [
            part._unsharded_param for part in parts if getattr(part, "_unsharded_param", None) is not None
        ]

    def check(self) -> None: ...


_NONE: Mapping[int, Sequence[Replica]] = {}
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class Replicas:
    """The replicas of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._any = False  # quicker to test than the sets
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._flattened: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._known: list[Averaged] = []
        self._by_leaf: dict[int, list[Replica]] = {}

    def notice(self, parent: torch.nn.Module, name: str, child: Any) -> None:
        """Note a replica. Torch calls this for each module that becomes a submodule of another."""
        if name == "module" and isinstance(parent, DistributedDataParallel):
            with self._lock:
                self._any = True
                self._wrappers.add(parent)
        elif name == "_fsdp_wrapped_module" and hasattr(parent, "_handle"):
            with self._lock:
                self._any = True
                self._flattened.add(parent)

    def by_leaf(self) -> Mapping[int, Sequence[Replica]]:
        """The replicas that contain each leaf, by the leaf's id. A module can be wrapped more than once."""
        if not self._any and not _some_composed:
            return _NONE
        with self._lock:
            wrappers = [wrapper for wrapper in self._wrappers if hasattr(wrapper, "reducer")]
            if [replica.wrapper for replica in self._known] != wrappers:
                self._known = [Averaged(wrapper) for wrapper in wrappers]
                self._by_leaf = {}
                for replica in self._known:
                    _list(replica, self._by_leaf)
            # Sharded modules create the leaves of the graph during the forward pass, so they are listed every time.
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
        """The replicas that contain any of these leaves."""
        by_leaf = self.by_leaf()
        if not by_leaf:
            return []
        return list(dict.fromkeys(replica for leaf in leaves for replica in by_leaf.get(id(leaf), ())))

    def joint_among(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Those of these leaves whose gradients several processes compute together.

        They are the leaves of replicas, and `DTensor`s, which tensor parallelism makes.
        """
        if not self._any and not _some_composed and _PLAIN.issuperset(map(type, leaves)):
            return ()
        by_leaf = self.by_leaf()
        tensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        return [leaf for leaf in leaves if id(leaf) in by_leaf or isinstance(leaf, tensor)]


def _list(replica: Replica, by_leaf: dict[int, list[Replica]]) -> None:
    for leaf in replica.leaves:
        by_leaf.setdefault(id(leaf), []).append(replica)


def _sharded_roots() -> list[Sequence[Any]]:
    """The states of `fully_shard` in this process, grouped by root."""
    if not _some_composed:
        return []
    roots: dict[int, Sequence[Any]] = {}
    for reference in list(_composed.values()):
        state = reference()
        context = getattr(state, "_state_ctx", None)
        if context is not None:
            roots[id(context)] = context.all_states
    return [states for states in roots.values() if states]


# Global to the process: modules belong to no worker, and process groups order their work by process.
replicas = Replicas()
register_module_module_registration_hook(replicas.notice)
if torch.distributed.is_available() and torch.distributed.is_initialized():  # otherwise there are no replicas yet
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel):
            replicas.notice(found, "module", found.module)
        elif issubclass(type(found), torch.nn.Module) and "_fsdp_wrapped_module" in found._modules:
            replicas.notice(found, "_fsdp_wrapped_module", None)

_set_state = DistributedDataParallel.__setstate__


def _notice_copy(self: DistributedDataParallel, state: Any) -> None:
    _set_state(self, state)  # type: ignore[no-untyped-call]
    replicas.notice(self, "module", self.module)


# A copied or unpickled module does not register its submodule, so the hook above does not see it.
DistributedDataParallel.__setstate__ = _notice_copy  # type: ignore[method-assign]
