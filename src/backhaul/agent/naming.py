"""Naming: the readable name of the function of a request, found without unpacking the arguments."""

from __future__ import annotations

from typing import Any

from backhaul.wire import trees

_INVOKE = "backhaul.refs.proxy:invoke"
_FETCH = "to_here"


def name_of_request(message: Any) -> str:
    """The function that a message calls, such as ``mymodule.train_step``. For other messages, the kind of message."""
    tree = getattr(message, "tree", None)
    if not isinstance(tree, list) or len(tree) < 3 or tree[0] != trees.TUPLE:
        return type(message).__name__
    name = _first_text(tree[1])
    if name is None:
        return type(message).__name__
    if name == _INVOKE and isinstance(tree[2], list) and len(tree[2]) > 2 and isinstance(tree[2][2], str):
        return f"method {tree[2][2]}"
    return name.replace(":", ".")


def short_name(what: str, message: Any = None) -> str:
    """The name under which both ends of a call count it. ``what`` is its name in errors.

    ``message`` is the request if it came from a peer. It is needed because a method of a reference arrives as a call of
    an internal function.
    """
    if message is not None and (asked := name_of_request(message)).startswith("method "):
        return asked
    return _FETCH if what.startswith(f"{_FETCH} of ") else what


def _first_text(tree: Any) -> str | None:
    if isinstance(tree, str):
        return tree
    if isinstance(tree, list):
        return next((found for part in tree if (found := _first_text(part)) is not None), None)
    return None
