"""What the test of a fault has measured, for the table."""

from __future__ import annotations


class Measure:
    """What a row has measured: `seconds` for what has a limit, `note` for the rest."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def seconds(self, what: str, found: float, within: float) -> None:
        self._notes.append(f"{what} {found:.2f} s")
        assert found < within, f"{what} took {found:.2f} s; allowed are {within} s"

    def note(self, text: str) -> None:
        self._notes.append(text)
