"""Mistakes in calls, references, connections and what guards them."""

from __future__ import annotations

from mutant import Mutant

CALLS = (
    Mutant(
        "agent/execution.py",
        "pins of a message that cannot be sent are kept",
        "            if cargo.refs:\n                self.traffic.stayed(cargo.refs)\n",
        "",
        ("tests/refs/test_rref.py",),
    ),
    Mutant(
        "trust/exposure.py",
        "an exception that is exposed to some is given to all",
        "if entry is not None and entry.is_for(self.peer):\n            kind",
        "if entry is not None:\n            kind",
        ("tests/security/test_exposure.py",),
    ),
    Mutant(
        "refs/holdings.py",
        "a share of a message that will not leave is kept",
        "        if late:  # the message",
        "        if False:  # the message",
        ("tests/refs/test_late_shares.py",),
    ),
    Mutant(
        "refs/holdings.py",
        "the failure of a creation is noted after its end",
        "                self._gone[ref] = kept(of_creation(error), self.me.name)\n"
        "            self._creations.pop(ref, None)",
        "                pass\n            self._creations.pop(ref, None)",
        ("tests/refs/test_lost_creations.py", "tests/refs/test_refused_creations.py"),
    ),
    Mutant(
        "refs/holdings.py",
        "dropped references wait for the next tick",
        "        self._dropped.append(ref)\n        if self._agent.watch.asleep and not self._tables.closed:\n"
        "            self._agent.watch.wake()",
        "        self._dropped.append(ref)",
        ("tests/refs/test_rref.py", "tests/test_idle.py"),
    ),
    Mutant(
        "refs/holdings.py",
        "a message with wrong references is believed",
        "        if wrong is not None:\n            raise ProtocolError(wrong)",
        "        if False:\n            raise ProtocolError(wrong)",
        ("tests/security/test_federation_calls.py",),
    ),
    Mutant(
        "agent/serving.py",
        "a leader that cannot be replaced loses its replies",
        "                self._out = held + self._out\n",
        "",
        ("tests/agent/test_no_threads.py",),
    ),
    Mutant(
        "agent/serving.py",
        "a reply to the user's own tensors is held back",
        "                if frame is not None and frame.keep:",
        "                if False:",
        ("tests/calls/test_calls.py",),
    ),
    Mutant(
        "agent/serving.py",
        "references of a message are noted after it has run",
        '                elif getattr(envelope.message, "refs", ()):',
        "                elif False:",
        ("tests/refs/test_rref.py",),
    ),
    Mutant(
        "agent/pool.py",
        "a thread that could not start is waited for",
        "                    self._threads.discard(spare.thread)\n                    raise",
        "                    raise",
        ("tests/agent/test_pool.py", "tests/agent/test_no_threads.py"),
    ),
    Mutant(
        "agent/pool.py",
        "a thread that goes idle while the pool closes stays",
        "                if self._is_closed() and self._withdraw(spare):\n                    return\n",
        "",
        ("tests/agent/test_pool.py",),
    ),
    Mutant(
        "security/handshake.py",
        "a client takes a refusal for a welcome",
        "    require_welcome(welcome)\n    return welcome",
        "    return welcome",
        ("tests/security/test_handshake.py",),
    ),
    Mutant(
        "agent/execution.py",
        "a message over the limit is sent",
        "        if frame.size > self._max_message_bytes:",
        "        if False:",
        ("tests/calls/test_calls.py", "tests/refs/test_rref.py"),
    ),
    Mutant(
        "agent/federated.py",
        "shapes that claim more than their memory are taken",
        "        if claimed(tensors) > self._max_message_bytes:",
        "        if False:",
        ("tests/security/test_federation_calls.py",),
    ),
    Mutant(
        "agent/line.py",
        "a reply is written into the middle of a frame",
        "                if self._unflushed or not self.channel.write(frame):\n"
        "                    departure = self._depart(frame, waits=not late",
        "                if not self.channel.write(frame):\n"
        "                    departure = self._depart(frame, waits=not late",
        ("tests/calls/test_slow_links.py",),
    ),
    Mutant(
        "agent/line.py",
        "a late reply is not copied, and leaves with the memory of later",
        "                    frame = _copy(frame)",
        "                    pass",
        ("tests/calls/test_slow_links.py",),
    ),
    Mutant(
        "agent/line.py",
        "threads that wait to send are not told that the connection has ended",
        "        _tell(lost)\n",
        "",
        (
            "tests/calls/test_slow_links.py",
            "tests/calls/test_no_room.py",
        ),
    ),
    Mutant(
        "agent/line.py",
        "a thread that gives up takes the duty to pump with it",
        "        if pumps:\n            self._stop_pumping(departure)\n        return True",
        "        return True",
        (
            "tests/calls/test_slow_links.py",
            "tests/calls/test_no_room.py",
        ),
    ),
    Mutant(
        "agent/line.py",
        "requests are read although too much waits to be sent",
        "        while self._outbox.full:",
        "        while False:",
        (
            "tests/calls/test_no_room.py",
            "tests/calls/test_slow_links.py",
            "tests/security/test_growth.py",
        ),
    ),
    Mutant(
        "agent/line.py",
        "the quota of a call is kept when its reply has left at once",
        "            elif afterwards is not None:\n                afterwards()\n        except",
        "        except",
        ("tests/security/test_federation_calls.py",),
    ),
    Mutant(
        "agent/line.py",
        "a peer that takes nothing is waited for without an end",
        "                if now - moved > self._serving.patience:",
        "                if False:",
        (
            "tests/calls/test_slow_links.py",
            "tests/calls/test_no_room.py",
        ),
    ),
    Mutant(
        "agent/calling.py",
        "the slot of a call that could not be sent is kept",
        "                ended = self._state.give_up(slot)",
        "                ended = False",
        ("tests/calls/test_slow_links.py",),
    ),
    Mutant(
        "agent/calling.py",
        "the role of the reader is lost with the thread that gives up its wait",
        "        if other is not None:\n            other.wake()\n\n    def _other_readable",
        "\n    def _other_readable",
        ("tests/calls/test_call_threads.py",),
    ),
    Mutant(
        "agent/calling.py",
        "a call overtakes those that are held back",
        "                frame = join([*held, frame])",
        "                frame = join([frame, *held])",
        ("tests/calls/test_held_calls.py",),
    ),
    Mutant(
        "agent/serving.py",
        "calls whose replies cannot leave stay in the quota",
        "            self._serving.guard.finished(self.peer, charged)",
        "            pass",
        ("tests/security/test_federation_calls.py",),
    ),
    Mutant(
        "agent/serving.py",
        "nested calls block each other endlessly in a small pool",
        "        if self._stalled < _STALLED_TICKS:\n"
        "            return False\n"
        "        self._stalled = 0\n"
        "        return True",
        "        return False",
        ("tests/calls/test_call_threads.py",),
    ),
    Mutant(
        "agent/serving.py",
        "a peer of a federation has any number of connections",
        "        for old in excess:\n            old.shutdown()\n",
        "",
        ("tests/security/test_many_connections.py",),
    ),
    Mutant(
        "agent/serving.py",
        "a message that a waiting thread has read is not judged",
        "            refused = self.guard(line, envelope)\n"
        "            if refused is not None:\n"
        "                self.pool.run",
        "            refused = None\n            if refused is not None:\n                self.pool.run",
        ("tests/security/test_federation_calls.py",),
    ),
    Mutant(
        "trust/guard.py",
        "the quota of a call that is refused is not returned",
        "                    self.finished(line.peer)\n"
        "                    self.let_go(line.peer, size)\n"
        "                    raise",
        "                    raise",
        ("tests/security/test_federation_calls.py", "tests/security/test_federation_references.py"),
    ),
    Mutant(
        "trust/guard.py",
        "the bytes of calls under way are not added up",
        "            large = taken + size > room",
        "            large = size > room",
        (
            "tests/security/test_federation_calls.py",
            "tests/security/test_growth.py",
        ),
    ),
    Mutant(
        "agent/fates.py",
        "news of an earlier incarnation end the present one",
        '            if incarnation and fate.incarnation not in ("", incarnation):\n                return False\n',
        "",
        (
            "tests/agent/test_fates.py",
            "tests/refs/test_obituaries.py",
        ),
    ),
    Mutant(
        "agent/fates.py",
        "what happens during an examination is not looked at",
        "                self._again.add(peer)\n",
        "",
        ("tests/agent/test_fates.py",),
    ),
    Mutant(
        "agent/fates.py",
        "a peer that is only silent counts as known to be dead",
        's", certain=False)',
        's", certain=True)',
        (
            "tests/agent/test_fates.py",
            "tests/refs/test_obituaries.py",
        ),
    ),
    Mutant(
        "refs/correspondence.py",
        "notices for a dead worker go to its successor",
        "            self._outboxes[to].clear()",
        "            pass",
        ("tests/refs/test_dead_letters.py",),
    ),
    Mutant(
        "refs/correspondence.py",
        "notices that a cut has lost are not repeated",
        "        if again is not None:\n            self._mail(to, *again)",
        "        pass",
        (
            "tests/refs",
            "tests/agent/test_fates.py",
        ),
    ),
    Mutant(
        "refs/deaths.py",
        "references to the values of a replaced worker work on",
        "                    self._tables.gone[ref] = lost_value(ref, self._names)",
        "                    pass",
        ("tests/refs/test_stale_refs.py",),
    ),
    Mutant(
        "refs/holdings.py",
        "a reference whose request was never made is kept",
        "            self._counting.created(ref)\n\n    def answer",
        "            pass\n\n    def answer",
        ("tests/refs/test_rref.py",),
    ),
    Mutant(
        "refs/correspondence.py",
        "a batch of notices counts as under way endlessly",
        "                box.answered(number)",
        "                pass",
        ("tests/refs/test_rref.py",),
    ),
    Mutant(
        "refs/references.py",
        "a value is fetched from the process that has replaced its owner",
        "            self._holdings.require(ref)  #",
        "            pass  #",
        ("tests/recovery/test_rejoin.py",),
        excuse="the new process refuses it, too",
    ),
    Mutant(
        "agent/future.py",
        "a future that is done keeps its call alive",
        "            self._help = self._attend = None",
        "            pass",
        ("tests/agent/test_future.py",),
    ),
    Mutant(
        "agent/door.py",
        "a crowd pushes out the peers among it",
        " if not guest.visitor.trusted]",
        "]",
        ("tests/agent/test_door.py",),
    ),
    Mutant(
        "agent/door.py",
        "a stranger that says nothing stays",
        ").deadline <= now:",
        ").deadline <= -1:",
        ("tests/agent/test_door.py",),
    ),
    Mutant(
        "transport/greeting.py",
        "a worker may use the name of another one",
        "    if names is None or hello.name in names:",
        "    if True:",
        ("tests/transport/test_greeting_names.py",),
    ),
    Mutant(
        "transport/greeting.py",
        "a worker talks to a server with the certificate of another one",
        "    if names is not None and welcome.name not in names:",
        "    if False:",
        ("tests/transport/test_greeting_names.py",),
    ),
    Mutant(
        "transport/segments.py",
        "a segment in use is taken once more",
        "            segment.mapping.control[0] = 1\n",
        "",
        ("tests/transport/test_segments.py",),
    ),
    Mutant(
        "transport/segments.py",
        "memory that was given back still counts",
        "                self._budget.warm -= other.warm\n",
        "",
        ("tests/transport/test_segments.py",),
    ),
    Mutant(
        "transport/segments.py",
        "descriptors that were passed stay open",
        "        self._close_passed()\n        ids = []",
        "        ids = []",
        ("tests/transport/test_segments.py",),
    ),
)
