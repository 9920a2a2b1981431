"""Puts our modules in the places of torch's: in ``sys.modules``, and in the packages that hold them.

Importing torch imports its own ``torch.distributed.rpc``, which must first be removed. That is
possible as long as only torch's own modules hold parts of it: those get ours instead. Parts that another module has
imported cannot be replaced; then it is too late.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, get_origin

from backhaul.dropin.children import tell_children
from backhaul.errors import MisuseError

_RPC = "torch.distributed.rpc"
_OURS = {
    _RPC: "backhaul.dropin.rpc",
    f"{_RPC}.api": "backhaul.dropin.rpc.api",
    f"{_RPC}.backend_registry": "backhaul.dropin.rpc.backend_registry",
    f"{_RPC}.constants": "backhaul.dropin.rpc.constants",
    f"{_RPC}.functions": "backhaul.dropin.rpc.functions",
    f"{_RPC}.internal": "backhaul.dropin.rpc.internal",
    f"{_RPC}.options": "backhaul.dropin.rpc.options",
    f"{_RPC}.rref_proxy": "backhaul.dropin.rpc.rref_proxy",
    f"{_RPC}.server_process_global_profiler": "backhaul.dropin.rpc.server_process_global_profiler",
    f"{_RPC}._testing": "backhaul.dropin.rpc._testing",
    f"{_RPC}._testing.faulty_agent_backend_registry": "backhaul.dropin.rpc._testing.faulty_agent_backend_registry",
    "torch.distributed.autograd": "backhaul.dropin.autograd",
    "torch._C._distributed_rpc": "backhaul.dropin.rpc",
    "torch._C._distributed_rpc_testing": "backhaul.dropin.rpc._testing",
    "torch._C._distributed_autograd": "backhaul.dropin.autograd",
    "torch.distributed.optim.optimizer": "backhaul.dropin.optimizer",
    "torch.distributed.nn.api.remote_module": "backhaul.dropin.remote_module",
}
"""Torch's module -> ours. Libraries also ask torch's C++ part whether RPC runs, and whether a value is an RRef."""

_MEMBERS = {
    "torch.distributed.optim": ("DistributedOptimizer", "torch.distributed.optim.optimizer"),
    "torch.distributed.nn": ("RemoteModule", "torch.distributed.nn.api.remote_module"),
    "torch.distributed.nn.api": None,
}
"""Packages of torch with a module of ours -> its public names. Not imported here: that may take seconds."""

_installed = False  # global to the process, like ``sys.modules``


def is_installed() -> bool:
    """Whether `install` has been called in this process, or in its parent."""
    return _installed


def install() -> None:
    """Put Backhaul behind torch's names: its RPC, distributed autograd, `DistributedOptimizer` and `RemoteModule`.

    From now on, every import of these names gets ours: also in processes that ``multiprocessing`` or `backhaul.cluster`
    starts from here, and also if this torch was built without RPC. Calling it again changes nothing. Call it before
    other threads import anything.

    Raises `MisuseError`, and changes nothing, if it is too late: a module has already imported torch's own names, or
    torch's RPC runs.
    """
    global _installed
    if _installed:
        return
    importlib.import_module("torch.distributed")  # which also imports torch's own RPC, if there is one
    old = {name: sys.modules[name] for name in _OURS if name in sys.modules}
    _require_in_time(old)
    ours = {name: importlib.import_module(module) for name, module in _OURS.items()}
    for name in [name for name in sys.modules if name.startswith(f"{_RPC}.")]:
        del sys.modules[name]
    sys.modules.update((name, module) for name, module in ours.items() if name.startswith(f"{_RPC}."))
    for package in ("torch.distributed", "torch._C", *_MEMBERS):
        if package in sys.modules:
            _fill(sys.modules[package])
    _tell_torch(old, ours)
    sys.meta_path.insert(0, _Finder())
    tell_children()
    importlib.import_module("backhaul.dropin.futures").adopt()
    importlib.import_module("backhaul.dropin.rpc.rrefs").adopt()
    importlib.import_module("backhaul.dropin.torchscript").adopt()
    _installed = True


def _require_in_time(old: dict[str, ModuleType]) -> None:
    rpc: Any = old.get(_RPC)
    if rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", bool)():
        raise MisuseError(
            "it is too late for backhaul.dropin.install(): torch's own RPC runs in this process, since init_rpc was "
            "called. Call install() first, or start the program with `python -m backhaul.dropin script.py`"
        )
    late = sorted(set(_holders(old)))
    if late:
        shown = ", ".join(late[:5]) + (f" and {len(late) - 5} more" if len(late) > 5 else "")
        raise MisuseError(
            f"it is too late for backhaul.dropin.install(): {shown} already came from torch.distributed and "
            "would stay torch's own. Call install() before importing those modules, best in the first lines of the "
            "program, or start it with `python -m backhaul.dropin script.py`"
        )


def _holders(old: dict[str, ModuleType]) -> Iterator[str]:
    """The names, outside torch, that are bound to these modules, their definitions, or classes derived from those."""
    torchs = {id(module) for module in old.values()}
    for module in old.values():
        for value in vars(module).values():
            if callable(value) and getattr(value, "__module__", None) in _OURS:
                torchs.add(id(value))
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "torchgen", "backhaul") or not isinstance(module, ModuleType):
            continue
        if name.startswith("_remote_module_"):  # torch generates such modules for its own use
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in torchs:
                yield f"{name}.{attribute}"
            elif issubclass(type(value), type) and vars(value).get("__module__") == name:
                inside = [key for key, each in vars(value).items() if id(each) in torchs]
                yield from (f"{name}.{attribute}.{key}" for key in inside)
                if any(id(base) in torchs for base in value.__mro__):
                    yield f"{name}.{attribute}"


def _fill(package: ModuleType) -> None:
    """Give a package our modules and their public names."""
    for name, source in _OURS.items():
        holder, _, last = name.rpartition(".")
        if holder == package.__name__:
            sys.modules[name] = importlib.import_module(source)
            setattr(package, last, sys.modules[name])
    member = _MEMBERS.get(package.__name__)
    if member is not None:
        setattr(package, member[0], getattr(importlib.import_module(_OURS[member[1]]), member[0]))


def _tell_torch(old: dict[str, ModuleType], ours: dict[str, ModuleType]) -> None:
    """Give ours to the other modules of torch that hold parts of torch's own.

    They check whether values are RRefs: DDP checks a module's output, the TorchScript compiler checks annotations.
    """
    new: dict[int, Any] = {id(module): ours[name] for name, module in old.items()}
    for name, module in old.items():
        for attribute, value in vars(module).items():
            if getattr(value, "__module__", None) in _OURS and hasattr(ours[name], attribute):
                new[id(value)] = getattr(ours[name], attribute)
    for name, each in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(each, ModuleType):
            for attribute, value in list(vars(each).items()):
                if id(value) in new:
                    setattr(each, attribute, new[id(value)])

    # In a torch without RPC these modules never checked for RRefs, and do so from now on.
    rref = ours[_RPC].RRef
    lacking = {"RRef": rref, "is_rref": lambda annotation: get_origin(annotation) is rref}
    for name in ("torch._jit_internal", "torch.jit.annotations", "torch.nn.parallel.distributed"):
        if name in sys.modules:
            for attribute, value in lacking.items():
                vars(sys.modules[name]).setdefault(attribute, value)
    ddp: Any = sys.modules.get("torch.nn.parallel.distributed")
    if ddp is not None:
        ddp.RPC_AVAILABLE = True


class _Finder(importlib.abc.MetaPathFinder):
    """Completes torch's packages at import, and refuses torch modules that ours do not replace."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _OURS:
            return ModuleSpec(name, _Ours())
        if name.startswith(f"{_RPC}."):
            raise ModuleNotFoundError(
                f"there is no {name} in this process: backhaul.dropin replaces torch.distributed here, and has no "
                "such module",
                name=name,
            )
        if name not in _MEMBERS:
            return None
        found = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next((each for each in found if each is not None), None)
        if spec is None:  # this version of torch has no such package
            return ModuleSpec(name, _Nothing(), is_package=True)
        _when_loaded(spec, _fill)
        return spec


class _Ours(importlib.abc.Loader):
    """Loads a module by putting ours in its place."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_OURS[module.__name__])


class _Nothing(importlib.abc.Loader):
    """Loads a package that contains only ours."""

    def exec_module(self, module: ModuleType) -> None:
        _fill(module)


def _when_loaded(spec: ModuleSpec, act: Callable[[ModuleType], None]) -> None:
    loader: Any = spec.loader
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        act(module)

    loader.exec_module = exec_module
