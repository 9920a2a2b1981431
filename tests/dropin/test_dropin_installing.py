"""`backhaul.dropin.install`: what it replaces, and when it is too late. The cases are in install_cases.py."""

from __future__ import annotations

import functools
import json

import pytest
from dropin_runs import KINDS, run
from install_cases import ANY_TORCH, WITH_RPC

pytestmark = pytest.mark.timeout(300)

CASES = [(kind, case) for kind in KINDS for case in (*ANY_TORCH, *(WITH_RPC if kind == "torch" else ()))]


@functools.cache
def problems(kind: str) -> dict[str, str]:
    """The errors of the cases, with this kind of torch."""
    found: dict[str, str] = json.loads(
        run("install_cases.py", *(case for each, case in CASES if each == kind), kind=kind)
    )
    return found


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_install(kind: str, case: str) -> None:
    problem = problems(kind)[case]
    assert not problem, problem


@pytest.mark.parametrize("kind", KINDS)
def test_the_tested_kinds_of_torch_differ(kind: str) -> None:
    """The three kinds of torch really differ; otherwise the cases would prove nothing."""
    show = (
        "import torch, torch.distributed as dist\n"
        "print(hasattr(torch._C, '_rpc_init'), hasattr(dist, 'rpc') and dist.rpc.is_available())\n"
        "import torch.distributed.rpc\n"
    )
    if kind == "torch":
        assert run("-c", show) == "True True\n"
    elif kind == "built":
        assert run("-c", show, kind=kind) == "False False\n"
    else:
        with pytest.raises(AssertionError, match=r"False False\n[\s\S]*No module named 'torch.distributed.rpc'"):
            run("-c", show, kind=kind)
