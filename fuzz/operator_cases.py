"""Calls of the operators that a federation may expose, with any arguments that a peer can make, in forked children.

    python fuzz/operator_cases.py [--cases 1000000] [--seconds 240] [--seed 0]

A case follows from its number. If a signal ends a child, its case would end a worker: the case is printed, and the next
child continues after it. A case is also printed if its result is larger than the operator may make, or takes seconds.
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import random
import signal
import struct
import sys
import time
import warnings
from typing import Any

import torch

from backhaul.trust import operators
from backhaul.wire import headers

LIMIT = 1 << 20
SECONDS = 5.0
BATCH = 20_000

_DTYPES = [dtype for dtype in headers.DTYPES if dtype is not None]
_FLOATS = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 1e-40, 65504.0]
_INTEGERS = [0, 1, -1, 2, 255, 127, -128, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**64, -(2**70)]
_SIZES = [0, 1, 1, 2, 3, 5, 8, 17, 64, 1000, 1 << 14]
_KEYWORDS = [*{name for each in operators.TABLE.values() for name in each.parameters}, "out", "dtype", "rounding_mode"]
_ODD: list[Any] = [None, "trunc", "floor", "", b"x", (), [], {}, torch.float64, torch.strided, 1j, object, slice(None)]


def tensor(choose: random.Random) -> torch.Tensor:
    """A tensor that the decoder accepts, or sometimes one that it refuses."""
    dtype = choose.choice(_DTYPES if choose.random() < 0.3 else [torch.float32, torch.float64, torch.int64, torch.bool])
    shape = [choose.choice(_SIZES) for _ in range(choose.choice([0, 1, 1, 2, 2, 2, 3, 4, 9]))]
    while math.prod(size for size in shape if size) > 1 << 16:
        shape.pop()
    try:
        made = torch.empty(shape, dtype=dtype)
        kind = choose.randrange(4)
        if kind == 0:
            made.fill_(choose.choice(_FLOATS if dtype.is_floating_point else [*_INTEGERS[:7], -(2**63)]))
        elif kind == 1:
            made.random_()
        elif made.numel():
            flat = made.view(-1)
            for place in range(min(4, flat.numel())):
                flat[place] = choose.choice(_FLOATS if dtype.is_floating_point else _INTEGERS[:7])
    except (RuntimeError, TypeError, OverflowError, NotImplementedError):
        made = torch.ones(shape)
    return _twisted(made, choose)


def _twisted(made: torch.Tensor, choose: random.Random) -> torch.Tensor:
    how = choose.randrange(12)
    try:
        if how == 0 and made.dim() > 1:
            return made.transpose(0, -1)
        if how == 1 and made.dim():
            return made[:1].expand(choose.choice([2, 1000, 1 << 40]), *made.shape[1:])
        if how == 2:
            return made.to_sparse()
        if how == 3:
            return made.to("meta")
        if how == 4 and made.dim() == 1 and made.numel() > 4:
            return made.as_strided((made.numel() // 2, 2), (1, 1))
        if how == 5:
            return torch.nn.Parameter(made)
        if how == 6 and made.is_complex():
            return made.conj()
        if how == 7 and made.dim():
            return made.flip(0)[::2]
    except (RuntimeError, TypeError, NotImplementedError):
        pass
    return made


def value(kind: str, choose: random.Random) -> Any:
    """A value for a parameter of this kind, or sometimes of another kind."""
    if choose.random() < 0.08:
        return choose.choice([*_ODD, *_FLOATS, *_INTEGERS, True])
    if kind == "tensor" or (kind == "operand" and choose.random() < 0.7):
        return tensor(choose)
    if kind in ("operand", "number", "bound"):
        return choose.choice([*_FLOATS, *_INTEGERS, True, None])
    if kind == "flag":
        return choose.choice([True, False, 1, None])
    dims = [choose.choice([0, 1, -1, 2, -3, 63, 64, -65, 2**40]) for _ in range(choose.choice([1, 1, 2, 3, 70]))]
    return dims[0] if kind == "dim" or len(dims) == 1 else choose.choice([dims, tuple(dims)])


def case(number: int) -> tuple[str, list[Any], dict[str, Any]]:
    """The operator, its arguments and its keywords."""
    choose = random.Random(number)
    torch.manual_seed(number & (1 << 60) - 1)
    name = choose.choice(sorted(operators.TABLE))
    operator = operators.TABLE[name]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter, kind in operator.parameters.items():
        is_needed = kind in ("tensor", "operand")
        if not is_needed and choose.random() < 0.6:
            continue
        if not kwargs and choose.random() < 0.8:
            args.append(value(kind, choose))
        else:
            kwargs[parameter] = value(kind, choose)
    if choose.random() < 0.05:
        kwargs[choose.choice(_KEYWORDS)] = choose.choice([*_ODD, tensor(choose)])
    return name, args, kwargs


def attempt(number: int) -> str:
    """Run a case. Returns what was found, if anything."""
    name, args, kwargs = case(number)
    began = time.monotonic()
    try:
        result = operators.Bounded(operators.TABLE[name], LIMIT)(*args, **kwargs)
    except Exception:
        return ""
    if time.monotonic() - began > SECONDS:
        return "it takes too long"
    if not isinstance(result, torch.Tensor) or result.numel() * result.element_size() > LIMIT:
        return "its result is too large"
    return ""


def describe(number: int) -> str:
    name, args, kwargs = case(number)

    def text(each: Any) -> str:
        if not isinstance(each, torch.Tensor):
            return f"{each!r:.60}"
        return f"{each.dtype}{list(each.shape)} {each.layout} {each.device}"

    given = [*map(text, args), *(f"{key}={text(each)}" for key, each in kwargs.items())]
    return f"case {number}: torch.{name}({', '.join(given)})"


def run(start: int, end: int, progress: mmap.mmap) -> tuple[int, str]:
    """Run cases in a forked child. Returns the number of the next case, and what was found."""
    end = min(end, start + BATCH)
    child = os.fork()
    if not child:
        code = 1
        try:
            code = _run_child(start, end, progress)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    reached, wrong = struct.unpack("<QQ", progress[:16])
    if os.WIFSIGNALED(status):
        return reached + 1, f"{signal.Signals(os.WTERMSIG(status)).name}, {describe(reached)}"
    if os.WEXITSTATUS(status):
        what = "it takes too long or makes too much" if wrong else "it fails"
        return reached + 1, f"{what}: {describe(reached)}"
    return end, ""


def _run_child(start: int, end: int, progress: mmap.mmap) -> int:
    for number in range(start, end):
        progress[:16] = struct.pack("<QQ", number, 0)
        if attempt(number):
            progress[:16] = struct.pack("<QQ", number, 1)
            return 2
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=int, default=0, help="stop after the batch at this time; 0 sets no limit")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # warnings of torch about kinds of tensors
    torch.set_num_threads(1)  # a forked child would wait for torch's threads, which it does not have
    began = time.monotonic()
    progress = mmap.mmap(-1, 16)
    position, end, found = options.seed, options.seed + options.cases, 0
    while position < end and not 0 < options.seconds < time.monotonic() - began:
        position, finding = run(position, end, progress)
        if finding:
            found += 1
            print(finding, flush=True)
    print(f"{position - options.seed} cases in {time.monotonic() - began:.0f} s, {found} found", flush=True)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
