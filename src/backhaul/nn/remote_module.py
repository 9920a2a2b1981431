"""RemoteModule: an nn.Module whose module lives on a worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from backhaul import rpc
from backhaul.devices.host import on_cpu
from backhaul.eager import eager
from backhaul.errors import MisuseError, OptionError, UnsendableError
from backhaul.nn import parties, served
from backhaul.nn.conversion import conversion_of
from backhaul.nn.device import devices_mapped, place
from backhaul.nn.hooks import RemoteHandle
from backhaul.nn.members import Kind, Member, Spread
from backhaul.nn.modes import Modes
from backhaul.nn.state import Loading, metadata_within
from backhaul.rpc import Future, RRef

Self = TypeVar("Self", bound="RemoteModule")

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


class RemoteModule(Spread):
    """A module that a worker makes, keeps and runs. The worker may be this one.

    ``remote_device`` names the place: ``"worker1/cpu"``, ``"worker1"``, ``"rank:1/cuda:0"``. There the worker calls
    ``module_cls(*args, **kwargs)``, an ``nn.Module`` class or a function that returns an ``nn.Module``. The constructor
    returns when the module exists, and raises what ``module_cls`` raised.

    A RemoteModule can be sent in calls and be part of other modules; the module itself stays on its worker, its owner.
    Each method is one call to the owner. Methods that return parameters or buffers in ``nn.Module`` return references
    to them here. Call the module's own methods as ``m.get_module_rref().rpc_sync().method(x)``.

    Inside a local module, it takes part in the parent's ``state_dict``, ``load_state_dict``, ``train``, ``eval``,
    ``apply`` and conversions such as ``half``. It takes no part in the parent's ``parameters``, ``requires_grad_`` and
    ``zero_grad``, which only see tensors of this process. Use `parameter_rrefs` and the methods of this class instead.

    In a federation ``module_cls`` is a `backhaul.federation.Party` that the worker exposes, or an exposed function that
    returns a party. The worker has filled the party with a module of its own, and does with the module only what the
    party offers.
    """

    on: str
    """The name of the worker."""
    device: str
    """The device on that worker."""
    module_rref: RRef[nn.Module]
    is_scriptable: bool

    _is_party = False  # the default until _adopt sets it, and for instances made without __init__

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        worker, device = place(remote_device)
        _check_recipe(module_cls, args, kwargs)
        if parties.in_federation():
            self._adopt(*parties.create(worker, module_cls, args or (), kwargs or {}, device), is_party=True)
            return
        recipe = (module_cls, tuple(args or ()), dict(kwargs or {}), device)
        self._adopt(*rpc.rpc_sync(worker, served.create, args=recipe))

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        """Another RemoteModule for an existing module. ``remote_device`` must name the worker that has the module."""
        worker, device = place(remote_device)
        if not isinstance(module_rref, RRef):
            raise OptionError(f"module_rref must be an RRef to an nn.Module, not {module_rref!r}")
        if module_rref.owner() != worker:
            raise OptionError(
                f"remote_device is {remote_device!r}, but the module is on {module_rref.owner_name()!r}: name that "
                "worker"
            )
        self = _blank(cls)
        if parties.in_federation():
            self._adopt(module_rref, parties.describe(module_rref), is_party=True)
            return self
        self._adopt(module_rref, rpc.rpc_sync(worker, served.describe, args=(module_rref, device)))
        return self

    def _adopt(self, rref: RRef[nn.Module], portrait: served.Portrait, *, is_party: bool = False) -> None:
        self.module_rref = rref
        self._is_party = is_party
        self.on = rref.owner_name()
        self.is_scriptable = False
        self._kind, self.training, self.device, self._key = portrait

    def _rpc_reduce(self) -> tuple[Any, ...]:
        """How a RemoteModule travels to another worker: the reference goes, the module stays."""
        state = {name: value for name, value in vars(self).items() if name not in _OF_EVERY_MODULE}
        return _blank, (type(self),), state

    def __reduce__(self) -> NoReturn:
        raise UnsendableError(
            "a RemoteModule can only be sent to other workers, in the arguments and results of calls: its module stays "
            "where it is. To save it, save its state_dict()"
        )

    def __copy__(self) -> RemoteModule:
        """Another RemoteModule for the same module."""
        made = _blank(type(self))
        made.__dict__.update({name: value for name, value in vars(self).items() if name not in _OF_EVERY_MODULE})
        return made

    def __deepcopy__(self, memo: dict[Any, Any]) -> RemoteModule:
        """A RemoteModule for a copy of the module, on the same worker."""
        made = memo[id(self)] = _blank(type(self))
        for name, value in vars(self).items():
            if name not in _OF_EVERY_MODULE and name != "module_rref":
                made.__dict__[name] = copy.deepcopy(value, memo)
        # RemoteModules that share a module also share one in the copy.
        same = (RemoteModule, self.module_rref.owner(), self._key)
        if same not in memo:
            memo[same] = self._there(served.duplicate, self.device)
        made._adopt(*memo[same])
        return made

    def __getattr__(self, name: str) -> Any:
        on = vars(self).get("on", "another worker")
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}. The module is on {on}: use get_parameter(name) "
            "and get_buffer(name) for its parameters and buffers, and get_module_rref().rpc_sync().method(...) for its "
            "methods"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module | nn.Parameter | nn.Buffer):
            self._refuse(f"setting {name!r}")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"{self._kind} on {self.on}/{self.device}"

    def get_module_rref(self) -> RRef[nn.Module]:
        """The reference to the module."""
        return self.module_rref

    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with its hooks, and return its result. Raises what the module raises."""
        return self._there(served.run, self.device, Modes.here(), args, kwargs, *self._mapped())

    @eager
    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future of what `forward` returns."""
        return self._there_async(served.run, self.device, Modes.here(), args, kwargs, *self._mapped())

    def _mapped(self) -> tuple[tuple[str, ...], ...]:
        """The argument ``mapped`` of `served.run`; left out if there are no mapped devices."""
        mapped = devices_mapped(self.on)
        return (mapped,) if mapped else ()

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the module's parameters, in the order of its ``parameters()``."""
        return [rref for _, rref in self.named_parameters(recurse=recurse)]

    def get_parameter(self, target: str) -> RRef[nn.Parameter]:  # type: ignore[override]
        return self._there(served.get_member, "get_parameter", target)  # type: ignore[no-any-return]

    def get_buffer(self, target: str) -> RRef[torch.Tensor]:  # type: ignore[override]
        return self._there(served.get_member, "get_buffer", target)  # type: ignore[no-any-return]

    def _list(self, kind: Kind, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, RRef[Any]]]:
        found = self._ask_for_members(kind, prefix, recurse, remove_duplicate).wait()
        return ((member.name, member.rref) for member in found)

    def _ask_for_members(self, kind: Kind, prefix: str, recurse: bool, remove_duplicate: bool) -> Future[list[Member]]:
        if self._is_party:
            found: Future[list[Member]] = Future()
            found.settle(parties.members_of(self.module_rref, self._key, kind, prefix))
            return found
        return self._there_async(served.list_members, kind, prefix, recurse, remove_duplicate)

    # nn.Module.state_dict and load_state_dict, of this module and of its parents, call the next two methods.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        entries, metadata = self._there(served.save_state, prefix, keep_vars)
        destination.update(entries)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(metadata)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        lists = (missing_keys, unexpected_keys, error_msgs)
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, *lists)
        loading = Loading(
            prefix,
            on_cpu({key: value for key, value in state_dict.items() if key.startswith(prefix)}),
            metadata_within(prefix, local_metadata),
            strict,
            *lists,
        )
        for mine, theirs in zip(lists, self._there(served.load_state, loading), strict=True):
            mine[:] = theirs

    def train(self: Self, mode: bool = True) -> Self:
        if isinstance(mode, bool):
            self._change("train", mode)
        return super().train(mode)  # sets self.training, and raises if mode is not a bool

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        return self._change("requires_grad_", requires_grad)

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the module's parameters. The gradients of a distributed context are not in ``.grad``."""
        self._change("zero_grad", set_to_none)

    def apply(self: Self, fn: Callable[[nn.Module], Any]) -> Self:
        """Call ``fn`` with each part of the module, on its worker. ``fn`` must be sendable: defined at module level."""
        return self._change("apply", fn)

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """As ``nn.Module.to``. A device means a device of the worker. A tensor stands for its dtype and device."""
        given: list[Any] = []
        for value in args:
            given += [value.device, value.dtype] if isinstance(value, torch.Tensor) else [value]
        for name in ("tensor", "other"):
            if isinstance(kwargs.get(name), torch.Tensor):
                tensor = kwargs.pop(name)
                kwargs = {**kwargs, "device": tensor.device, "dtype": tensor.dtype}
        return self._change("to", *given, **kwargs)

    def to_empty(self: Self, *, device: Any, recurse: bool = True) -> Self:
        return self._change("to_empty", device=device, recurse=recurse)

    def cpu(self: Self) -> Self:
        return self._change("cpu")

    def cuda(self: Self, device: Any = None) -> Self:
        """Move the module to a GPU of its worker."""
        return self._change("cuda", device)

    def xpu(self: Self, device: Any = None) -> Self:
        return self._change("xpu", device)

    def type(self: Self, dst_type: Any) -> Self:
        return self._change("type", dst_type)

    def half(self: Self) -> Self:
        return self._change("half")

    def bfloat16(self: Self) -> Self:
        return self._change("bfloat16")

    def float(self: Self) -> Self:
        return self._change("float")

    def double(self: Self) -> Self:
        return self._change("double")

    def _apply(self: Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Convert the module as ``fn`` converts tensors. ``half``, ``to`` and others of a parent call this on children.

        ``fn`` cannot be sent. So it is tried on tensors here, and the same changes of dtypes and memory formats are
        made to the module. The module stays on its device, since ``fn`` names devices of this process.
        """
        conversion = conversion_of(fn)
        if any(conversion):
            self._there(served.convert, conversion)
        return self

    def register_forward_pre_hook(  # type: ignore[override]
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemoteHandle:
        """As on a local module; ``hook`` runs on the worker with the module itself, and has to be sendable."""
        return self._hook("register_forward_pre_hook", hook, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(  # type: ignore[override]
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False, always_call: bool = False
    ) -> RemoteHandle:
        """As on a local module; ``hook`` runs on the worker with the module itself, and has to be sendable."""
        options = {"prepend": prepend, "with_kwargs": with_kwargs, "always_call": always_call}
        return self._hook("register_forward_hook", hook, **options)

    def register_full_backward_pre_hook(  # type: ignore[override]
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemoteHandle:
        """As on a local module; ``hook`` runs on the worker with the module itself, and has to be sendable."""
        return self._hook("register_full_backward_pre_hook", hook, prepend=prepend)

    def register_full_backward_hook(  # type: ignore[override]
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemoteHandle:
        """As on a local module; ``hook`` runs on the worker with the module itself, and has to be sendable."""
        return self._hook("register_full_backward_hook", hook, prepend=prepend)

    def register_backward_hook(self, hook: Callable[..., Any]) -> NoReturn:
        raise MisuseError("register_backward_hook is not for a RemoteModule: use register_full_backward_hook")

    def register_parameter(self, name: str, param: Any) -> None:
        self._refuse("register_parameter")

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        self._refuse("register_buffer")

    def add_module(self, name: str, module: Any) -> None:
        self._refuse("add_module")

    def register_module(self, name: str, module: Any) -> None:
        self._refuse("register_module")

    def share_memory(self: Self) -> Self:
        raise MisuseError(
            "share_memory is not for a RemoteModule: send the RemoteModule to another worker, and both use one module"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise MisuseError(
            f"{what} is not possible on a RemoteModule, which has no parameters, buffers or modules of its own: do "
            "that in module_cls, or in a function that you call on the worker with get_module_rref()"
        )

    def _hook(self, method: str, hook: Callable[..., Any], **options: bool) -> RemoteHandle:
        return RemoteHandle(self._there(served.register_hook, method, hook, options))

    def _change(self: Self, method: str, *args: Any, **kwargs: Any) -> Self:
        portrait = self._there(served.change, self.device, method, args, kwargs)
        self._adopt(self.module_rref, portrait, is_party=self._is_party)
        return self

    def _there(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of `served` on the owner, with the module as its first argument."""
        rref = self.module_rref
        if self._is_party:
            return parties.ask(rref, function, args)
        return rpc.rpc_sync(rref.owner(), function, args=(rref, *args))

    def _there_async(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        rref = self.module_rref
        if self._is_party:
            return parties.ask_async(rref, function, args)
        return rpc.rpc_async(rref.owner(), function, args=(rref, *args))


def _blank(cls: type[RemoteModule]) -> RemoteModule:
    """A RemoteModule that has no module yet."""
    self = cls.__new__(cls)
    nn.Module.__init__(self)
    return self


def _check_recipe(module_cls: Any, args: Any, kwargs: Any) -> None:
    if isinstance(module_cls, nn.Module):
        raise OptionError(
            f"module_cls is a {type(module_cls).__name__}, not a class: give the class and its arguments, and the "
            "worker makes the module. To send a copy of this one, give a function that returns its argument"
        )
    if not callable(module_cls):
        raise OptionError(
            f"module_cls must be an nn.Module class, or a function that returns an nn.Module, not {module_cls!r}"
        )
    if args is not None and not isinstance(args, tuple | list):
        raise OptionError(f"args must be a tuple, as in args=(20, 30), not a {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError(f"kwargs must be a dict, not a {type(kwargs).__name__}")
