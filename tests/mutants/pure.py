"""The pure modules, the unit tests of each, and why some of their mutants are not mistakes."""

from __future__ import annotations


def _of_wire(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/wire/test_{name}.py" for name in names)


def _of_refs(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/refs/test_{name}.py" for name in names)


MODULES: dict[str, tuple[str, ...]] = {
    "agent/fate.py": ("tests/agent/test_fate.py",),
    "agent/link_state.py": ("tests/agent/test_link_state.py",),
    "agent/outbox.py": ("tests/agent/test_outbox.py",),
    "agent/pending.py": ("tests/agent/test_pending.py",),
    "agent/role.py": ("tests/agent/test_role.py",),
    "autograd/completion.py": ("tests/autograd/test_completion.py",),
    "autograd/graph.py": ("tests/autograd/test_graph.py",),
    "autograd/schedule.py": ("tests/autograd/test_schedule.py",),
    "checkpoint/index.py": ("tests/checkpoint/test_checkpoint_index.py",),
    "devices/discipline.py": ("tests/devices/test_discipline.py",),
    "devices/handover.py": ("tests/devices/test_handover.py",),
    "devices/maps.py": ("tests/devices/test_device_maps.py",),
    "environments/nodelists.py": ("tests/environments/test_nodelists.py",),
    "launch/course.py": ("tests/launch/test_hosts_course.py",),
    "launch/lease.py": ("tests/launch/test_hosts.py", "tests/launch/test_hosts_course.py"),
    "profiler/clocks.py": ("tests/profiler/test_clocks.py",),
    "profiler/shares.py": ("tests/profiler/test_shares.py",),
    "refs/counting.py": (
        *_of_refs("counting", "lives", "stale_refs"),
        "tests/security/test_federation_references.py",
    ),
    "refs/entries.py": ("tests/refs/test_counting.py", "tests/security/test_rights.py"),
    "refs/mailbox.py": _of_refs("mailbox"),
    "refs/numbers.py": _of_refs("counting"),
    "refs/sweeps.py": _of_refs("sweeps", "counting", "lives"),
    "trust/rights.py": ("tests/security/test_rights.py",),
    "trust/exposure.py": ("tests/security/test_exposure.py", "tests/security/test_federation_calls.py"),
    "security/handshake.py": ("tests/security/test_handshake.py",),
    "security/keys.py": ("tests/security/test_keys.py",),
    "trust/penalties.py": ("tests/security/test_penalties.py",),
    "trust/permissions.py": ("tests/security/test_exposure.py", "tests/security/test_permissions.py"),
    "wire/decoder.py": _of_wire(
        "decoder", "bad_frames", "placed_frames", "device_frames", "slices_apart", "small_tensors"
    ),
    "wire/frames.py": _of_wire(
        "frames", "bad_frames", "placed_frames", "staged_frames", "small_tensors", "tensors", "tensor_tables", "filling"
    ),
    "wire/payload.py": _of_wire(
        "decoder", "bad_frames", "placed_frames", "device_frames", "slices_apart", "lanes", "small_tensors"
    ),
    "wire/lanes.py": _of_wire("lanes", "slices_apart"),
    "wire/plain.py": ("tests/wire/test_plain.py",),
    "wire/records.py": ("tests/wire/test_records.py",),
    "wire/trees.py": _of_wire("trees", "values", "packed_calls", "unsendable_values", "built", "subclass_values"),
}

_ONLY_COST = "it only decides when the heap is rebuilt, which is a matter of cost"
_ONLY_SPEED = "the result is the same; only its time differs"
_ONLY_CHANGES = "only whether the counter has changed matters"

EXCUSES: dict[tuple[str, str], str] = {
    ("agent/link_state.py", "LinkState.heard: 1 -> 2"): _ONLY_CHANGES,
    ("agent/outbox.py", "Outbox.add: 1 -> 2"): "only the order of the numbers matters",
    (
        "agent/outbox.py",
        "Outbox.add: departure.passes and departure.calls and any(map(_may_be_followed, (self.under_way, *self._rest)))"
        " -> ((departure.calls) and (any(map(_may_be_followed, (self.under_way, *self._rest)))))",
    ): "a frame that may not pass is marked as such once more",
    ("agent/outbox.py", "Outbox.next: each.number < number -> (each.number <= number)"): "all numbers differ",
    ("agent/pending.py", "Pending.open: 64 -> 65"): _ONLY_COST,
    ("agent/pending.py", "Pending.open: 2 -> 3"): _ONLY_COST,
    (
        "agent/pending.py",
        "Pending.open: 2 * len(self._slots) + 64 -> ((2 * len(self._slots)) - (64))",
    ): _ONLY_COST,
    (
        "agent/pending.py",
        "Pending.open: len(self._deadlines) > 2 * len(self._slots) + 64"
        " -> (len(self._deadlines) >= 2 * len(self._slots) + 64)",
    ): _ONLY_COST,
    ("agent/role.py", "Role.take: 1 -> 2"): "tokens only have to differ",
    ("autograd/graph.py", "as_one: len(todo) > most -> (len(todo) >= most)"): _ONLY_SPEED,
    (
        "autograd/graph.py",
        "_wants_one_sum: look and node_hooks.on(node) -> ((look))",
    ): "more sources than necessary are run together",
    ("autograd/completion.py", "Ledger.report: True -> False"): "both tuples have two items",
    (
        "devices/handover.py",
        "Streams._wait_on: return -> pass",
    ): "without other streams, the rest enqueues nothing and notes the same",
    ("devices/handover.py", "Streams.begin: self._own or self._make() -> ((self._make()))"): _ONLY_SPEED,
    ("devices/handover.py", "Streams.enter: self._own or self._make() -> ((self._make()))"): _ONLY_SPEED,
    (
        "launch/lease.py",
        "Lease.granted: each > number -> (each >= number)",
    ): "the question stays until the next answer, and a repeated answer to it changes nothing",
    ("environments/nodelists.py", "_short: 200 -> 201"): "it is the length of a text in an error",
    (
        "trust/exposure.py",
        "Table._add: dataclasses.is_dataclass(obj) or is_named_tuple(obj) -> ((dataclasses.is_dataclass(obj)))",
    ): "the first instance makes the checks of the class instead",
    ("trust/permissions.py", ": 300 -> 301"): "it is the length of a text in the log",
    ("trust/permissions.py", "Stamps.__init__: 32 -> 33"): "a key of 33 bytes serves as well",
    ("trust/permissions.py", "_Lines.__init__: 0 -> 1"): "the first line sets it",
    ("trust/permissions.py", "_Lines.__init__: 0.0 -> 1.0"): "the first line sets it",
    ("trust/permissions.py", ": 1e9 -> 1000000001.0"): "the value is an estimate",
    (
        "wire/decoder.py",
        "Decoder.next: self._large is not None and (envelope := self._next_large()) is not None"
        " -> (((envelope := self._next_large()) is not None))",
    ): "`_next_large` itself returns None without a large frame",
    ("wire/frames.py", ": 128 -> 129"): _ONLY_SPEED,
    ("wire/frames.py", ": 1024 -> 1025"): _ONLY_SPEED,
    ("wire/payload.py", ": 512 -> 513"): "it is the size of scratch memory",
    ("wire/trees.py", "Unpacking.lift: 0 <= index < len(tensors) -> (0 < index < len(tensors))"): _ONLY_SPEED,
    ("wire/lanes.py", ": 256 -> 257"): _ONLY_SPEED,
    ("wire/lanes.py", ": 4 * 1024 -> ((4) + (1024))"): _ONLY_SPEED,
    ("wire/lanes.py", "Pace.took: seconds < SHORT -> (seconds <= SHORT)"): _ONLY_SPEED,
}
"""By file and by the key of the change."""
