"""Policy: what the members of a group may do to each other. There are two: `Cluster` and `Federation`.

The option ``trust`` names the policy of a worker, and `RpcOptions.policy` is the object. No layer compares names. Each
layer asks the policy a question, at the point where the answer matters:

| question | what depends on the answer |
|---|---|
| `runs_any_function` | agent: which `Execution` serves calls, and whose names the codec knows |
| `believes` | wire, transport: bounds on what is decoded. refs: `rights`. autograd: `checking`. agent: penalties |
| `shows` | agent: counts, inspection. refs, transport: processes. autograd: marks, ids of contexts. Profilers |
| `is_one_user` | transport: unix sockets and common memory. Launchers: whether they may start such a worker |
| `transport_options`, `check_group` | the worker, when it starts |

An answer is an attribute, so asking costs no more than a flag. Code that only federations need is in this folder,
unless it belongs to another layer: `wire.built` and `wire.plain` decode, and `agent.federated` is an `Execution`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from backhaul.errors import OptionError

if TYPE_CHECKING:
    from backhaul.options import RpcOptions


class Trust:
    """The questions of the table above. Its two subclasses have no state, so one object of each serves a process."""

    name: ClassVar[str]
    """Its value for the option ``trust``."""
    runs_any_function: ClassVar[bool]
    """Peers may call everything that can be imported, and send pickles. Otherwise they may call what is exposed."""
    believes: ClassVar[bool]
    """The worker believes its peers about sizes, reports, gradients and deaths. Otherwise it bounds and checks them."""
    shows: ClassVar[bool]
    """Peers may see how this worker computes: its process, its counts, its graphs, its profiles."""
    is_one_user: ClassVar[bool]
    """All members belong to one user, so members on one machine use unix sockets and share memory."""

    def check_group(self, world_size: int | None) -> None:
        """Raise `OptionError` if a group of that size cannot have this policy. None means that no size is fixed."""

    def transport_options(self, options: RpcOptions) -> RpcOptions:
        """The options for a worker's transport. Raises `OptionError` if an option contradicts the policy."""
        return options


class Cluster(Trust):
    """The peers hold the group's secret or belong to the same user. They may do anything here."""

    name = "cluster"
    runs_any_function = True
    believes = True
    shows = True
    is_one_user = True


class Federation(Trust):
    """Each peer is a separate party with its own certificate. It may use only what is exposed to it, and it may lie."""

    name = "federation"
    runs_any_function = False
    believes = False
    shows = False
    is_one_user = False

    def check_group(self, world_size: int | None) -> None:
        if world_size is None:
            raise OptionError(
                'trust="federation" needs a group of known members: give world_size, and give each member its rank'
            )

    def transport_options(self, options: RpcOptions) -> RpcOptions:
        """Options that require TLS with certificates, and allow no shared memory."""
        if options.tls is None:
            raise OptionError(
                'trust="federation" needs a certificate for each peer, since a shared secret cannot tell peers apart: '
                "give tls=TLS(ca=..., cert=..., key=...)"
            )
        if options.transport == "unix":
            raise OptionError('trust="federation" uses TCP: leave out transport="unix"')
        if options.fabric == "plain":
            raise OptionError(
                'trust="federation" encrypts all connections, since its members do not trust the network between them: '
                'leave out fabric="plain"'
            )
        if (options.connections or 1) > 1:
            raise OptionError(
                'trust="federation" uses one connection for each direction, so that it can bound what a member sends: '
                f"leave out connections={options.connections}"
            )
        return dataclasses.replace(options, transport="tcp", segment_pool_bytes=0)


CLUSTER = Cluster()
FEDERATION = Federation()
POLICIES: dict[str, Trust] = {policy.name: policy for policy in (CLUSTER, FEDERATION)}
