"""Distributed programs as plain data. They can be printed, run again and made smaller.

A program is a list of *blocks*, each the body of one function that runs on one worker. Block 0 runs on the *driver*;
a `Call` runs another block, on any worker, with values of the caller, and returns its results to the caller. Names are
local to a block; `Load` and `Keep` access the worker's state: its leaves, and what earlier blocks kept there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Leaf(NamedTuple):
    name: str
    worker: int
    kind: str
    seed: int
    requires_grad: bool
    parameter: bool = False
    hook: bool = False
    post_accumulate_hook: bool = False
    has_grad_before: bool = False


class Op(NamedTuple):
    outs: tuple[str, ...]
    operation: str
    ins: tuple[str, ...]
    number: int


class Load(NamedTuple):
    out: str
    key: str


class Keep(NamedTuple):
    name: str
    key: str


class Call(NamedTuple):
    """Run a block on worker ``to``, or (``direct``) a torch function.

    Modes: ``sync``; ``async``, whose future is ``outs[0]``; ``remote``, whose reference is; ``then``, a future with a
    callback; ``coroutine``, an ``async def`` function; ``forward``, through worker ``via``; ``direct``.
    """

    mode: str
    to: int
    block: int
    args: tuple[str, ...]
    outs: tuple[str, ...]
    form: str
    via: int = -1
    function: str = ""


class Wait(NamedTuple):
    future: str
    outs: tuple[str, ...]


class Fetch(NamedTuple):
    rref: str
    outs: tuple[str, ...]


class Proxy(NamedTuple):
    """``rref.rpc_sync().sin()``"""

    rref: str
    out: str


class Hook(NamedTuple):
    name: str


class Retain(NamedTuple):
    name: str


Instruction = Op | Load | Keep | Call | Wait | Fetch | Proxy | Hook | Retain


def needed_by(instruction: Instruction) -> tuple[str, ...]:
    """The names of its block that it uses."""
    match instruction:
        case Op(_, _, names, _) | Call(_, _, _, names):
            return names
        case Wait(name) | Fetch(name) | Proxy(name) | Hook(name) | Retain(name) | Keep(name):
            return (name,)
        case _:
            return ()


def made_by(instruction: Instruction) -> tuple[str, ...]:
    """The names that it makes."""
    match instruction:
        case Op(outs) | Call(_, _, _, _, outs) | Wait(_, outs) | Fetch(_, outs):
            return outs
        case Load(out) | Proxy(_, out):
            return (out,)
        case _:
            return ()


class Block(NamedTuple):
    worker: int
    params: tuple[str, ...]
    code: tuple[Instruction, ...]
    results: tuple[str, ...]
    form: str  # how values travel: "tuple", "dict", or "bare" for a single value


class Root(NamedTuple):
    name: str
    grad_kind: str = ""  # the kind of its grad_tensor; "" for none
    grad_seed: int = 0


class Pass(NamedTuple):
    """One backward by ``initiator``. On the driver the roots are names of block 0; elsewhere they are kept values."""

    initiator: int
    roots: tuple[Root, ...]
    retain_graph: bool


def _brief(item: Any) -> str:
    """The item as Python text, without defaults."""
    defaults = item._field_defaults
    fields = [f"{key}={value!r}" for key, value in item._asdict().items() if value != defaults.get(key, ...)]
    return f"{type(item).__name__}({', '.join(fields)})"


@dataclass(frozen=True)
class Program:
    seed: int
    size: int
    driver: int
    leaves: tuple[Leaf, ...]
    blocks: tuple[Block, ...]
    passes: tuple[Pass, ...]
    accumulate: Literal["context", "grad"]
    tolerance: float
    features: Counter[str]

    def __str__(self) -> str:
        lines = [f"program {self.seed}: {self.size} workers, driver {self.driver}, accumulate={self.accumulate!r}"]
        lines += [f"  {_brief(leaf)}" for leaf in self.leaves]
        for index, block in enumerate(self.blocks):
            lines.append(f"  block {index} on worker {block.worker}, of {', '.join(block.params) or 'nothing'}:")
            lines += [f"    {_brief(instruction)}" for instruction in block.code]
            lines.append(f"    returns {', '.join(block.results) or 'nothing'} ({block.form})")
        lines += [f"  {_brief(each)}" for each in self.passes]
        return "\n".join(lines)
