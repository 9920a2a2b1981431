"""Turns off the modes of torch of the reading thread while it makes tensors, which may be for another thread.

A thread that waits for its reply also reads messages for other threads. In `inference_mode`, in a `FakeTensorMode` or
in a transform of ``torch.func``, ``torch.empty`` makes another kind of tensor, perhaps without memory. So the tensors
of a message are made outside these modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack, is_inference_mode_enabled


def are_on() -> bool:
    """Whether this thread is in a mode that changes which kind of tensor torch makes."""
    return is_inference_mode_enabled() or _len_torch_dispatch_stack() > 0 or _are_functorch_transforms_active()


@contextmanager
def off() -> Iterator[None]:
    """Turn these modes off inside the block, for this thread."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # rarely needed, and slow to import
    from torch.utils._python_dispatch import _disable_current_modes

    with torch.inference_mode(False), temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield
