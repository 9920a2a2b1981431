"""The pure modules, the unit tests of each, and why some mutants of them are no mistakes."""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {
    "agent/fate.py": ("tests/agent/test_fate.py",),
    "agent/link_state.py": ("tests/agent/test_link_state.py",),
    "agent/outbox.py": ("tests/agent/test_outbox.py",),
    "agent/pending.py": ("tests/agent/test_pending.py",),
    "agent/role.py": ("tests/agent/test_role.py",),
    "autograd/completion.py": ("tests/autograd/test_completion.py",),
    "autograd/graph.py": ("tests/autograd/test_graph.py",),
    "autograd/schedule.py": ("tests/autograd/test_schedule.py",),
    "devices/discipline.py": ("tests/devices/test_discipline.py",),
    "devices/maps.py": ("tests/devices/test_device_maps.py",),
    "environments/nodelists.py": ("tests/environments/test_nodelists.py",),
    "profiler/clocks.py": ("tests/profiler/test_clocks.py",),
    "profiler/shares.py": ("tests/profiler/test_shares.py",),
    "refs/counting.py": ("tests/refs/test_counting.py",),
    "refs/mailbox.py": ("tests/refs/test_mailbox.py",),
    "refs/rights.py": ("tests/refs/test_counting.py",),
    "security/exposure.py": ("tests/security/test_exposure.py",),
    "security/handshake.py": ("tests/security/test_handshake.py",),
    "security/keys.py": ("tests/security/test_keys.py",),
    "security/penalties.py": ("tests/security/test_penalties.py",),
    "security/permissions.py": ("tests/security/test_exposure.py",),
    "wire/decoder.py": ("tests/wire",),
    "wire/frames.py": ("tests/wire",),
    "wire/lanes.py": ("tests/wire/test_lanes.py",),
    "wire/plain.py": ("tests/wire/test_plain.py",),
    "wire/records.py": ("tests/wire/test_records.py",),
    "wire/trees.py": ("tests/wire/test_trees.py",),
}

EXCUSES: dict[tuple[str, str], str] = {}
"""By file and by the key of the change."""
