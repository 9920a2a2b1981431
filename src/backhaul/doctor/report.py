"""Report: facts in sections, notes and faults; printed as they come, or returned as plain data at the end."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

_LABEL = 16


class Report:
    """Collects findings. ``write`` gets each line of text as soon as it is known."""

    def __init__(self, write: Callable[[str], None], width: int | None = None) -> None:
        """``width`` is the width of the terminal; without it, lines are not wrapped."""
        self._write = write
        self._width = width
        self._sections: dict[str, dict[str, Any]] = {}
        self._section: dict[str, Any] = {}
        self.notes: list[str] = []
        """Worth knowing, but not faults."""
        self.wrong: list[str] = []
        """What will not work, or not well; each says what to do."""

    def title(self, text: str) -> None:
        self._write(text)

    def section(self, name: str) -> None:
        """Start a section; the next facts belong to it."""
        self._section = self._sections.setdefault(name, {})
        self._write(f"\n{name}")

    def fact(self, label: str, text: str, **data: Any) -> None:
        """Add a fact: ``text`` for people, ``data`` for programs if there is more than the text."""
        self._section[label.replace(" ", "_")] = {"text": text, **data}
        self._say(f"  {label:<{_LABEL}}", text)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def fault(self, text: str) -> None:
        if text not in self.wrong:
            self.wrong.append(text)

    def conclude(self) -> None:
        """Write the notes and the faults."""
        for heading, texts in (("notes", self.notes), ("wrong", self.wrong)):
            if texts:
                self._write(f"\n{heading}")
            for number, text in enumerate(texts, 1):
                self._say(f"  {number:>2}. ", text)
        if not self.wrong:
            self._write("\nnothing is wrong")

    def data(self) -> dict[str, Any]:
        return {**self._sections, "notes": self.notes, "wrong": self.wrong}

    def _say(self, start: str, text: str) -> None:
        if self._width is None:
            self._write(start + text)
            return
        self._write(
            textwrap.fill(
                text,
                self._width,
                initial_indent=start,
                subsequent_indent=" " * len(start),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
