"""Pipeline: modules on several workers, one after the other, that work on different parts of a batch at a time.

Each stage runs each micro-batch in a call of its own, which leaves the output where it is made; the next stage's call
fetches it from there. So with stages A, B and micro-batches 0, 1, 2::

    caller   A0 B0 A1 B1 A2 B2     starts all calls, then waits for B0, B1, B2
    A        0  1  2               A1 waits for A0: a reference to its output is an argument
    B           0  1  2            B1 waits for B0, and for its input, the output of A1

A call that fails fails those that wait for it, and so all later micro-batches of its stage, and what is made of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from backhaul import rpc
from backhaul.eager import eager
from backhaul.errors import MisuseError, OptionError, RpcTimeoutError
from backhaul.nn import served
from backhaul.nn.device import devices_fetched
from backhaul.nn.members import Kind, Spread, members, parameter_rrefs
from backhaul.nn.modes import Modes
from backhaul.nn.remote_module import RemoteModule
from backhaul.rpc import RRef


@runtime_checkable
class _NamedTuple(Protocol):
    def _make(self, iterable: Iterable[Any]) -> Any: ...


class Pipeline(Spread):
    """The stages one after the other, as ``nn.Sequential``, with the batch in ``chunks`` micro-batches.

    The stages are its children ``"0"``, ``"1"``, …, so the keys of its state dict are those of ``nn.Sequential``. What
    a stage makes goes straight to the worker of the next one; a tuple makes several arguments. In a federation the
    stages are parties, and what they make goes by way of the caller, since parties have no references to each other's
    values.
    """

    def __init__(self, stages: Iterable[RemoteModule], chunks: int = 1) -> None:
        super().__init__()
        stages = list(stages)
        if not stages:
            raise OptionError("a pipeline needs at least one stage")
        for index, stage in enumerate(stages):
            if not isinstance(stage, RemoteModule):
                raise OptionError(
                    f"stage {index} is a {type(stage).__name__}, and the stages of a pipeline are RemoteModules: for "
                    'one of this worker, give its own name, as in RemoteModule("worker0", nn.ReLU)'
                )
            self.add_module(str(index), stage)
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise OptionError(f"chunks: {chunks!r} must be a number of micro-batches, at least 1")
        self.chunks = chunks

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[RemoteModule]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> RemoteModule:
        return list(self)[index]

    def extra_repr(self) -> str:
        return f"chunks={self.chunks}"

    @eager
    def forward(self, *args: Any) -> Any:
        """What the last stage makes of the arguments, micro-batch by micro-batch, concatenated along dim 0.

        Tensors are split along dim 0 as by ``torch.chunk``; all else, and tensors without dimensions, go to each
        micro-batch as they are. Raises what a stage raises, when no stage works on this batch any more.
        """
        stages = list(self)
        if any(stage._is_party for stage in stages):
            return join(in_turn(stages, split(args, self.chunks)))
        outputs: deque[RRef[Any]] = deque()  # of each micro-batch, by the last stage that was started
        before: list[RRef[Any] | None] = [None] * len(stages)
        takers = [*(stage.on for stage in stages[1:]), rpc.get_worker_info().name]
        mapped = [devices_fetched(stage.on, by) for stage, by in zip(stages, takers, strict=True)]
        modes = Modes.here()
        try:
            for inputs in split(args, self.chunks):
                value: Any = inputs
                for index, stage in enumerate(stages):
                    module = stage.module_rref
                    to_do = (module, stage.device, modes, value, before[index], *filter(None, [mapped[index]]))
                    value = before[index] = rpc.remote(module.owner(), served.step, args=to_do)
                    if index == 0:
                        outputs.append(value)
                    outputs[-1] = value
            del value
            results = []
            while outputs:
                results.append(outputs[0].to_here())
                outputs.popleft()  # and its value, on the last stage's worker
            return join(results)
        except RpcTimeoutError:
            raise
        except Exception:
            _finish(outputs)
            raise

    def remote_parameters(self) -> list[RRef[nn.Parameter]]:
        """References to the parameters of all stages, in the order of the stages; one that is shared comes once."""
        return parameter_rrefs(self)

    def _list(self, kind: Kind, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, RRef[Any]]]:
        """A pipeline has none of its own: without ``recurse`` there are none."""
        found = members([(prefix, self)], kind, recurse, remove_duplicate) if recurse else []
        return ((member.name, member.rref) for member in found)

    def requires_grad_(self, requires_grad: bool = True) -> Pipeline:
        for stage in self:
            stage.requires_grad_(requires_grad)
        return self

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        for stage in self:
            stage.zero_grad(set_to_none)


def in_turn(stages: Sequence[RemoteModule], batches: list[tuple[Any, ...]]) -> list[Any]:
    """What parties make of each micro-batch, one after the other, on different micro-batches at the same time.

    In round r, stage s works on micro-batch r - s. So no stage has two at a time, and each has them in their order.
    Raises what a stage raises, when the others are done with the round.
    """
    values: list[Any] = list(batches)
    for turn in range(len(batches) + len(stages) - 1):
        started: list[tuple[int, Any]] = []
        failure: BaseException | None = None
        for index, stage in enumerate(stages):
            number = turn - index
            if 0 <= number < len(batches) and failure is None:
                value = values[number]
                try:
                    future = stage.forward_async(*(value if isinstance(value, tuple) else (value,)))
                    started.append((number, future))
                except Exception as error:
                    failure = error
        for number, future in started:
            try:
                values[number] = future.wait()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
    return values


def split(args: Sequence[Any], chunks: int) -> list[tuple[Any, ...]]:
    """The arguments of each micro-batch."""
    tensors = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor) and value.dim() > 0]
    sizes = {args[index].shape[0] for index in tensors}
    if len(sizes) > 1:
        found = ", ".join(f"{args[index].shape[0]} (argument {index})" for index in tensors)
        raise OptionError(
            f"the tensors that a pipeline is given have different sizes in dim 0, along which they are split: {found}; "
            "what is not to be split can be given inside of a list"
        )
    if chunks == 1 or not tensors:
        return [tuple(args)]
    parts = {index: args[index].chunk(chunks) for index in tensors}
    count = len(parts[tensors[0]])
    return [tuple(parts[i][k] if i in parts else value for i, value in enumerate(args)) for k in range(count)]


def join(values: list[Any]) -> Any:
    """What the micro-batches have come to, as one value."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, torch.Tensor) and first.dim() > 0:
        return torch.cat(values)
    if isinstance(first, tuple | list):
        items = [join(list(each)) for each in zip(*values, strict=True)]
        return first._make(items) if isinstance(first, _NamedTuple) else type(first)(items)
    if isinstance(first, dict):
        return {key: join([value[key] for value in values]) for key in first}
    if all(value is None for value in values):
        return None
    what = "a tensor without dimensions" if isinstance(first, torch.Tensor) else f"a {type(first).__name__}"
    raise MisuseError(
        f"the last stage of a pipeline returned {what}, which cannot be concatenated along dim 0: let it return "
        "tensors with a batch dimension, alone or in a tuple, list or dict"
    )


def _finish(outputs: Iterable[RRef[Any]]) -> None:
    """Wait until no stage works on these any more, whatever becomes of them."""
    futures = []
    for output in outputs:
        with suppress(Exception):
            futures.append(rpc.rpc_async(output.owner(), served.finish, args=(output,)))
    for future in futures:
        with suppress(Exception):
            future.wait()
