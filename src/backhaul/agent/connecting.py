"""Connecting: opens lines to peers. The counterpart of `reception`, which admits the lines that peers open.

A line is opened when a request needs one, when a newcomer greets its group, or when `reach_out` expects messages to a
peer. One thread at a time connects to a peer; other threads that need the line wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from typing import TYPE_CHECKING

import msgspec

from backhaul.agent.calling import Calling
from backhaul.agent.logs import logged
from backhaul.agent.observing import LinkUp
from backhaul.errors import AuthenticationError, BackhaulError, ProtocolError, RpcTimeoutError, WorkerLostError
from backhaul.ids import WorkerInfo
from backhaul.security.handshake import Hello, LeavingError
from backhaul.transport.base import ChannelClosed
from backhaul.transport.sockets import lacks_descriptors, no_descriptors
from backhaul.wire import frames

if TYPE_CHECKING:
    from backhaul.agent.agent import Agent
    from backhaul.agent.losses import Losses
    from backhaul.agent.member import Member
    from backhaul.security.handshake import Welcome
    from backhaul.transport.base import Channel

_log = logging.getLogger(__name__)

_GREET_SECONDS = 2.0
_REACH_OUT_SECONDS = 60.0


class Connecting:
    """Opens the lines of one agent. Thread-safe."""

    def __init__(self, agent: Agent, losses: Losses) -> None:
        self._agent = agent
        self._losses = losses
        self._reached_out: dict[int, float] = {}  # rank -> when this worker last tried to connect

    def greet_all(self) -> None:
        """Open a line to every other member. A failure is logged: the member may be gone."""
        for info in self._agent.members():
            try:
                if info != self._agent.me:
                    self.line_to(self._agent.membership.find(info), time.monotonic() + _GREET_SECONDS)
            except BackhaulError as error:
                _log.info("could not greet %s: %s", info.name, error)

    def reach_out(self, rank: int) -> None:
        """Try to connect to a worker in the background, because messages may be sent to it later. Never raises."""
        now = time.monotonic()
        if now < self._reached_out.get(rank, -math.inf) + _REACH_OUT_SECONDS:
            return
        self._reached_out[rank] = now

        def connect() -> None:
            try:
                self.line_to(self._agent.membership.find(rank), time.monotonic() + _GREET_SECONDS)
            except (BackhaulError, OSError) as error:
                _log.debug("= rank %s cannot be reached directly: %s", rank, error)

        with contextlib.suppress(RuntimeError):  # no thread is available
            self._agent.pool.run(connect)

    def line_to(self, member: Member, deadline: float, *, suspected: bool = False) -> Calling:
        """The open line to a member, opened now if there is none. ``suspected``: see `Agent.insist`.

        Raises `WorkerLostError`, `RpcTimeoutError` or `AuthenticationError`, and `OSError` without descriptors.
        """
        agent = self._agent
        link = agent.link(member.info)
        if not suspected and link.fate.suspected and link.open is None and link.addresses == member.addresses:
            refusal = agent.fates.refusal(link)
            if refusal is not None:
                raise refusal
        handling = agent.serving.about_to_wait()
        try:
            with agent.activity.waits(lambda: {"kind": "connection", "peer": member.name}), link.connecting:
                line = link.open
                if line is None:
                    line = link.calling = self._open(member, deadline)
                    link.came_up()
                    agent.accounts.add(line)
                    agent.listeners.opened(line)
                    if agent.closed.is_set():  # close() may have missed this line
                        line.lose(shut_down(agent.me))
                return line
        except BackhaulError as error:
            agent.accounts.count_error("connect", error)
            raise
        finally:
            if handling:
                agent.serving.resumed()

    def _open(self, member: Member, deadline: float) -> Calling:
        agent = self._agent
        channel, welcome = self._greet(member, min(deadline, time.monotonic() + agent.options.connect_timeout))
        if (welcome.id, welcome.name) != (member.id, member.name):
            channel.close()
            raise AuthenticationError(
                f"the address of worker {member.name!r} (rank {member.id}) is answered by {welcome.name!r} "
                f"(rank {welcome.id}): the store has an old address; use a fresh store"
            )
        self.greeted(msgspec.structs.replace(member, incarnation=welcome.incarnation), reached=True)
        if agent.observers:
            agent.observers.emit(LinkUp(peer=member.name, served=False))
        return Calling(
            member.info,
            logged(channel, agent.me, member.info, agent.me),
            execution=agent.execution,
            serving=agent.serving,
            completions=agent.completions,
            watch=agent.watch,
            vigils=agent.vigils,
            unresponsive_after=agent.options.unresponsive_after,
            deliver=agent.listeners.deliver,
            on_lost=self._losses.calling_ended,
            explain=self._losses.explain,
        )

    def _greet(self, member: Member, deadline: float) -> tuple[Channel, Welcome]:
        """Connect to a member and exchange greetings. Raises errors that name the member."""
        agent = self._agent
        hello = Hello(
            agent.membership.group,
            agent.me.id,
            agent.me.name,
            member.id,
            agent.transport.addresses,
            agent.membership.incarnation,
            frames.VERSION,
        )
        try:
            return agent.transport.connect(member.addresses, hello, deadline)
        except TimeoutError as error:
            raise RpcTimeoutError(
                f"worker {member.name!r} did not answer the greeting in time: RPC ran for more than set timeout"
            ) from error
        except LeavingError as error:
            raise WorkerLostError(f"worker {member.name!r} is leaving the group", member.name) from error
        except (AuthenticationError, ProtocolError) as error:
            raise type(error)(f"no connection to worker {member.name!r}: {error}") from error
        except OSError as error:
            if not lacks_descriptors(error):
                raise
            raise OSError(error.errno, f"no connection to worker {member.name!r}: {no_descriptors()}") from error
        except ChannelClosed as error:
            raise WorkerLostError(f"worker {member.name!r} {self._why_closed(member, error)}", member.name) from error

    def _why_closed(self, member: Member, error: ChannelClosed) -> str:
        """Why a member did not answer, as far as the launcher or an examination has found out."""
        process = self._losses.process_of(member)
        ending = None if process is None else self._agent.endings.wait(process)
        fate = self._agent.link(member.info).fate
        if ending is not None:
            return f"is lost: it {ending.ending}"
        if fate.over and fate.certain and fate.incarnation in ("", member.incarnation):
            return f"is lost: {fate.reason}"
        return f"cannot be reached: {error}"

    def greeted(self, member: Member, *, reached: bool) -> None:
        """A member has proved its identity on a new line that is not in use yet.

        ``reached``: this worker opened the line. If the member has replaced another process, that process is over,
        and the layers above have been told when this returns.
        """
        agent = self._agent
        link = agent.link(member.info)
        with link.greeting:
            before = agent.membership.met(member)
            agent.fates.greeted(link, member, reached=reached)
            link.addresses = member.addresses
            if before is not None:
                for callback in list(agent.on_replaced):
                    callback(before, member)
            for each in list(agent.on_connected):
                each(member.info)
        if not link.fate.suspected:  # an examination clears the suspicion and then calls presence.came
            agent.presence.came(member.info)


def shut_down(me: WorkerInfo) -> WorkerLostError:
    """The error of requests that this worker's own shutdown has cut off."""
    lost = WorkerLostError(f"worker {me.name!r} (this one) was shut down", me.name)
    lost.explained = True
    return lost
