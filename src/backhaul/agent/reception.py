"""Reception: judges the greetings at this worker's door, and admits members and guests."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from backhaul.agent.door import PATIENCE, Door
from backhaul.agent.logs import logged
from backhaul.agent.member import Member
from backhaul.agent.observing import LinkUp
from backhaul.agent.serving import Served
from backhaul.ids import GUEST, WorkerInfo
from backhaul.security.handshake import LEAVING, Hello, Welcome
from backhaul.transport.base import Channel
from backhaul.wire import frames

if TYPE_CHECKING:
    from backhaul.agent.agent import Agent

_LONGEST_INCARNATION = 64
_MAX_GUESTS = 16


class Reception:
    """The reception of one agent."""

    def __init__(self, agent: Agent, label: str) -> None:
        self._agent = agent
        patience = min(PATIENCE, agent.options.connect_timeout)
        self.door = Door(label, self.judge, self._let_in, patience=patience)

    def judge(self, hello: Hello) -> Welcome:
        me = self._agent.me
        if hello.id == GUEST:
            return Welcome(me.id, me.name, self._judge_guest())
        if hello.frames != frames.VERSION:
            refused = (
                f"it speaks version {hello.frames} of Backhaul's frames, and worker {me.name!r} version "
                f"{frames.VERSION}: install the same version of Backhaul on both"
            )
        elif hello.group != self._agent.membership.group:
            refused = "it belongs to another group, or to an earlier one of this name"
        elif hello.to_id != me.id:
            refused = f"it looks for rank {hello.to_id}; this is rank {me.id}"
        elif not self._is_member(hello):
            refused = f"no worker {hello.name!r} of rank {hello.id} is in this group"
        elif self._agent.closed.is_set():
            refused = LEAVING
        elif (seconds := self._agent.penalties.wait(hello.name, time.monotonic())) > 0:
            refused = f"it has broken the protocol too often, and may come back in {math.ceil(seconds)} s"
        elif len(hello.incarnation) > _LONGEST_INCARNATION or not hello.incarnation.isascii():
            refused = "its incarnation is invalid"
        else:
            refused = ""
        return Welcome(me.id, me.name, refused, self._agent.membership.incarnation)

    def _judge_guest(self) -> str:
        """Why a guest is refused; empty if it is admitted. A guest has no group, and need not know this worker."""
        if not self._agent.trust.shows:
            return "a member of a federation does not let guests inspect it"
        if self._agent.closed.is_set():
            return LEAVING
        if len(self._agent.serving.lines_of(GUEST)) >= _MAX_GUESTS:
            return f"it already has {_MAX_GUESTS} guests, such as `backhaul top`: end one of them"
        return ""

    def _is_member(self, hello: Hello) -> bool:
        # In a dynamic group this worker may not have read the record of a newcomer from the store yet.
        if self._agent.membership.dynamic:
            return True
        return self._agent.membership.known(WorkerInfo(hello.id, hello.name)) is not None

    def _let_in(self, channel: Channel, hello: Hello) -> None:
        self._agent.pool.run(lambda: self._welcome(channel, hello))

    def _welcome(self, channel: Channel, hello: Hello) -> None:
        if hello.id == GUEST:
            guest = Served(WorkerInfo(GUEST, hello.name), channel, self._agent.serving)
            self._agent.serving.add(guest)
            if self._agent.closed.is_set():
                guest.shutdown()
            return
        member = Member(hello.id, hello.name, hello.addresses, incarnation=hello.incarnation)
        peer = member.info
        served = Served(peer, logged(channel, self._agent.me, peer, peer), self._agent.serving)
        self._agent.connecting.greeted(member, reached=False)
        self._agent.link(peer).opened(served)
        self._agent.accounts.add(served)
        if self._agent.observers:
            self._agent.observers.emit(LinkUp(peer=hello.name, served=True))
        self._agent.serving.add(served)
        if self._agent.closed.is_set():
            # Requests may have been served already, so the peer must not take this for a death.
            served.say_goodbye()
            served.shutdown()
