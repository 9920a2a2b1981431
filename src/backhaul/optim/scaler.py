"""GradScaler: scales losses over several workers, so that small gradients do not vanish in half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from backhaul.devices.host import on_cpu
from backhaul.errors import MisuseError, OptionError, PartialError
from backhaul.optim import gradients, local
from backhaul.optim.distributed import DistributedOptimizer
from backhaul.optim.parties import refuse


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for `DistributedOptimizer`: an infinite gradient on any worker skips the step on all.

    The methods and arguments are torch's; `unscale_` and `step` also take the id of an autograd context. Ordinary
    optimizers of this worker work too, and state dicts are interchangeable with torch's.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not isinstance(device, str):
            raise OptionError(f"device must be the device type of the loss, such as 'cpu', not {device!r}")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def unscale_(self, optimizer: torch.optim.Optimizer, context_id: int | None = None) -> None:
        """Divide the gradients of a context, or ``.grad``, by the scale on all workers.

        Call it before `step` to read or clip the gradients; otherwise `step` calls it. If it fails on some workers
        only, it raises `PartialError`. Do not use the gradients then: `step` will skip them.
        """
        if not self.is_enabled():
            return
        if isinstance(optimizer, DistributedOptimizer):
            gradients.require(context_id)
        elif context_id is not None:
            raise OptionError(f"{type(optimizer).__name__} steps with .grad, not with a context: omit context_id")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            state["context_id"] = context_id
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``step(optimizer, context_id=None)``: unscale the gradients unless that is done, and step if all are finite.

        With an ordinary optimizer, the arguments go to its ``step``.
        """
        if not isinstance(optimizer, DistributedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        return self._step(optimizer, *args, **kwargs)

    def _step(self, optimizer: DistributedOptimizer, context_id: int | None = None) -> float | None:
        if self.is_enabled():
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer, context_id)
            elif state.get("context_id") != context_id:
                raise MisuseError(
                    f"unscale_() was called with context {state.get('context_id')}, and step() with {context_id}: "
                    "give both the same context_id"
                )
        return super().step(optimizer, context_id)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, DistributedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        refuse(optimizer._parties, "a GradScaler")
        state = self._per_optimizer_states[id(optimizer)]
        try:
            found = optimizer._everywhere(
                "unscaling gradients", local.unscale, state.get("context_id"), on_cpu(inv_scale)
            )
        except PartialError:
            # Some gradients are unscaled and some are not. Unscaling again would be wrong, and so would a step.
            state["stage"] = OptState.UNSCALED
            state["found_inf_per_device"] = {found_inf.device: found_inf.fill_(1.0)}
            raise
        checked = [value for value in found.values() if value is not None]
        return {found_inf.device: found_inf.fill_(max(checked))} if checked else {}
