"""The mutants of `make mutants` still fit the code: a rename must not make one of them disappear unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_hand import MUTANTS
from by_rule import changes_of, sample
from mutant import Mutant
from pure import EXCUSES, MODULES

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "backhaul"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.what}")
def test_a_mutant_by_hand_applies(mutant: Mutant) -> None:
    source = (PACKAGE / mutant.file).read_text()
    assert source.count(mutant.old) == 1, "its old text does not occur once: change by_hand_*.py with the code"
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert [path for path in mutant.tests if not (ROOT / path).exists()] == []


def test_no_mutant_by_hand_is_listed_twice() -> None:
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("file", MODULES)
def test_each_pure_module_and_its_tests_exist(file: str) -> None:
    assert len(changes_of((PACKAGE / file).read_text())) >= 10
    assert [path for path in MODULES[file] if not (ROOT / path).exists()] == []


def test_each_excuse_names_an_existing_mutant() -> None:
    keys = {file: {change.key for change in changes_of((PACKAGE / file).read_text())} for file, _ in EXCUSES}
    assert [(file, key) for file, key in EXCUSES if key not in keys[file]] == []


SOURCE = '''
class Counter:
    __slots__ = ("count",)

    def add(self, more: int = 1) -> bool:
        """More."""
        if self.full and not 0 <= more < 9:
            raise ValueError(f"too many: {more + 1}")
        self.count += more
        return self.count == 10
'''


def test_the_rules_make_these_changes() -> None:
    assert [change.key.removeprefix("Counter.add: ") for change in changes_of(SOURCE)] == [
        "self.full and not 0 <= more < 9 -> ((self.full) or (not 0 <= more < 9))",
        "self.full and not 0 <= more < 9 -> ((not 0 <= more < 9))",
        "self.full and not 0 <= more < 9 -> ((self.full))",
        "not 0 <= more < 9 -> (0 <= more < 9)",
        "0 <= more < 9 -> (0 < more < 9)",
        "0 <= more < 9 -> (0 <= more <= 9)",
        "0 -> 1",
        "9 -> 10",
        'raise ValueError(f"too many: {more + 1}") -> pass',
        "self.count += more -> pass",
        "self.count += more -> self.count -= more",
        "return self.count == 10 -> return None",
        "self.count == 10 -> (self.count != 10)",
        "10 -> 11",
    ]


def test_only_the_changed_place_differs() -> None:
    changed = next(change for change in changes_of(SOURCE) if change.after == "(self.count != 10)")
    assert changed.line == 10
    assert changed.source == SOURCE.replace("self.count == 10", "(self.count != 10)")


def test_a_sample_does_not_depend_on_lines_but_on_the_seed() -> None:
    changes = changes_of(SOURCE)
    moved = changes_of("\n\n" + SOURCE)
    assert [change.key for change in sample(changes, 5, 0)] == [change.key for change in sample(moved, 5, 0)]
    assert len({tuple(change.key for change in sample(changes, 5, seed)) for seed in range(5)}) > 1
