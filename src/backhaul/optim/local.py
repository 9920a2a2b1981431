"""LocalOptimizer: the optimizer of the parameters on one worker, and the functions that other workers call on it."""

from __future__ import annotations

import inspect
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from backhaul.devices.host import on_cpu
from backhaul.errors import MisuseError, OptionError
from backhaul.optim import gradients, steps
from backhaul.optim.claims import claims
from backhaul.optim.entries import Change, Entries, apply, change, copied, entries_of
from backhaul.optim.groups import GroupPart
from backhaul.refs.rref import RRef

Changes = dict[int, Change]
"""Changes of groups, by the number of the group."""

News = Changes | Literal[False] | None
"""The changes that a step made to the entries, or None; False if the context had no gradient for the step."""


_ID_BITS = 62
# By random number. Global to the process, because its workers may share parameters, and so optimizers.
_here: weakref.WeakValueDictionary[int, LocalOptimizer] = weakref.WeakValueDictionary()


def require_no_closure(step: Any, whose: str, is_method: bool = False) -> None:
    """Raise `OptionError` if ``step`` needs arguments, such as a closure. ``is_method``: it is not bound yet."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return
    if parameters and (is_method or parameters[0].name == "self"):  # a step that a scheduler wrapped looks unbound
        del parameters[0]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
    if needed:
        raise OptionError(
            f"{whose} needs arguments for its step ({', '.join(needed)}), such as a closure that computes the loss "
            "again. A step on several workers has none: use an optimizer whose step() needs no arguments"
        )


class LocalOptimizer:
    """The optimizer of the parameters on one worker. Other workers call it through the functions below. Thread-safe.

    ``optimizer`` is the user's. Its parameter groups are parts of the groups of the `DistributedOptimizer`, which are
    numbered.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        parts: Sequence[GroupPart],
        as_groups: bool,
        args: Sequence[Any],
        kwargs: Entries,
    ) -> None:
        self.id = secrets.randbits(_ID_BITS)
        """Holders of a reference call `step` by this id: a reference in every step would cost as much as the step."""
        _here[self.id] = self
        self.params: list[torch.Tensor] = []
        self._numbers: list[int] = []
        self._sizes: list[int] = []
        given = []
        for part in parts:
            params = self._checked(part)
            self._note(part.number, params)
            given.append(_as_group(part, params))
        with self._claimed():
            self.optimizer = make(given if as_groups else given[0]["params"], *args, **kwargs)
        if not callable(getattr(self.optimizer, "step", None)):
            raise OptionError(
                f"{make!r} returned a {type(self.optimizer).__name__!r}, which has no step(): give an optimizer class"
            )
        require_no_closure(self.optimizer.step, type(self.optimizer).__name__)
        self._given = {part.number: entries_of(part.entries) for part in parts}
        self._known = self.entries()

    def _checked(self, part: GroupPart) -> list[torch.Tensor]:
        params: list[torch.Tensor] = []
        seen = set(map(id, self.params))
        for rref in part.params:
            param = rref.local_value()
            if not isinstance(param, torch.Tensor):
                raise OptionError(f"an optimizer takes references to parameters, not to {type(param).__name__}")
            if id(param) in seen:
                raise OptionError(
                    f"a parameter of shape {list(param.shape)} is given twice, in one group or in two: give it once"
                )
            seen.add(id(param))
            params.append(param)
        return params

    def _note(self, number: int, params: Sequence[torch.Tensor]) -> None:
        self.params.extend(params)
        self._numbers.append(number)
        self._sizes.append(len(params))

    def _claimed(self, more: Sequence[torch.Tensor] = ()) -> AbstractContextManager[None]:
        return claims.on([self, *self.params, *more])

    @property
    def _groups(self) -> list[dict[str, Any]] | None:
        """The optimizer's groups; None if it has none, or others than it was given."""
        groups = getattr(self.optimizer, "param_groups", None)
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            return None
        params: list[Any] = []
        sizes = []
        for group in groups:
            before = len(params)
            params += group.get("params", ())
            sizes.append(len(params) - before)
        return groups if sizes == self._sizes and list(map(id, params)) == list(map(id, self.params)) else None

    def _require_groups(self, what: str) -> list[dict[str, Any]]:
        groups = self._groups
        if groups is None:
            raise MisuseError(
                f"{what} needs an optimizer whose param_groups are those that it was given, but "
                f"{type(self.optimizer).__name__} has none, or makes its own"
            )
        return groups

    def _require_method(self, name: str) -> Any:
        method = getattr(self.optimizer, name, None)
        if not callable(method):
            raise MisuseError(f"{type(self.optimizer).__name__} has no method {name}()")
        return method

    def entries(self) -> dict[int, Entries]:
        """The entries of the groups by number. If the optimizer does not show its groups, those that were given."""
        groups = self._groups
        if groups is None:
            return dict(self._given)
        return dict(zip(self._numbers, map(entries_of, groups), strict=True))

    def defaults(self) -> Entries:
        found = getattr(self.optimizer, "defaults", None)
        return copied(dict(found)) if isinstance(found, Mapping) else {}

    def step(self, context_id: int | None, changes: Changes | None, with_grad: bool) -> News:
        """Apply changes of entries, and step, with grad mode as the caller of the step has it.

        Returns the entries that the optimizer itself has changed.
        """
        with self._claimed():
            if changes:
                self._apply(changes)
            before = torch.is_grad_enabled()
            torch._C._set_grad_enabled(with_grad)
            try:
                with gradients.as_grad(self.params, context_id) as found:
                    steps.quickest(self.optimizer)()
            finally:
                torch._C._set_grad_enabled(before)
            return self._news() or (None if found else False)

    def _apply(self, changes: Changes) -> None:
        groups = self._require_groups("changing options of a parameter group")
        for number, each in changes.items():
            apply(each, groups[self._numbers.index(number)])
            apply(each, self._known[number])

    def _news(self) -> Changes | None:
        groups = self._groups
        if groups is None:
            return None
        found: Changes = {}
        for number, group in zip(self._numbers, groups, strict=True):
            news = change(self._known[number], group)
            if news is not None:
                apply(news, self._known[number])
                found[number] = news
        return found or None

    def zero_grad(self, set_to_none: bool) -> None:
        with self._claimed():
            if isinstance(self.optimizer, torch.optim.Optimizer):
                self.optimizer.zero_grad(set_to_none=set_to_none)
                return
            for param in self.params:
                if set_to_none or param.grad is None:
                    param.grad = None
                else:
                    param.grad = param.grad.detach().zero_()

    def accumulate(self, context_id: int) -> None:
        with self._claimed():
            gradients.add_to_grad(self.params, context_id)

    @torch.no_grad()
    def unscale(self, context_id: int | None, factor: torch.Tensor) -> float | None:
        """Multiply the gradients by ``factor``. Returns None if there are none, 0.0 if all were finite, else 1.0."""
        with self._claimed():
            found = gradients.gradients_of(self.params, context_id)
            if any(gradient is not None and gradient.dtype == torch.float16 for gradient in found):
                raise OptionError(
                    "float16 gradients cannot be unscaled: keep the parameters in float32, and compute with autocast"
                )
            if context_id is not None:  # other code may hold the same tensors
                found = [None if gradient is None else gradient.clone() for gradient in found]
            by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for gradient in found:
                if gradient is not None:
                    values = gradient._values() if gradient.is_sparse else gradient
                    by_kind.setdefault((values.device, values.dtype), []).append(values)
            worst = None
            for (device, _), values_of_kind in by_kind.items():
                bad = torch.zeros((), device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(values_of_kind, bad, factor.to(device))
                worst = max(worst or 0.0, bad.item())
            if context_id is not None:
                gradients.replace(self.params, found, context_id)
            return worst

    def add(self, part: GroupPart) -> Entries:
        """Add a group, in place of an earlier group of the same number. Returns its entries."""
        self.remove(part.number)
        params = self._checked(part)
        with self._claimed(params):
            groups = self._require_groups("add_param_group()")
            try:
                self._require_method("add_param_group")(_as_group(part, params))
            except BaseException:
                del groups[len(self._sizes) :]  # the optimizer may have added the group before it raised
                self._forget(params)
                raise
            self._note(part.number, params)
            self._given[part.number] = entries_of(part.entries)
            self._known[part.number] = self.entries()[part.number]
            return copied(self._known[part.number])  # type: ignore[no-any-return]

    def remove(self, number: int) -> None:
        """Remove a group, if it is there."""
        if number not in self._numbers:
            return
        with self._claimed():
            groups = self._require_groups("taking a parameter group back")
            place = self._numbers.index(number)
            start = sum(self._sizes[:place])
            end = start + self._sizes[place]
            self._forget(self.params[start:end])
            del groups[place], self._numbers[place], self._sizes[place], self.params[start:end]
            del self._known[number], self._given[number]

    def _forget(self, params: Sequence[torch.Tensor]) -> None:
        state = getattr(self.optimizer, "state", {})
        for param in params:
            state.pop(param, None)

    def export(self) -> tuple[list[Entries], dict[Any, Any]]:
        """Copies of the groups' entries and of the state by index, both in the order here, with tensors on the CPU.

        State that belongs to no parameter keeps its key. Raises `MisuseError` if the optimizer has no state to export.
        """
        with self._claimed():
            self._require_groups("state_dict()")
            found = self._require_method("state_dict")()
            if not isinstance(found, Mapping) or found.keys() != {"state", "param_groups"}:
                raise MisuseError(
                    f"the state_dict() of {type(self.optimizer).__name__} must have 'state' and 'param_groups' and "
                    "nothing else: only state of parameters and groups can be joined from several workers"
                )
            state = {key: copied(value) for key, value in found["state"].items()}
            return [entries_of(group) for group in found["param_groups"]], on_cpu(state)

    def load(self, groups: Sequence[Entries], state: Mapping[Any, Any]) -> dict[int, Entries]:
        """Load what an `export` with the same numbers of groups and parameters returned. Returns the new entries."""
        with self._claimed():
            self._require_groups("load_state_dict()")
            if len(groups) != len(self._sizes):
                raise OptionError(f"{len(groups)} parameter groups for an optimizer that has {len(self._sizes)}")
            indices = iter(range(len(self.params)))
            packed = [
                {**copied(dict(entries)), "params": [next(indices) for _ in range(size)]}
                for entries, size in zip(groups, self._sizes, strict=True)
            ]
            self._require_method("load_state_dict")({"state": copied(dict(state)), "param_groups": packed})
            self._known = self.entries()
            return copied(self._known)  # type: ignore[no-any-return]


def _as_group(part: GroupPart, params: list[torch.Tensor]) -> dict[str, Any]:
    given = params if part.names is None else list(zip(part.names, params, strict=True))
    return {**copied(part.entries), "params": given}


Made = tuple[RRef[LocalOptimizer], Entries, dict[int, Entries], int]


def make(optimizer_class: Any, parts: list[GroupPart], as_groups: bool, args: list[Any], kwargs: Entries) -> Made:
    """Make a local optimizer. Returns a reference to it, its defaults, its groups' entries by number, and its id."""
    local = LocalOptimizer(optimizer_class, parts, as_groups, args, kwargs)
    return RRef(local), local.defaults(), local.entries(), local.id


def step(id: int, context_id: int | None, changes: Changes | None, with_grad: bool) -> News:
    local = _here.get(id)
    if local is None:  # the caller of the step has stopped waiting, and has dropped its optimizer
        raise MisuseError("the optimizer of this step was deleted: its DistributedOptimizer is gone")
    return local.step(context_id, changes, with_grad)


def zero_grad(local: RRef[LocalOptimizer], set_to_none: bool) -> None:
    local.local_value().zero_grad(set_to_none)


def accumulate(local: RRef[LocalOptimizer], context_id: int) -> None:
    local.local_value().accumulate(context_id)


def unscale(local: RRef[LocalOptimizer], context_id: int | None, factor: torch.Tensor) -> float | None:
    return local.local_value().unscale(context_id, factor)


def add(local: RRef[LocalOptimizer], part: GroupPart) -> Entries:
    return local.local_value().add(part)


def remove(local: RRef[LocalOptimizer], number: int) -> None:
    local.local_value().remove(number)


def export(local: RRef[LocalOptimizer]) -> tuple[list[Entries], dict[Any, Any]]:
    return local.local_value().export()


def load(local: RRef[LocalOptimizer], groups: list[Entries], state: dict[Any, Any]) -> dict[int, Entries]:
    return local.local_value().load(groups, state)
