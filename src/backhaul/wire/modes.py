"""Modes of torch that belong to the reading thread, and not to the thread that a message is for.

A thread that waits for its reply reads the messages of others on the way. Inside of `inference_mode`, of a
`FakeTensorMode` or of a transform of ``torch.func``, ``torch.empty`` gives a tensor of another kind, perhaps without
memory. So what arrives is made outside of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack, is_inference_mode_enabled


def are_on() -> bool:
    """Whether this thread is in a mode that changes what tensors are made."""
    return is_inference_mode_enabled() or _len_torch_dispatch_stack() > 0 or _are_functorch_transforms_active()


@contextmanager
def off() -> Iterator[None]:
    """Inside the block no such mode is on."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # few need it, and it takes its time
    from torch.utils._python_dispatch import _disable_current_modes

    with torch.inference_mode(False), temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield
