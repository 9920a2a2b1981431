"""A seeded simulation of `link_state` and `role`: many threads, several links, peers that are late, silent or dead.

Pure and single-threaded. One seed is one schedule::

    python tests/agent/link_simulation.py SEED        # replays it, and prints all that happened
    python tests/agent/link_simulation.py FROM TO     # runs many, and prints how much happened

The threads (`simulated_threads`) follow the steps of the driver (`simulated_calling`, `simulated_watch`). The
scheduler may switch to another thread after every step.

What is checked
---------------
At each step: a line has one reader at a time; nothing reads or polls a closed channel; a channel is closed once, and
not under a reader; a slot is finished once; a frame leaves once and in the order of its lane, and nothing is written in
the middle of another frame; a peer is pinged before it is lost, and lost only after it was silent for long at looks
that were not late.

Whenever no thread of the worker can run (`check_quiet`): no thread sleeps over a slot that is done, or beside a role
that is free; what has come is being read, or watched; what is held back will be sent; what did not fit has a thread
that pumps.

At the end: every call is over, the counters agree, and nothing is left in the state.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from simulated_calling import Calling
from simulated_channel import END, LARGE, SMALL, Future, News, Reply
from simulated_threads import SimulationError, Steps, Threads, Until
from simulated_waiting import Listener, Sleeper, keep_vigil
from simulated_watch import Watch

from backhaul.agent import link_state
from backhaul.agent.link_state import LinkState
from backhaul.agent.outbox import Outbox
from backhaul.agent.pending import Slot
from backhaul.agent.role import Role
from backhaul.transport.base import ChannelClosed

__all__ = ["Simulation", "SimulationError", "run"]

BACKLOG, MOST_HELD = 2, 3
"""Smaller than the real limits, so that a few threads reach them."""

_MOST_STEPS = 20_000
_MOST_STOPS = 10  # no time is left for anything else if there are more


class Style:
    """What the schedules of a seed are like."""

    def __init__(self, random: Any) -> None:
        pick = random.choice
        self.lines = pick([1, 1, 2, 3])
        self.threads = random.choice([2, 4, 7, 12])
        self.length = random.randint(1, 4)  # actions of each thread
        self.futures = pick([0.0, 0.5, 0.9])
        self.listeners = pick([0, 0, 1, 2])
        self.deadlines = pick([0.0, 0.3, 0.8])
        self.ignoring = pick([0.0, 0.3])
        self.patience = pick([math.inf, 4.0, 4.0])
        self.deaths = pick([0.0, 0.3, 0.8])
        self.hangs = 0.0 if self.patience == math.inf else pick([0.0, 0.3])
        self.naps = pick([0.0, 0.5])
        self.room = pick([1.0, 0.95, 0.6])
        self.losses = pick([0.0, 0.2])
        self.stops = pick([0.0, 0.0, 0.01])


class Simulation(Threads):
    """One schedule. `run` raises `SimulationError`."""

    def __init__(
        self,
        seed: int,
        state: type[LinkState[Any]] = LinkState,
        role: type[Role[Any]] = Role,
        calling: type[Calling] = Calling,
        outbox: type[Outbox[Any]] = Outbox,
    ) -> None:
        super().__init__(seed)
        self.outbox = outbox
        self.style = Style(self.random)
        self.watch = Watch(lambda: self.now)
        self.tally: Counter[str] = Counter(schedules=1)
        self.listeners: list[Listener] = []
        self.lines: list[Calling] = []
        self.stopped_at = 0.0
        self.peers: dict[Calling, Peer] = {}
        for number in range(self.style.lines):
            made: LinkState[Sleeper] = state(self.style.patience)
            made._reader = role()
            self.lines.append(calling(self, "abc"[number], self.style.patience, made))

    def run(self) -> None:
        style, random = self.style, self.random
        with mock.patch.multiple(link_state, BACKLOG=BACKLOG, MOST_HELD=MOST_HELD, _MUCH=0):
            self.start("watch", self.watch.steps(), daemon=True)
            for line in self.lines:
                peer = Peer(self, line)
                self.start(f"peer {line}", peer.steps(), world=True, daemon=True)
                for act, chance in (
                    (peer.die, style.deaths),
                    (peer.hang, style.hangs),
                    (peer.nap, style.naps),
                    (line.lose, style.losses),
                ):
                    if random.random() < chance:
                        self.start(f"fate of {line}", self.later(act()), daemon=True)
                self.peers[line] = peer
            for number in range(style.threads):
                self.start(f"thread {number}", self.work())
            for number in range(style.listeners):
                self.start(f"backward {number}", self.listen())
            self.run_all()
            self.check_counters()
            for line in self.lines:  # the worker leaves
                self.start(f"leaves {line}", line.lose())
            self.run_all()
            self.check_end()

    def run_all(self) -> None:
        """Run until all is over."""
        limit = self.steps + _MOST_STEPS
        while True:
            runnable = self.runnable()
            if not any(not thread.world for thread in runnable):
                self.check_quiet()
                if self.is_over():
                    self.tally["steps"] = self.steps
                    return
            if self.steps > limit:
                raise self.failure("it never comes to an end")
            if not runnable:
                self.pass_time()
                continue
            if self.random.random() < self.style.stops and self.tally["stops"] < _MOST_STOPS:
                self.stop_for_long()
            self.step(self.choose(runnable))

    def is_over(self) -> bool:
        return all(thread.daemon for thread in self.threads) and not any(len(line.state) for line in self.lines)

    def pass_time(self) -> None:
        at = self.next_time()
        if at == math.inf:
            waiting = [thread.name for thread in self.threads if not thread.daemon]
            raise self.failure(f"nothing can happen any more, and these wait: {waiting or 'futures'}")
        self.now = max(self.now, at)

    def stop_for_long(self) -> None:
        """Stop the process for long. Its peers go on meanwhile, and answer the requests that they have."""
        for line in self.lines:
            self.peers[line].answer_all()
        self.note("the process has been stopped")
        self.now += 100.0
        self.stopped_at = self.now
        self.tally["stops"] += 1

    # What threads do.

    def later(self, act: Steps) -> Steps:
        for _ in range(self.random.randint(0, 150)):
            yield
        yield from act

    def deadline(self) -> float:
        if self.random.random() < self.style.deadlines:
            return self.now + self.random.choice([0.0, 0.5, 3.0, 10.0])
        return math.inf

    def work(self) -> Steps:
        """A thread of the user."""
        mine: list[tuple[Calling, Slot, Future]] = []
        random = self.random
        for _ in range(self.style.length):
            line = random.choice(self.lines)
            size = LARGE if random.random() < 0.1 else SMALL
            if random.random() >= self.style.futures:
                yield from line.ask(size, self.deadline())
                continue
            for _ in range(random.choice([1, 1, 6])):
                made = yield from line.ask_async(size, self.deadline())
                if made is None:
                    continue
                mine.append((line, *made))
                if random.random() < 0.2:
                    slot, future = made
                    future.has_callbacks = True
                    yield
                    if not future.settled:
                        yield from line.attend(slot)
                elif random.random() < 0.1:
                    self.start(f"{self.running}'", line.wait_for(*made))
        for line, slot, future in mine:
            if random.random() < 0.6:
                yield from line.wait_for(slot, future)

    def listen(self) -> Steps:
        """A thread in ``backward``: it waits for messages from several peers."""
        listener = Listener()
        self.listeners.append(listener)
        wanted = self.random.randint(1, 3)
        for _ in range(wanted):
            line = self.random.choice(self.lines)
            if not (yield from self.order_news(line, listener)):
                listener.failed = True
        while listener.arrived < wanted and not listener.failed:
            arrived = listener.arrived
            every = self.style.patience / 4
            start = self.now
            lines = sorted({*self.watch.unread, *(line for line in self.lines if not line.lost)}, key=str)
            yield
            yield from keep_vigil(
                listener.vigil,
                lines,
                lambda arrived=arrived: listener.arrived > arrived or listener.failed,
                self.now + every,
            )
            if self.watch.unread:
                yield from self.watch.take_over()
            if self.now >= start + every:
                for line in lines:
                    yield from line.ask_async(SMALL, math.inf, is_call=False)
        listener.over = True

    def order_news(self, line: Calling, listener: Listener) -> Steps:
        """Let the pass go on at a peer, which will send a message."""
        yield
        if line.lost:
            return False
        self.peers[line].todo.append(News(listener))
        return True

    def tell_listeners(self, line: Calling) -> Steps:
        for listener in self.listeners:
            listener.failed = True
            yield
            listener.vigil.wake()

    def read(self, line: Calling) -> list[Any]:
        """What `Channel.read` and `Channel.next` find."""
        if line.closed:
            raise self.failure(f"the closed channel of {line} is read")
        if line.shut or (line.inbox and line.inbox[0] == END):
            raise ChannelClosed
        count = self.random.choice([1, len(line.inbox)])
        found = []
        while line.inbox and line.inbox[0] != END and len(found) < count:
            found.append(line.inbox.popleft())
        if found:
            self.note("reads", line, [getattr(message, "id", "news") for message in found])
        return found

    # The judge.

    def judge_open(self, line: Calling, slot: Slot, opened: bool) -> None:
        line.slots[slot.id] = slot
        line.opened_at[slot.id] = self.now
        line.calls_opened += opened and slot.is_call

    def judge_end(self, line: Calling, slot: Slot, how: str) -> None:
        self.note(line, slot.id, "is", how)
        if slot.id in line.ended:
            raise self.failure(f"{line} {slot.id} was {line.ended[slot.id]}, and is {how} now")
        if not slot.done and how != "not sent":
            raise self.failure(f"{line} {slot.id} is {how}, and not done")
        line.ended[slot.id] = how
        self.tally[how] += 1

    def judge_unsent(self, line: Calling, frame: Any) -> None:
        """Check a request that is reported as unsent, because it was too late."""
        self.tally["unsent"] += 1
        line.calls_opened -= line.slots[frame.id].is_call
        if frame in line.written:
            raise self.failure(f"{line} {frame.id} is reported as unsent, but was sent")
        line.ordered.remove(frame)

    def judge_reply(self, line: Calling, slot: Slot) -> None:
        """Check the result for a thread that has stopped waiting."""
        envelope: Any = slot.envelope
        if slot.id not in line.ended:
            raise self.failure(f"a thread no longer waits for {line} {slot.id}, which goes on")
        if (envelope is None) == (slot.error is None) or (envelope is not None and envelope.id != slot.id):
            raise self.failure(f"{line} {slot.id} has ended with {envelope} and {slot.error!r}")

    def judge_settled(self, line: Calling, slot: Slot, future: Future) -> None:
        if future.settled or slot.id not in line.ended:
            raise self.failure(f"the future of {line} {slot.id} is settled twice, or too early")

    def judge_reading(self, line: Calling, token: int) -> None:
        if line.readers:
            raise self.failure(f"{line} has a second reader")
        line.readers.add(token)

    def judge_polled(self, line: Calling) -> None:
        if line.closed:
            raise self.failure(f"the closed channel of {line} is polled")

    def judge_close(self, line: Calling) -> None:
        self.note("closes", line)
        if line.closed or line.readers or not line.shut:
            raise self.failure(f"{line} is closed twice, or while it is read, or before it is shut down")
        line.closed = True

    def judge_held(self, line: Calling) -> None:
        self.tally["held"] += 1
        if line.state.holds > MOST_HELD:
            raise self.failure(f"{line} holds {line.state.holds} calls back")

    def judge_order(self, line: Calling) -> None:
        """Check that small frames have passed large ones, and that all other frames have kept their order."""
        for large in (False, True):
            written = [frame.id for frame in line.written if frame.holds is large]
            ordered = [frame.id for frame in line.ordered if frame.holds is large]
            if not line.lost and written != ordered[: len(written)]:
                raise self.failure(f"{line} has sent {written}, in place of {ordered}")

    def judge_look(self, line: Calling, action: str | None) -> None:
        """Check a look at a peer. It is late if this process seems to have been stopped before it."""
        if action == "ping":
            self.tally["pings"] += 1
            line.looks = [self.now]
            return
        looks = line.looks
        if looks is not None:
            looks.append(self.now)
        if action == "lose":
            if looks is None or self.now - looks[0] < self.style.patience / 2:
                raise self.failure(f"{line} is lost though it was not silent for long since a ping")
            if max(after - before for before, after in pairwise(looks)) > 50:
                raise self.failure(f"{line} is lost after a long stop: {looks}")
            self.tally["silences"] += 1

    def check_quiet(self) -> None:
        """Check the state when no thread of the worker can run."""
        for thread in self.threads:
            beside = thread.until and thread.until.beside
            if beside:
                line, slot = beside
                if slot.done or slot.id not in line.state:
                    raise self.failure(f"{thread} sleeps over {line} {slot.id}, which is done")
                if not line.state.being_read:
                    raise self.failure(f"{thread} sleeps beside {line}, which nobody reads")
        watch = self.watch
        for line in self.lines:
            if line.lost:
                continue
            if line.state.wanted and not line.state.being_read:
                raise self.failure(f"a thread waits for the role of reading {line}, which is free")
            if line.readable and line.readers:
                raise self.failure(f"{line} has a reader that does not read")
            attended = line.readers or line.unflushed or line.sending.taken  # a thread that pumps reads as well
            if line.futures and not attended and line not in watch.soon | watch.watched:
                raise self.failure(f"{line} has futures, and nobody reads or watches it")
            if line.unflushed and not line.dead and not line.departures.pumped:
                raise self.failure(f"{line} has something to send, and nobody pumps")
            if line.state.holds and line not in watch.holding and not line.sending.taken:
                raise self.failure(f"{line} holds calls back that nobody sends")
            owed = [line.opened_at[id] for id in line.slots if id in line.state]
            if owed and self.now > max(self.peers[line].hangs_since, self.stopped_at, *owed) + 3 * line.patience:
                raise self.failure(f"the peer of {line} has been hanging for long, and nobody has noticed")

    def check_counters(self) -> None:
        for line in self.lines:
            state = line.state
            if line.slots.keys() != line.ended.keys():
                raise self.failure(f"{line}: {line.slots.keys() - line.ended.keys()} never ended")
            if any(slot.waiters for slot in line.slots.values()):
                raise self.failure(f"{line}: threads are still to be woken for slots that are over")
            if state.futures:
                raise self.failure(f"{line} counts {state.futures} futures, and there is none")
            if state.lost:
                self.tally["lost"] += 1
            elif state.calls_sent != line.calls_opened or state.calls_settled != line.calls_opened:
                raise self.failure(
                    f"{line}: of {line.calls_opened} calls {state.calls_sent} were sent, {state.calls_settled} settled"
                )

    def check_end(self) -> None:
        for line in self.lines:
            state = line.state
            if not line.closed:
                raise self.failure(f"the channel of {line} was never closed")
            if len(state) or state.holds or state.wanted or state.being_read or state.next_deadline() != math.inf:
                raise self.failure(f"something is left in the state of {line}")


class Peer:
    """The worker at the other end of a line. It answers in any order, late, or not at all."""

    def __init__(self, world: Simulation, line: Calling) -> None:
        self.world = world
        self.line = line
        self.todo: list[Any] = []
        self.gone = False
        self.naps_until = 0.0
        self.hangs_since = math.inf

    def steps(self) -> Steps:
        random = self.world.random
        while True:
            yield Until(lambda: self.is_busy())
            if (self.line.outbox or not self.line.room) and random.random() < 0.6:
                self.take()
            elif self.todo:
                for _ in range(random.choice([1, 1, 3])):
                    self.answer()

    def is_busy(self) -> bool:
        awake = not self.gone and self.world.now >= self.naps_until
        return awake and bool(self.line.outbox or self.todo or not self.line.room)

    def take(self) -> None:
        """Read what was sent."""
        for frame in self.line.outbox:
            if not (frame.may_be_ignored and self.world.random.random() < self.world.style.ignoring):
                self.todo.append(Reply(frame.id))
        self.line.outbox.clear()
        self.line.room = True

    def answer(self) -> None:
        if self.line.shut:
            self.todo.clear()
        elif self.todo:
            self.line.inbox.append(self.todo.pop(self.world.random.randrange(len(self.todo))))

    def answer_all(self) -> None:
        if not self.gone:
            self.naps_until = 0.0
            self.take()
            while self.todo:
                self.answer()

    def die(self) -> Steps:
        """Kill the peer. It may have sent more answers, some of which are lost."""
        self.gone = True
        self.world.note("the peer of", self.line, "dies")
        while self.line.inbox and self.world.random.random() < 0.3:
            self.line.inbox.pop()
        if not self.line.inbox or self.line.inbox[-1] != END:
            self.line.inbox.append(END)
        self.line.room = True
        self.world.tally["deaths"] += 1
        yield

    def nap(self) -> Steps:
        """Let the peer do nothing for a while."""
        self.naps_until = self.world.now + min(2.0, self.world.style.patience / 2)
        self.world.note("the peer of", self.line, "naps")
        yield Until(lambda: False, self.naps_until)

    def hang(self) -> Steps:
        """Stop the peer for good, without telling any worker."""
        self.gone = True
        self.hangs_since = self.world.now
        self.world.note("the peer of", self.line, "hangs")
        self.world.tally["hangs"] += 1
        yield


def run(seeds: Iterable[int], **parts: Any) -> Counter[str]:
    """Run schedules. Returns how much happened in them."""
    tally: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed, **parts)
        simulation.run()
        tally += simulation.tally
    return tally


def main(arguments: list[str]) -> None:
    if len(arguments) == 1:
        simulation = Simulation(int(arguments[0]))
        try:
            simulation.run()
        finally:
            print(*simulation.story(), sep="\n")
    else:
        start = time.perf_counter()
        tally = run(range(*map(int, arguments)))
        seconds = time.perf_counter() - start
        print(", ".join(f"{count:,} {what}" for what, count in tally.items()), f"in {seconds:.0f} s: no promise broken")


if __name__ == "__main__":
    main(sys.argv[1:])
