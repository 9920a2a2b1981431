"""What the environment says about this worker's place, row by row: which variable won over which others."""

from __future__ import annotations

from backhaul.doctor.report import Report
from backhaul.environments.table import Row, Table

_LABELS = {
    "name": "name",
    "rank": "rank",
    "world_size": "world size",
    "local_rank": "local rank",
    "nodes": "nodes",
    "address": "address",
    "port": "port",
    "restart": "restarts",
    "run": "run",
    "key": "key",
}


def examine(report: Report, said: Table) -> None:
    report.section("place")
    report.fact("started by", ", inside of ".join(said.launchers) or "unknown", launchers=list(said.launchers))
    for field, label in _LABELS.items():
        row: Row = getattr(said, field)
        report.fact(label, _text(row), value=row.value, source=row.source, over=list(row.over), problem=row.problem)
        if row.problem:
            report.fault(row.problem)
    rank, size = said.rank.value, said.world_size.value
    if rank is not None and size is not None and not 0 <= rank < size:
        report.fault(
            f"rank {rank} ({said.rank.source}) is not in 0..{size - 1}, the ranks of a group of {size} workers "
            f"({said.world_size.source})"
        )
    if not said.launchers:
        for hint in said.hints:
            report.note(hint)
    if said.nodes.value is not None and said.nodes.value > 1 and said.key.value is None:
        report.note(
            f"the workers are on {said.nodes.value} nodes ({said.nodes.source}), but the environment names no key: "
            "without BACKHAUL_KEY_FILE and BACKHAUL_HOST, or options that say the same, only workers of one node reach "
            "each other"
        )


def _text(row: Row) -> str:
    if row.problem:
        return "not clear: see below"
    if row.value is None:
        return "-"
    over = f", over {', '.join(row.over)}" if row.over else ""
    return f"{row.value}  ({row.source}{over})"
