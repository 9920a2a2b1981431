"""What people call the function of a request, without unpacking its arguments."""

from __future__ import annotations

from typing import Any

from backhaul.wire import trees

_INVOKE = "backhaul.refs.proxy:invoke"
_FETCH = "to_here"


def name_of_request(message: Any) -> str:
    """The function that a message asks for, such as ``mymodule.train_step``; the kind of any other message."""
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
    """A name that both ends of a call count it under, of what errors call it.

    ``message`` is the request, if it has come from a peer: a method of a reference arrives as a call of a function of
    ours.
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
