"""A mistake that an engineer could make, and the tests that must notice it."""

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
