"""Parties among the parameters of an optimizer. Each party steps its own parameters on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backhaul import rpc
from backhaul.errors import MisuseError, OptionError, PartialError
from backhaul.ids import WorkerInfo
from backhaul.nn.parties import PartyParameters, in_federation
from backhaul.optim.groups import Group
from backhaul.refs.rref import RRef
from backhaul.spread import Work, spread

Parties = list[RRef[Any]]


def parted(given: Any) -> tuple[Any, Parties]:
    """Separate the parties from the other parameters of an optimizer. Returns the others, and the parties."""
    if not isinstance(given, list | tuple):
        given = list(given) if hasattr(given, "__next__") else given
    if not isinstance(given, list | tuple):
        return given, []
    parties: dict[tuple[int, Any], RRef[Any]] = {}
    rest: list[Any] = []
    for item in given:
        if not isinstance(item, Mapping):
            if not _take(item, parties):
                rest.append(item)
            continue
        params = item.get("params", ())
        inside = list(params) if isinstance(params, list | tuple) else [params]
        left = [each for each in inside if not _take(each, parties)]
        if len(left) == len(inside):
            rest.append(item)
            continue
        options = sorted(item.keys() - {"params", "param_names"})
        if options:
            raise OptionError(
                f"a parameter group with {', '.join(options)} contains a party, and a party chooses the options of its "
                "own optimizer. Give the party in a group without options, or outside of groups"
            )
        if left:
            rest.append({**item, "params": left})
    if parties and not rest:
        rest = [{"params": []}]
    return rest, list(parties.values())


def _take(item: Any, parties: dict[tuple[int, Any], RRef[Any]]) -> bool:
    plain = item[1] if type(item) is tuple and len(item) == 2 and isinstance(item[0], str) else item
    if not isinstance(plain, PartyParameters):
        return False
    parties.setdefault((plain.party.owner().id, plain.party._ref), plain.party)
    return True


def require_own(groups: Sequence[Group]) -> None:
    """In a federation, raise `MisuseError` for parameters of other workers, which only their owners may step."""
    here = rpc.get_worker_info()
    owner = next((param.owner() for group in groups for param in group.params if param.owner() != here), None)
    if owner is not None and in_federation():
        raise MisuseError(
            f"a parameter is on {owner.name!r}, and in a federation only its owner may step it. Let {owner.name!r} "
            "expose a backhaul.federation.Party with its own optimizer, and give "
            "parameter_rrefs(RemoteModule(...)) to the optimizer here"
        )


def refuse(parties: Parties, what: str) -> None:
    """Raise `OptionError` if there are parties: other workers may not read or change their gradients."""
    if parties:
        names = ", ".join(sorted({repr(party.owner_name()) for party in parties}))
        raise OptionError(
            f"{what} needs the gradients of all parameters, and those of party {names} do not leave the party: let the "
            "party do it, in its own optimizer"
        )


def spread_with(
    what: str, work: Mapping[WorkerInfo, Work], parties: Parties, method: str, *args: Any
) -> dict[WorkerInfo, Any]:
    """`spread`, and at the same time call a method of each party. Raises `PartialError` with all failures."""
    if not parties:
        return spread(what, work)
    done: list[str] = []
    errors: dict[str, BaseException] = {}
    futures: list[tuple[str, rpc.Future[Any]]] = []
    for party in parties:
        try:
            futures.append((party.owner_name(), getattr(party.rpc_async(), method)(*args)))
        except Exception as error:
            errors[party.owner_name()] = error
    values: dict[WorkerInfo, Any] = {}
    try:
        values = spread(what, work)
        done += [worker.name for worker in work]
    except PartialError as error:
        done += error.done
        errors.update(error.errors)
    for name, future in futures:
        try:
            future.wait()
            done.append(name)
        except Exception as error:
            errors[name] = error
    if errors:
        raise PartialError(what, done, errors) from next(iter(errors.values()))
    return values
