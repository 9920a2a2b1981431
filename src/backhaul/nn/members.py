"""The parameters and buffers of a model that is spread over workers, in the order of the same model in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from backhaul import rpc
from backhaul.compat import asked_by_compiler
from backhaul.errors import OptionError
from backhaul.rpc import Future, RRef

Kind = Literal["parameters", "buffers"]


class Member(NamedTuple):
    """A parameter or a buffer. ``key`` is unique in the group as long as ``rref`` is held."""

    name: str
    key: tuple[int, int]
    rref: Any
    """An `RRef`, or a `parties.PartyParameters`, which stands for all parameters of a federation's party."""


@runtime_checkable
class Elsewhere(Protocol):
    """A module whose parameters and buffers are on another worker."""

    def _ask_for_members(self, kind: Kind, prefix: str, recurse: bool, remove_duplicate: bool) -> Future[list[Member]]:
        """A future of what `members` returns on that worker."""


def members(
    modules: Iterable[tuple[str, nn.Module]], kind: Kind, recurse: bool = True, remove_duplicate: bool = True
) -> list[Member]:
    """All parameters, or all buffers, of the modules, in the order in which torch lists them.

    ``modules`` are pairs of a prefix for names and a module. All workers that hold parts of the modules are asked at
    the same time. Raises what a worker's answer raises.
    """
    rrefs: dict[int, RRef[Any]] = {}
    here = rpc.get_worker_info().id
    found: list[list[Member] | Future[list[Member]]] = []
    seen: set[nn.Module] = set()
    for prefix, module in modules:
        inside = module.named_modules(seen, prefix, remove_duplicate) if recurse else [(prefix, module)]
        for name, part in inside:
            if isinstance(part, Elsewhere):
                found.append(part._ask_for_members(kind, name, recurse, remove_duplicate))
                continue
            own = part.named_parameters if kind == "parameters" else part.named_buffers
            found.append(
                [
                    Member(full, (here, id(value)), rrefs.setdefault(id(value), RRef(value)))
                    for full, value in own(prefix=name, recurse=False, remove_duplicate=False)
                ]
            )
    listed = [member for part in found for member in (part.wait() if isinstance(part, Future) else part)]
    if not remove_duplicate:
        return listed
    first: dict[tuple[int, int], Member] = {}
    for member in listed:
        first.setdefault(member.key, member)
    return list(first.values())


class Spread(nn.Module):
    """A module whose parameters and buffers are on other workers. It lists them as references."""

    def _list(self, kind: Kind, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, RRef[Any]]]:
        raise NotImplementedError

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[nn.Parameter]]]:
        return self._list("parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[RRef[nn.Parameter]]:  # type: ignore[override]
        if asked_by_compiler():
            return iter(())
        return (rref for _, rref in self.named_parameters(recurse=recurse))

    def named_buffers(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[torch.Tensor]]]:
        return self._list("buffers", prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[RRef[torch.Tensor]]:  # type: ignore[override]
        if asked_by_compiler():
            return iter(())
        return (rref for _, rref in self.named_buffers(recurse=recurse))


def parameter_rrefs(*modules: nn.Module) -> list[RRef[nn.Parameter]]:
    """References to all parameters of the modules, which may be local, remote, or local with remote modules in them.

    They come in the order in which the same model in one process lists its ``parameters()``, and a shared parameter
    comes once. Give them to `backhaul.optim.DistributedOptimizer`.
    """
    for module in modules:
        if not isinstance(module, nn.Module):
            raise OptionError(f"parameter_rrefs takes modules, as in parameter_rrefs(encoder, decoder), not {module!r}")
    return [member.rref for member in members([("", module) for module in modules], "parameters")]
