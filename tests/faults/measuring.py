"""The measurements of a fault's test, for the table."""

from __future__ import annotations


class Measure:
    """The measurements of a row: `seconds` for times with a limit, `note` for the rest."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def seconds(self, what: str, found: float, within: float) -> None:
        self._notes.append(f"{what} {found:.2f} s")
        assert found < within, f"{what} took {found:.2f} s; allowed are {within} s"

    def note(self, text: str) -> None:
        self._notes.append(text)
