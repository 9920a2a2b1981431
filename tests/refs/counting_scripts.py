"""Scripts for `Counting`, one transition at a time: what each worker is told, and what it answers, word for word.

A script is a table of ``worker, call, answer``. The workers are O (usually the owner), U (the creator of the value), V
and W. Messages are carried by hand, so a script reads like a drawing of the race that it tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backhaul.ids import RefId, ShareId
from backhaul.refs.actions import Action
from backhaul.refs.counting import Counting

O, U, V, W = range(4)  # noqa: E741
X = RefId(O, U, 1)  # a value of O's that U made
Y = RefId(O, O, 1)  # one that O made
FROM_O, FROM_U, FROM_V, FROM_W = (ShareId(rank, 1) for rank in (O, U, V, W))
LINK, OTHER = "a connection", "another one"

Step = tuple[int, Callable[[Counting], Any], Any]


class Do:
    """``Do.share(X, V)`` is a call of that method, to be made later."""

    def __getattr__(self, name: str) -> Callable[..., Callable[[Counting], Any]]:
        return lambda *args, **kwargs: lambda counting: getattr(counting, name)(*args, **kwargs)


do: Any = Do()


def hears(peer: int, notice: Any) -> Callable[[Counting], list[Action]]:
    return lambda counting: counting.handle(peer, notice)


def play(*scripts: list[Step]) -> dict[int, Counting]:
    """Play these scripts, and return the workers."""
    workers = {rank: Counting(rank) for rank in (O, U, V, W)}
    for counting in workers.values():
        for rank in workers:
            counting.joined(rank)
    for number, (rank, call, answer) in enumerate(step for script in scripts for step in script):
        assert call(workers[rank]) == answer, f"step {number}, worker {'OUVW'[rank]}"
    return workers
