"""Drawings of autograd contexts, from the workers' plain data.

::

    nodes of a worker ──► condensing ──► part          (in `inspection.contexts`)
    parts of all workers ──► picture ──► digraph: text in the DOT language
                                   └───► layout ──► vector: an SVG document
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backhaul.drawing.drawing import Drawing
from backhaul.drawing.picture import mentioned, picture
from backhaul.drawing.vector import render as _render

__all__ = ["Drawing", "mentioned", "svg"]


def svg(parts: Sequence[dict[str, Any]]) -> str:
    """The parts of a context as an SVG document in Backhaul's own layout. It can be embedded in a page as it is.

    A part is a worker's answer to the question ``context``; `mentioned` names the workers to ask next.
    """
    return _render(picture(parts))
