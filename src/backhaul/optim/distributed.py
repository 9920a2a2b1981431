"""DistributedOptimizer: one optimizer over parameters that live on any workers."""

from __future__ import annotations

import inspect
import logging
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch

from backhaul import compat, rpc
from backhaul.devices.host import on_cpu
from backhaul.eager import eager
from backhaul.errors import MisuseError, OptionError, PartialError, UnsendableError
from backhaul.ids import WorkerInfo
from backhaul.optim import gradients, local
from backhaul.optim.entries import OF_PARAMETERS, Entries, apply, change, copied, entries_of
from backhaul.optim.groups import Group, GroupPart, group_from, groups_from, require_alike, require_constants
from backhaul.optim.local import Changes, LocalOptimizer
from backhaul.optim.parties import Parties, parted, require_own, spread_with
from backhaul.optim.steps import hooked
from backhaul.refs.rref import RRef
from backhaul.spread import Work, spread

_log = logging.getLogger(__name__)


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer of parameters on any workers, with a local optimizer of ``optimizer_class`` on each worker.

    - ``optimizer_class``: a class of ``torch.optim``, or a callable with the same arguments that returns an object with
      ``step()``. It must be importable on the workers.
    - ``params_rref``: references to parameters, parameters of this worker, or parameter groups: dicts with these under
      ``params`` and options of the group. Their order is that of the indices in `state_dict`.
    - ``args`` and ``kwargs`` go to the constructor of the local optimizers.

    It is a ``torch.optim.Optimizer``: torch's schedulers work on its ``param_groups``, whose ``params`` are the
    references. A change of ``param_groups`` takes effect with the next step. ``state`` stays empty: the state is on the
    workers, and `state_dict` gathers it. Steps of optimizers that share parameters take turns.

    A party of a federation steps its own parameters with its own optimizer. There ``optimizer_class`` and its options,
    ``param_groups`` and `state_dict` concern only the parameters of this worker.

    Raises `PartialError` if a worker cannot make its local optimizer; then no worker keeps one.
    """

    def __init__(
        self, optimizer_class: Callable[..., Any], params_rref: Iterable[Any], *args: Any, **kwargs: Any
    ) -> None:
        _check_class(optimizer_class)
        require_constants({**{f"argument {place}": each for place, each in enumerate(args)}, **kwargs})
        params_rref, parties = parted(params_rref)
        groups, as_groups = groups_from(params_rref)
        require_own(groups)
        self._parties: Parties = parties
        self._make = partial(_make_work, optimizer_class, args=copied(list(args)), kwargs=copied(kwargs))
        self._name = _name_of(optimizer_class)
        self._locals: dict[WorkerInfo, RRef[LocalOptimizer]] = {}
        self._places: list[tuple[WorkerInfo, int]] = []
        self._homes: list[
            list[WorkerInfo]
        ] = []  # the workers of each group; param_groups shows the first one's entries
        self._known: list[Entries] = []  # the entries of each group as the workers have them
        self._sizes: dict[WorkerInfo, int] = {}
        self._joining = True  # torch's constructor adds the groups, which the workers have already

        first = next((param.owner() for group in groups for param in group.params), rpc.get_worker_info())
        parts = [group.parts(number, first) for number, group in enumerate(groups)]
        by_worker: dict[WorkerInfo, list[GroupPart]] = {}
        for worker, part in chain.from_iterable(each.items() for each in parts):
            by_worker.setdefault(worker, []).append(part)
        work = {worker: self._make(each, as_groups) for worker, each in by_worker.items()}
        made = spread(f"making the optimizer {self._name}", work)
        self._locals = {worker: rref for worker, (rref, _, _, _) in made.items()}
        self._ids = {worker: id for worker, (_, _, _, id) in made.items()}
        super().__init__(
            [
                self._adopt(group, list(part), made[next(iter(part))][2][number])
                for number, (group, part) in enumerate(zip(groups, parts, strict=True))
            ],
            next(iter(made.values()))[1],
        )
        self._joining = False

    def _adopt(self, group: Group, homes: list[WorkerInfo], entries: Entries) -> dict[str, Any]:
        """Note a group that the workers have. Returns its entry for ``param_groups``."""
        self._homes.append(homes)
        self._known.append(entries)
        for param in group.params:
            worker = param.owner()
            self._places.append((worker, self._sizes.setdefault(worker, 0)))
            self._sizes[worker] += 1
        names = {} if group.names is None else {"param_names": group.names}
        return {"params": group.params, **names, **entries_of(entries)}

    def __repr__(self) -> str:
        places = ", ".join(repr(worker.name) for worker in self._locals)
        parties = ", ".join(sorted({repr(party.owner_name()) for party in self._parties}))
        return f"{super().__repr__()} of {self._name} on {places}" + (f", and of parties {parties}" if parties else "")

    def __reduce__(self) -> NoReturn:
        raise UnsendableError(
            "a DistributedOptimizer cannot be sent, copied or pickled: make one where you need it, with the same "
            "references, or keep its state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__reduce__()

    @property
    def remote_optimizers(self) -> list[RRef[LocalOptimizer]]:
        """References to the local optimizers. Their ``optimizer`` is the one that ``optimizer_class`` made."""
        return list(self._locals.values())

    @hooked
    @eager
    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]
        """Step on all workers at once, with the gradients of an autograd context, or with ``.grad`` for None.

        Parameters without a gradient in the context are skipped, like those whose ``.grad`` is None. During the step
        ``.grad`` holds the gradient of the context, and afterwards its old value; so do not run passes that add to
        ``.grad`` of the same parameters at the same time.
        Raises `ContextError` if there is no such context, and `PartialError` if not all workers have stepped. The
        latter names the workers that have.
        """
        if callable(context_id):
            raise OptionError("step() takes the id of an autograd context, not a closure")
        gradients.require(context_id)
        changes = self._changes()
        with_grad = torch.is_grad_enabled()
        work = {
            worker: (local.step, (id, context_id, _of_worker(changes, worker, self._homes), with_grad))
            for worker, id in self._ids.items()
        }
        news = spread_with("the optimizer step", work, self._parties, "step", context_id)
        for number, each in changes.items():
            apply(each, self._known[number])
        for worker, found in news.items():
            self._learn(worker, found or {})
        if not any(found is not False for found in news.values()) and not self._parties:
            self._warn_of_nothing()

    def _warn_of_nothing(self) -> None:
        warnings.warn(
            f"step(context_id) has changed nothing: none of the {len(self._places)} parameters of this optimizer has a "
            "gradient in the context. Call backward(context_id, [loss]) first, and give the optimizer references to "
            "the parameters that the forward pass uses (backhaul.nn.parameter_rrefs(model)): not copies that a call "
            "has returned, nor parameters that were frozen, or replaced, as load_state_dict(assign=True) does",
            stacklevel=compat.level_of_the_user(),
        )

    def _changes(self) -> Changes:
        """The changes of ``param_groups`` that the workers do not have yet."""
        if len(self.param_groups) != len(self._known):
            raise MisuseError("param_groups itself was changed: use add_param_group(), which tells the workers")
        found = {number: change(self._known[number], group) for number, group in enumerate(self.param_groups)}
        return {number: each for number, each in found.items() if each is not None}

    def _learn(self, worker: WorkerInfo, news: Changes) -> None:
        """Show the options that a local optimizer has changed in ``param_groups``."""
        for number, each in news.items():
            if self._homes[number][0] == worker:
                apply(each, self._known[number])
                apply(each, self.param_groups[number])

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the parameters on all workers, or fill it with zeros."""
        work: dict[WorkerInfo, Work] = {
            worker: (local.zero_grad, (rref, set_to_none)) for worker, rref in self._locals.items()
        }
        spread_with("zero_grad()", work, self._parties, "zero_grad")

    def accumulate(self, context_id: int) -> None:
        """Add the gradients of a context to ``.grad`` on all workers, for a later `step` without a context.

        This sums the gradients of several contexts. A second call for the same context adds them a second time.
        """
        gradients.require(context_id)
        work: dict[WorkerInfo, Work] = {
            worker: (local.accumulate, (rref, context_id)) for worker, rref in self._locals.items()
        }
        spread_with("accumulating gradients", work, self._parties, "accumulate", context_id)

    def _everywhere(self, what: str, function: Callable[..., Any], *args: Any) -> dict[WorkerInfo, Any]:
        return spread(what, {worker: (function, (rref, *args)) for worker, rref in self._locals.items()})

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group in the form that the constructor takes, on all workers or, if it raises, on none."""
        if self._joining:
            self.param_groups.append(dict(param_group))
            return
        group = group_from(param_group)
        require_own([group])
        require_alike([group.names is not None, *("param_names" in each for each in self.param_groups)])
        number = len(self.param_groups)
        parts = group.parts(number, next(iter(self._locals)))
        work = {
            worker: (local.add, (self._locals[worker], part)) if worker in self._locals else self._make([part], True)
            for worker, part in parts.items()
        }
        try:
            added = spread("add_param_group()", work)
        except PartialError:
            self._take_back(number, parts)
            raise
        entries: list[Entries] = []
        for worker, value in added.items():
            if worker in self._locals:
                entries.append(value)
            else:
                self._locals[worker], self._ids[worker] = value[0], value[3]
                entries.append(value[2][number])
        self.param_groups.append(self._adopt(group, list(parts), entries[0]))

    def _take_back(self, number: int, workers: Iterable[WorkerInfo]) -> None:
        """Remove a group where it was added. A worker that does not answer is lost, or will replace the group later."""
        work: dict[WorkerInfo, Work] = {
            worker: (local.remove, (self._locals[worker], number)) for worker in workers if worker in self._locals
        }
        try:
            spread("taking a parameter group back", work)
        except PartialError as error:
            _log.warning("%s", error)

    def state_dict(self) -> dict[str, Any]:
        """The state of all workers, in the form that an optimizer of ``optimizer_class`` in one process has.

        Such an optimizer of the same parameters in the same order can load it, and so can a DistributedOptimizer,
        wherever the parameters live. The tensors are copies on the CPU.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        exported = self._everywhere("state_dict()", local.export)
        self._refresh({worker: entries for worker, (entries, _) in exported.items()})
        state = self._joined({worker: state for worker, (_, state) in exported.items()})
        found = {"state": state, "param_groups": self._group_options()}
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def _refresh(self, exported: Mapping[WorkerInfo, list[Entries]]) -> None:
        """Show the workers' entries in ``param_groups``. Changes that were made here and not sent yet stay."""
        pending = self._changes()
        iterators = {worker: iter(entries) for worker, entries in exported.items()}
        for number, homes in enumerate(self._homes):
            entries = [next(iterators[worker]) for worker in homes]
            self._learn(homes[0], {number: change(self._known[number], entries[0]) or ({}, [])})
            if number in pending:
                apply(pending[number], self.param_groups[number])

    def _joined(self, states: Mapping[WorkerInfo, dict[Any, Any]]) -> dict[Any, Any]:
        """The state by the index of the parameter among all, from the states by index on each worker."""
        found = {
            index: states[worker].pop(place)
            for index, (worker, place) in enumerate(self._places)
            if place in states[worker]
        }
        for state in states.values():
            for key, value in state.items():  # the rest belongs to no parameter
                found.setdefault(key, value)
        return found

    def _group_options(self) -> list[dict[str, Any]]:
        """The groups as a state dict has them, with indices for parameters."""
        indices = iter(range(len(self._places)))
        return [
            {
                **{name: copied(value) for name, value in group.items() if name != "params"},
                "params": [next(indices) for _ in group["params"]],
            }
            for group in self.param_groups
        ]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of another optimizer, which may be one in one process or on other workers. Copies the tensors.

        Raises `OptionError`, and changes nothing, unless the state has the same number of groups, and the same number
        of parameters in each. Raises `PartialError` if not all workers have loaded it.
        """
        found = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            found = before(self, found) or found
        groups = self._check_loadable(found)
        work: dict[WorkerInfo, Work] = {
            worker: (local.load, (self._locals[worker], entries, state))
            for worker, (entries, state) in self._split(groups, found["state"]).items()
        }
        self._show_loaded(spread("load_state_dict()", work), groups)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _show_loaded(
        self, loaded: Mapping[WorkerInfo, Mapping[int, Entries]], groups: Iterable[Mapping[str, Any]]
    ) -> None:
        """Show in ``param_groups`` the entries that the workers have after they have loaded these groups."""
        self._known = [loaded[homes[0]][number] for number, homes in enumerate(self._homes)]
        self.param_groups = [
            {**entries_of(entries), **(_names(new) or _names(old)), "params": old["params"]}
            for entries, new, old in zip(self._known, groups, self.param_groups, strict=True)
        ]

    def _check_loadable(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        missing = {"state", "param_groups"} - state_dict.keys()
        if missing:
            raise OptionError(f"this is not the state_dict of an optimizer: it has no {sorted(missing)[0]!r}")
        groups: list[dict[str, Any]] = list(state_dict["param_groups"])
        sizes = [len(group.get("params", ())) for group in groups]
        mine = [len(group["params"]) for group in self.param_groups]
        if sizes != mine:
            raise OptionError(
                f"the state_dict has {len(sizes)} parameter groups with {sizes} parameters, and this optimizer has "
                f"{len(mine)} with {mine}: make the optimizer with the parameters and groups that were saved"
            )
        return groups

    def _split(
        self, groups: list[dict[str, Any]], state: Mapping[Any, Any]
    ) -> dict[WorkerInfo, tuple[list[Entries], dict[Any, Any]]]:
        """The entries and the state that each worker loads."""
        found: dict[WorkerInfo, tuple[list[Entries], dict[Any, Any]]] = {worker: ([], {}) for worker in self._locals}
        for homes, group in zip(self._homes, groups, strict=True):
            for worker in homes:
                found[worker][0].append({name: value for name, value in group.items() if name not in OF_PARAMETERS})
        places = dict(zip(chain.from_iterable(group["params"] for group in groups), self._places, strict=True))
        for key, value in state.items():
            if key in places:
                worker, index = places[key]
                found[worker][1][index] = on_cpu(value)
            else:
                for _, of_worker in found.values():
                    of_worker[key] = on_cpu(value)
        return found


def _make_work(optimizer_class: Any, parts: list[GroupPart], as_groups: bool, args: list[Any], kwargs: Entries) -> Work:
    return local.make, (optimizer_class, parts, as_groups, args, kwargs)


def _of_worker(changes: Changes, worker: WorkerInfo, homes: list[list[WorkerInfo]]) -> Changes | None:
    return {number: each for number, each in changes.items() if worker in homes[number]} or None


def _names(group: Mapping[str, Any]) -> dict[str, list[str]]:
    return {"param_names": list(group["param_names"])} if "param_names" in group else {}


def _check_class(optimizer_class: Any) -> None:
    """Raise `OptionError` for a class that cannot be an optimizer, before a worker makes anything."""
    if not callable(optimizer_class):
        raise OptionError(f"optimizer_class must be a class such as torch.optim.SGD, not {optimizer_class!r:.100}")
    plain = optimizer_class.func if isinstance(optimizer_class, partial) else optimizer_class
    if not isinstance(plain, type):
        return  # a function: the worker checks what it returns
    if not callable(getattr(plain, "step", None)):
        raise OptionError(f"{plain.__qualname__} has no step(): give a class such as torch.optim.SGD")
    is_method = isinstance(inspect.getattr_static(plain, "step"), types.FunctionType)
    local.require_no_closure(plain.step, plain.__qualname__, is_method)  # type: ignore[attr-defined]


def _name_of(optimizer_class: Any) -> str:
    plain = optimizer_class.func if isinstance(optimizer_class, partial) else optimizer_class
    return getattr(plain, "__qualname__", type(plain).__qualname__)
