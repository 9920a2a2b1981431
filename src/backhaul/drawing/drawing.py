"""Drawing: a picture in the formats that users need."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from backhaul.drawing import digraph, vector
from backhaul.drawing.picture import Picture, picture
from backhaul.errors import BackhaulError, MisuseError, OptionError

_log = logging.getLogger(__name__)

_SECONDS = 30.0

LayoutName = Literal["dot", "own"]


class Drawing:
    """The drawing of an autograd context. It does not change when the context continues.

    A notebook displays it automatically. ``dot`` is its text in Graphviz's language and ``svg`` an image; `save` writes
    a file.
    """

    def __init__(self, parts: Sequence[dict[str, Any]], layout: LayoutName | None = None) -> None:
        """``parts`` are the workers' descriptions of the context, as plain data: see `inspection.contexts`.

        ``layout`` is ``"dot"`` for Graphviz or ``"own"``; by default Graphviz if it is installed.
        """
        if layout not in (None, "dot", "own"):
            raise OptionError(f'layout={layout!r} must be "dot", "own", or None for "dot" if Graphviz is installed')
        self.parts = list(parts)
        self._layout = layout

    @cached_property
    def picture(self) -> Picture:
        """The contents, without a layout."""
        return picture(self.parts)

    @cached_property
    def dot(self) -> str:
        """The drawing in the DOT language."""
        return digraph.render(self.picture)

    @cached_property
    def svg(self) -> str:
        """The drawing as an SVG document."""
        program = shutil.which("dot")
        if self._layout == "own" or (self._layout is None and program is None):
            return vector.render(self.picture)
        try:
            found = _graphviz(self.dot, "svg").decode()
        except BackhaulError as error:
            if self._layout == "dot":
                raise
            _log.warning("Graphviz could not draw the context; using Backhaul's own layout: %s", error)
            return vector.render(self.picture)
        return found[found.index("<svg") :]

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        shown = self.picture
        return f"<Drawing of {shown.title}: {len(shown.lanes)} workers, {len(shown.items)} boxes>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file in the format of its suffix: .svg, .dot or .gv; .png and .pdf need Graphviz."""
        ending = check_path(path)
        if ending in (".dot", ".gv"):
            content = self.dot.encode()
        elif ending == ".svg":
            content = self.svg.encode()
        else:
            content = _graphviz(self.dot, ending[1:])
        with open(path, "wb") as file:
            file.write(content)


def check_path(path: str | os.PathLike[str]) -> str:
    """The suffix of a file that a drawing can be saved to. Raises `OptionError`."""
    ending = os.path.splitext(os.fspath(path))[1].lower()
    if ending not in (".svg", ".dot", ".gv", ".png", ".pdf"):
        raise OptionError(f"{os.fspath(path)!r} must end with .svg, .dot, .gv, .png or .pdf")
    if ending in (".png", ".pdf"):
        _program(ending)
    return ending


def _program(ending: str) -> str:
    program = shutil.which("dot")
    if program is None:
        raise MisuseError(
            f"a {ending} needs Graphviz, whose program `dot` is not installed; install it (package graphviz), or draw "
            "a .svg, which Backhaul can do by itself"
        )
    return program


def _graphviz(source: str, format: str) -> bytes:
    """Graphviz's output for a text in the DOT language. Raises `MisuseError`, or `BackhaulError` if Graphviz fails."""
    program = _program(f".{format}")
    try:
        done = subprocess.run(
            [program, f"-T{format}"], input=source.encode(), capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackhaulError(f"{program} could not draw the graph: {error}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise BackhaulError(f"{program} failed with status {done.returncode}: {said[:500]}")
    return done.stdout
