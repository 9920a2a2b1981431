"""Which test files take long. `make test` starts with them, and `make quick` leaves most of them out."""

from __future__ import annotations

import functools
import re
from pathlib import Path

_HERE = Path(__file__).parent

# Modules that start processes. Every file that imports one, directly or through another file of this folder, does so
# too.
_STARTERS = {"subprocess", "multiprocessing", "torch.multiprocessing", "backhaul.cluster"}
_IMPORT = re.compile(r"^ *(?:from ([\w.]+) import *([\w ,]*)|import ([\w.]+))", re.MULTILINE)

# The files that take longest. `make test` begins with them: at the end one process would be busy with them alone.
LONGEST = (
    *("test_examples.py", "test_docs.py", "test_bench.py", "test_cluster.py", "test_conformance.py"),
    *("faults/test_chaos.py", "autograd/test_programs.py", "test_processes.py", "dropin/test_dropin_programs.py"),
    *("autograd/test_ddp.py", "autograd/test_ddp_graphs.py", "test_remote_profile.py", "test_rendezvous.py"),
    *("dropin/test_dropin_installing.py", "test_launchers.py", "bench/test_entrants.py", "bench/test_explain.py"),
    *("launch/test_run.py", "profiler/test_profile.py", "checkpoint/test_resume_loop.py", "seeing/test_live.py"),
    *("seeing/test_stuck_live.py", "dropin/test_dropin_command.py", "autograd/test_ddp_failures.py", "test_demo.py"),
    *("bench/test_rest.py", "bench/test_off.py", "agent/test_growth_of_groups.py", "faults/test_turns.py"),
    *("wire/test_decoder_fuzz.py", "agent/test_link_simulation.py", "checkpoint/test_checkpoint_resume.py"),
    *("launch/test_interactive.py", "security/test_fuzz_targets.py", "security/test_attacks_members.py"),
)

# Simulations, random programs, fuzzing, plots and mutants start no process but take seconds for each file, too long for
# `make quick`.
LONG = {
    *("agent/test_growth_of_groups.py", "agent/test_link_simulation.py", "autograd/test_adversarial_programs.py"),
    *("autograd/test_hammer.py", "autograd/test_programs.py", "faults/test_chaos.py", "faults/test_turns.py"),
    *("bench/test_plot.py", "mutants/test_mutants.py", "refs/test_simulation.py", "security/test_fuzz_targets.py"),
    *("security/test_growth.py", "wire/test_decoder_fuzz.py"),
}


@functools.cache
def _helpers() -> dict[str, Path]:
    """The files of this folder that tests import, by name."""
    return {path.stem: path for path in _HERE.rglob("*.py") if not path.name.startswith(("test_", "conftest"))}


@functools.cache
def _imports(path: Path) -> set[str]:
    """The modules that a file imports, found in its text, because importing the file would take much longer."""
    names = set()
    for package, members, module in _IMPORT.findall(path.read_text()):
        names.add(package or module)
        names |= {f"{package}.{member.split()[0]}" for member in members.split(",") if member.strip()}
    return names


@functools.cache
def starts_processes(path: Path) -> bool:
    """Whether a file of tests imports what starts processes."""
    looked_at, to_look_at = set(), {path}
    while to_look_at:
        looked_at |= to_look_at
        names = set().union(*map(_imports, to_look_at))
        if names & _STARTERS:
            return True
        to_look_at = {_helpers()[name] for name in names & _helpers().keys()} - looked_at
    return False
