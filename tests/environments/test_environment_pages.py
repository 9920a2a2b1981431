"""What docs/clusters.md shows of `environments`: its table of variables, the contradiction, and the doctor's table."""

from __future__ import annotations

import re
from pathlib import Path

from backhaul.doctor.environment import examine
from backhaul.doctor.report import Report
from backhaul.environments.table import read

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "RANK": "1",
}


def after(heading: str) -> str:
    """A section of the page."""
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def block(section: str, start: str) -> list[str]:
    """The lines of the indented block that starts like this."""
    text = section.partition(f"\n    {start}")[2].partition("\n\n")[0]
    assert text, f"there is no block {start}"
    return [line.strip() for line in (start + text).splitlines()]


def test_the_table_has_variables_that_are_read() -> None:
    table = "\n".join(re.findall(r"^\|.*\|$", after("How a worker finds its place"), re.MULTILINE))
    named = {name for name in re.findall("`(.+?)`", table) if re.fullmatch("[A-Z_]+(<TASK>)?[A-Z_]+", name)}
    assert {"RANK", "SLURM_PROCID", "JOBSET_COORDINATOR", "VC_<TASK>_NUM"} < named
    sources = "".join(path.read_text() for path in (ROOT / "src/backhaul/environments").glob("*.py"))
    assert not [name for name in named if f'"{name.replace("<TASK>", "{task}")}"' not in sources]


def test_the_contradiction_of_the_page() -> None:
    shown = " ".join(block(after("Launchers inside launchers"), "OptionError: "))
    assert shown == "OptionError: " + read({**TASK, "SLURM_PROCID": "2"}).rank.problem


def test_the_doctor_s_table_of_the_page() -> None:
    lines: list[str] = []
    examine(Report(lines.append), read({**TASK, "BACKHAUL_KEY_FILE": "/home/me/cluster.key"}))
    assert [line.strip() for line in lines] == block(after("What backhaul doctor says"), "place")
