"""Mistakes that an engineer could make in the core, and the tests that are to notice each."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    what: str
    old: str
    """Occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    excuse: str = ""
    """Why no test notices it, if that is right."""


MUTANTS = (
    Mutant(
        "autograd/recording.py",
        "memory shared with a tensor without gradient is ignored",
        "storages = [_storage(tensor) for tensor in tensors]",
        "storages = [_storage(t) if t.requires_grad or i in places else -i for i, t in enumerate(tensors)]",
        ("tests/autograd/test_exact_kinds.py",),
    ),
    Mutant(
        "autograd/contexts.py",
        "the quota of contexts is not returned",
        "self._introduced[record.introducer] -= 1",
        "pass",
        ("tests/security/test_federation_passes.py",),
    ),
    Mutant(
        "agent/execution.py",
        "pins of a message that cannot be sent are kept",
        "            if cargo.refs:\n                self.traffic.stayed(cargo.refs)\n",
        "",
        ("tests/refs/test_rref.py",),
    ),
    Mutant(
        "autograd/runner.py",
        "gradients are stored for a pass that has failed elsewhere",
        "            if not record.over and not local.failed:",
        "            if not record.over:",
        ("tests/autograd/test_ends.py",),
    ),
    Mutant(
        "trust/exposure.py",
        "an exception that is exposed to some is given to all",
        "if entry is not None and entry.is_for(self.peer):\n            kind",
        "if entry is not None:\n            kind",
        ("tests/security/test_exposure.py",),
    ),
    Mutant(
        "autograd/contexts.py",
        "a context that is over is joined again by a late message",
        "if id in self._over or rank_of(id) == self._me.id:",
        "if rank_of(id) == self._me.id:",
        ("tests/autograd/test_contexts.py", "tests/autograd/test_ends.py", "tests/autograd/test_leaving.py"),
    ),
    Mutant(
        "autograd/contexts.py",
        "two messages get one id",
        "            self._next_id += count\n",
        "            self._next_id += 1\n",
        ("tests/autograd/test_exact.py",),
    ),
    Mutant(
        "autograd/local_pass.py",
        "a failed pass does not wake its gates",
        "            self._schedule = None\n            self._notify()",
        "            self._schedule = None",
        ("tests/autograd/test_ends.py",),
    ),
    Mutant(
        "autograd/local_pass.py",
        "work is given away for a pass that has failed",
        "            if self._error is not None:\n                raise fresh(self._error)\n"
        "            self._gave_to.add(rank)",
        "            self._gave_to.add(rank)",
        ("tests/autograd/test_ends.py", "tests/autograd/test_lost.py"),
        "the receiver drops what comes for a pass that has failed: the check spares the message",
    ),
    Mutant(
        "autograd/local_pass.py",
        "a worker that has given work is not missed when it dies",
        "rank in self._gave_to or rank in self._got_from or rank in self._waiting.values()",
        "rank in self._gave_to or rank in self._waiting.values()",
        ("tests/autograd/test_lost.py", "tests/autograd/test_deaths.py"),
    ),
    Mutant(
        "autograd/local_pass.py",
        "a pass that is over is noted as aborted",
        "            if not self.record.is_over(self.backward.id):\n                self.record.aborted",
        "            if True:\n                self.record.aborted",
        ("tests/autograd/test_ends.py", "tests/autograd/test_schedule.py", "tests/autograd/test_lost.py"),
        "one number more, until the context ends",
    ),
    Mutant(
        "refs/holdings.py",
        "a share of a message that will not leave is kept",
        "        if late:  # the message",
        "        if False:  # the message",
        ("tests/refs",),
    ),
    Mutant(
        "refs/holdings.py",
        "the failure of a creation is noted after its end",
        "                self._gone[ref] = kept(of_creation(error), self.me.name)\n"
        "            self._creations.pop(ref, None)",
        "                pass\n            self._creations.pop(ref, None)",
        ("tests/refs",),
    ),
    Mutant(
        "refs/holdings.py",
        "dropped references wait for the next tick",
        "        self._dropped.append(ref)\n        if self._agent.watch.asleep and not self._closed:\n"
        "            self._agent.watch.wake()",
        "        self._dropped.append(ref)",
        ("tests/refs", "tests/test_idle.py"),
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
        ("tests/calls", "tests/agent"),
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
        ("tests/calls", "tests/refs/test_rref.py"),
    ),
    Mutant(
        "agent/federated.py",
        "shapes that claim more than their memory are taken",
        "        if claimed(tensors) > self._max_message_bytes:",
        "        if False:",
        ("tests/security/test_federation_calls.py",),
    ),
)
