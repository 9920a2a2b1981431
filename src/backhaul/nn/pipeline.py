"""Pipeline: a sequence of modules on several workers that work on different micro-batches at the same time.

Each stage runs each micro-batch in a separate call. The call leaves its output on the stage's worker, and the next
stage's call fetches it from there. With stages A, B and micro-batches 0, 1, 2::

    caller   A0 B0 A1 B1 A2 B2     starts all calls, then waits for B0, B1, B2
    A        0  1  2               A1 waits for A0: a reference to its output is an argument
    B           0  1  2            B1 waits for B0, and for its input, the output of A1

If a call fails, the calls that wait for it fail too: the later micro-batches of its stage, and the later stages of all
of these micro-batches.
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
    """Runs stages in sequence, as ``nn.Sequential`` does, and splits the batch into ``chunks`` micro-batches.

    The stages are its children ``"0"``, ``"1"``, …, so the keys of its state dict are those of ``nn.Sequential``. The
    output of a stage goes straight to the worker of the next stage; a tuple becomes several arguments. In a federation
    the stages are parties. Their outputs go through the caller, since parties have no references to each other's
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
                    f"stage {index} is a {type(stage).__name__}, but the stages of a pipeline must be RemoteModules. "
                    'For a stage on this worker, give the worker\'s own name, as in RemoteModule("worker0", nn.ReLU)'
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
        """The outputs of the last stage for all micro-batches, concatenated along dim 0.

        Tensors are split along dim 0 as ``torch.chunk`` does. Other arguments, and tensors without dimensions, go
        unchanged to each micro-batch. Raises what a stage raises, after all stages have stopped working on this batch.
        """
        stages = list(self)
        if any(stage._is_party for stage in stages):
            return join(in_turn(stages, split(args, self.chunks)))
        outputs: deque[RRef[Any]] = deque()  # for each micro-batch, the output of the last stage that was started
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
                outputs.popleft()  # drops the last reference, so the last stage's worker frees the value
            return join(results)
        except RpcTimeoutError:
            raise
        except Exception:
            _finish(outputs)
            raise

    def remote_parameters(self) -> list[RRef[nn.Parameter]]:
        """References to the parameters of all stages, in the order of the stages. A shared parameter comes once."""
        return parameter_rrefs(self)

    def _list(self, kind: Kind, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, RRef[Any]]]:
        """A pipeline has no parameters or buffers of its own, so without ``recurse`` the list is empty."""
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
    """The last party's output for each micro-batch. The parties work on different micro-batches at the same time.

    In round r, stage s works on micro-batch r - s. So a stage has one micro-batch at a time, and gets them in order.
    Raises what a stage raises, after the other stages have finished the round.
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
            f"a pipeline splits its tensors along dim 0, and their sizes in dim 0 differ: {found}. To pass a tensor "
            "that the pipeline must not split, put it in a list"
        )
    if chunks == 1 or not tensors:
        return [tuple(args)]
    parts = {index: args[index].chunk(chunks) for index in tensors}
    count = len(parts[tensors[0]])
    return [tuple(parts[i][k] if i in parts else value for i, value in enumerate(args)) for k in range(count)]


def join(values: list[Any]) -> Any:
    """The outputs of all micro-batches as one value."""
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
    """Wait until the stages have finished these outputs, or failed to."""
    futures = []
    for output in outputs:
        with suppress(Exception):
            futures.append(rpc.rpc_async(output.owner(), served.finish, args=(output,)))
    for future in futures:
        with suppress(Exception):
            future.wait()
