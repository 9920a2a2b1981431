"""The outcomes of an adversarial program on Backhaul and in one process, compared."""

from __future__ import annotations

import re
from typing import Any

import torch
from adversarial import Program
from adversarial_places import Outcome, grad_before
from adversarial_words import Pair
from torch import Tensor
from torch.masked import MaskedTensor

REFUSALS: tuple[tuple[str, str], ...] = (
    # A feature of a program, and a part of the error that refuses it. All of these are in docs/autograd.md.
    ("part: reentrant checkpoint", "give the checkpoint use_reentrant=False"),
    ("part: reentrant checkpoint", r"When use_reentrant=True, torch\.utils\.checkpoint is incompatible"),
    ("masked bare", "the gradient of a tensor from another worker is a MaskedTensor"),
    ("masked", "the gradient of a MaskedTensor from another worker has another mask"),
    ("masked bare", "_set_data_mask"),  # torch cannot add one to an existing .grad
    ("jagged", "Recomputed values for the following tensors have different metadata"),
    ("part: func.grad", r"torch\.func"),
    ("part: vmap", r"torch\.func"),
    ("part: vjp", r"torch\.func"),
)


class Mismatch(AssertionError):
    """Backhaul and one process do not agree."""


class NotRefused(Mismatch):
    """One process raises an error, and Backhaul does not."""


def refusal(program: Program, error: BaseException) -> str | None:
    """The documented refusal that this error is, if any."""
    for feature, text in REFUSALS:
        if program.features[feature] and re.search(text, str(error)):
            return f"refused: {text}"
    return None


def compare(program: Program, expected: list[Outcome], found: list[Outcome]) -> int:
    """Compare two outcomes. Raises `Mismatch`. Returns how many gradients are equal bit by bit."""
    rule = _Comparison(program)
    for rank, (want, have) in enumerate(zip(expected, found, strict=True)):
        rule.worker(f"worker{rank}", want, have, rank)
    return rule.exact


class _Comparison:
    def __init__(self, program: Program) -> None:
        self.program = program
        features = program.features
        low = any("bfloat16" in leaf.dtype for leaf in program.leaves)
        if features["with: autocast"] or features["half"] or low:
            self.tolerance = 6e-2
        else:
            coarse = any(each.dtype == "float32" for each in (*program.leaves, *program.modules)) or features["float"]
            self.tolerance = 2e-4 if coarse else 1e-9
        self.compiled = any("compiled" in feature for feature in features)
        self.exact = 0

    def worker(self, where: str, want: Outcome, have: Outcome, rank: int) -> None:
        for step, (mine, theirs) in enumerate(zip(want.gradients, have.gradients, strict=True)):
            for name in {**mine, **theirs}:
                what = f"gradient of {name} on {where} in step {step}"
                self.same(what, mine.get(name), theirs.get(name))
        if self.program.accumulate == "context":
            for leaf in self.program.leaves:
                if leaf.worker == rank and leaf.requires_grad:
                    before = grad_before(leaf) if "has a .grad before" in leaf.flags else None
                    self.same(f".grad of {leaf.name} on {where}", before, have.grads[leaf.name])
        for name in {**want.values, **have.values}:
            self.same(f"{name} on {where} at the end", want.values.get(name), have.values.get(name))
        for name in {**want.seen, **have.seen}:
            (kind, value), (its, got) = want.seen.get(name, ("", None)), have.seen.get(name, ("", None))
            if kind.replace("Parameter", "Tensor").replace("Weight", "Tensor") != its.replace(
                "Parameter", "Tensor"
            ).replace("Weight", "Tensor"):
                raise Mismatch(f"{name} on {where} is a {its!r}, in one process a {kind!r}")
            self.same(f"{name} on {where}", value, got)
        for name in {**want.retained, **have.retained}:
            self.same(f"retained grad of {name} on {where}", want.retained.get(name), have.retained.get(name))
        self.events(where, want, have)

    def events(self, where: str, want: Outcome, have: Outcome) -> None:
        for name in dict.fromkeys(name for name, _ in (*want.events, *have.events)):
            mine = [given for each, given in want.events if each == name]
            theirs = [given for each, given in have.events if each == name]
            if name.startswith("post-accumulate") and self.program.accumulate == "context":
                mine, theirs = mine[:1], theirs[:1]  # in a context each pass shows only its own gradient
            mine, theirs = ([given for given in calls if _counts(given)] for calls in (mine, theirs))
            if len(mine) != len(theirs):
                raise Mismatch(
                    f"{name!r} on {where}: called {len(theirs)} times, with {theirs}; "
                    f"in one process {len(mine)} times, with {mine}"
                )
            for one, other in zip(mine, theirs, strict=True):
                for a, b in zip(one, other, strict=True):
                    self.same(f"what {name!r} on {where} was called with", a, b)
        if len(self.program.passes) * self.program.iterations == 1:
            called = [name for name, _ in have.events]
            for first, second in want.orders:
                if first in called and second in called and called.index(first) > called.index(second):
                    raise Mismatch(f"{second!r} on {where} was called before {first!r}, which comes first")

    def same(self, what: str, want: Tensor | None, have: Tensor | None) -> None:
        """Whether two gradients are equal. None counts as zero."""
        if want is not None and have is not None:
            kinds = [_brief(each) for each in (want, have)]
            if kinds[0] != kinds[1]:
                raise Mismatch(f"{what} is {kinds[1]}, in one process {kinds[0]}")
        mine, theirs = _solid(want), _solid(have)
        if mine is None and theirs is None:
            return
        if mine is not None and theirs is not None and torch.equal(mine, theirs):
            self.exact += 1
            return
        if mine is None or theirs is None:
            other = theirs if mine is None else mine
            if other is not None and not float(other.abs().max()) <= self.tolerance:
                raise Mismatch(f"{what} is {have}, in one process {want}")
            return
        if mine.shape != theirs.shape:
            raise Mismatch(f"{what} is {have}, in one process {want}")
        wide = torch.complex128 if mine.is_complex() else torch.float64
        mine, theirs = mine.to(wide), theirs.to(wide)
        if torch.equal(mine.isnan(), theirs.isnan()):
            mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
        difference = float((mine - theirs).abs().max())
        if not difference <= self.tolerance * max(1.0, float(mine.abs().max())):
            raise Mismatch(f"{what} is off by {difference:.3g}: {have}, in one process {want}")


def _counts(given: list[Tensor | None]) -> bool:
    """Whether a call of a hook matters. Calls with zeros, or without a gradient, may be missing."""
    return not given or any(_solid(each) is not None for each in given)


def _solid(value: Any) -> Tensor | None:
    """The values of a tensor as a dense tensor; None if it is zero or empty."""
    if value is None:
        return None
    value = value.detach()
    if isinstance(value, Pair):
        value = torch.stack([value.first, value.second])
    elif isinstance(value, MaskedTensor):
        value = torch.stack([value.to_tensor(0.0), value.get_mask().to(value.dtype)])
    elif value.is_nested:
        value = value.values()
    elif hasattr(value, "full_tensor"):
        value = value.full_tensor()
    elif value.layout is not torch.strided:
        value = value.to_dense()
    value = value.as_subclass(Tensor)
    return value if value.numel() and value.count_nonzero() else None


def _brief(tensor: Any) -> str:
    kind = type(tensor).__name__.replace("Parameter", "Tensor").replace("Weight", "Tensor")
    shape = "" if tensor.is_nested else tuple(tensor.shape)
    return f"{kind} {tensor.dtype} {shape} {tensor.layout}"
