"""What `install` must do, case by case. Each case runs in its own process, in which only torch is imported.

    python install_cases.py case …       prints JSON: {case: the error, or nothing}

The processes are forked from one that has imported torch, since that takes seconds. Nothing here may import what
`install` replaces before a case does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from backhaul.dropin import install, is_installed
from backhaul.errors import MisuseError

Case = Callable[[], None]
ANY_TORCH: dict[str, Case] = {}
"""Cases for every torch."""
WITH_RPC: dict[str, Case] = {}
"""Cases for a torch with its own RPC."""


def any_torch(case: Case) -> Case:
    ANY_TORCH[case.__name__] = case
    return case


def with_rpc(case: Case) -> Case:
    WITH_RPC[case.__name__] = case
    return case


def run(statement: str) -> dict[str, Any]:
    """The names that a statement binds."""
    names: dict[str, Any] = {}
    exec(statement, names)
    return names


def library(statement: str, name: str = "some_library") -> ModuleType:
    """A third-party module that has been imported."""
    module = sys.modules[name] = ModuleType(name)
    module.__dict__["__name__"] = name
    exec(statement, module.__dict__)
    return module


@contextmanager
def refused(*words: str, error: type[Exception] = MisuseError) -> Iterator[None]:
    try:
        yield
    except error as raised:
        message = str(raised)
    else:
        raise AssertionError("not refused")
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in {message}"


@any_torch
def every_way_to_import_gives_ours() -> None:
    install()
    assert is_installed()
    for statement in (
        "import torch; x = torch.distributed.rpc",
        "import torch.distributed.rpc as x",
        "from torch.distributed import rpc as x",
        "import torch.distributed as dist; x = dist.rpc.api",
        "import torch.distributed.rpc.api as x",
        "from torch.distributed.rpc import api as x",
        "import torch.distributed.rpc.internal as x",
        "import torch.distributed.rpc.rref_proxy as x",
        "import torch.distributed.rpc._testing.faulty_agent_backend_registry as x",
        "import torch; x = torch.distributed.rpc.backend_registry",
        "import torch.distributed.autograd as x",
        "import torch; x = torch.distributed.autograd",
        "import torch.distributed.optim.optimizer as x",
        "import torch.distributed.optim; x = torch.distributed.optim.optimizer",
        "import torch.distributed.nn.api.remote_module as x",
        "import torch.distributed.nn.api.remote_module; x = torch.distributed.nn.api.remote_module",
        "import torch; x = torch._C._distributed_rpc",
        "import torch._C._distributed_autograd as x",
        "import importlib; x = importlib.import_module('torch.distributed.rpc.options')",
    ):
        assert run(statement)["x"].__name__.startswith("backhaul.dropin."), statement
    for statement in (
        "from torch.distributed.rpc import RRef as x",
        "from torch.distributed.rpc.api import RRef as x",
        "from torch.distributed.rpc import *; x = init_rpc",
        "from torch.distributed.rpc import *; x = rpc_sync",
        "from torch.distributed.rpc import TensorPipeRpcBackendOptions as x",
        "from torch.distributed.autograd import context as x",
        "from torch._C._distributed_rpc import _is_current_rpc_agent_set as x",
        "import torch; x = torch._C._distributed_rpc.PyRRef",
        "from torch.distributed.optim import DistributedOptimizer as x",
        "from torch.distributed.optim.optimizer import DistributedOptimizer as x",
        "from torch.distributed.nn import RemoteModule as x",
        "import torch.distributed.nn as nn; x = nn.RemoteModule",
        "from torch.distributed.nn.api.remote_module import RemoteModule as x",
    ):
        assert run(statement)["x"].__module__.startswith("backhaul."), statement
    assert run("import torch.distributed.rpc as x")["x"].is_available()
    assert run("import torch.distributed.autograd as x")["x"].is_available()
    assert run("from torch.distributed.optim import ZeroRedundancyOptimizer as x")["x"].__module__.startswith("torch.")


@any_torch
def a_module_that_we_do_not_have_is_refused() -> None:
    install()
    for name in (
        "torch.distributed.rpc._utils",  # torch has it
        "torch.distributed.rpc.agent",  # we have it, and torch does not
        "torch.distributed.rpc.something",
        "torch.distributed.rpc._testing.something",
    ):
        with refused(name, "backhaul.dropin", error=ModuleNotFoundError):
            importlib.import_module(name)
        assert name not in sys.modules
    with refused("torch.distributed.autograd.something", error=ModuleNotFoundError):
        importlib.import_module("torch.distributed.autograd.something")
    with refused("something", "backhaul.dropin.rpc", error=ImportError):
        run("from torch.distributed.rpc import something")


@any_torch
def twice_is_once() -> None:
    import multiprocessing.spawn

    install()
    before = dict(sys.modules), list(sys.meta_path), multiprocessing.spawn.get_preparation_data
    install()
    assert before == (sys.modules, sys.meta_path, multiprocessing.spawn.get_preparation_data)


@any_torch
def one_worker_by_torch_s_names() -> None:
    install()
    import torch
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    from torch.distributed.nn import RemoteModule
    from torch.distributed.optim import DistributedOptimizer

    with tempfile.TemporaryDirectory() as directory:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/store")
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
        layer = RemoteModule("me/cpu", torch.nn.Linear, args=(3, 2))
        optimizer = DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.1)
        before = layer.get_module_rref().local_value().weight.clone()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [layer(torch.ones(3)).sum()])
            optimizer.step(context_id)
        assert torch.allclose(layer.get_module_rref().local_value().weight, before - 0.1)
        rpc.shutdown()


def multiples(x: int) -> list[int]:
    return [x, 2 * x]


@any_torch
def torch_s_own_modules_know_our_references() -> None:
    install()
    import torch
    from torch.distributed.rpc import RRef

    ddp = importlib.import_module("torch.nn.parallel.distributed")
    assert ddp.RPC_AVAILABLE
    assert ddp.RRef is RRef
    annotations = importlib.import_module("torch.jit.annotations")
    assert annotations.is_rref(RRef[int])
    assert not annotations.is_rref(list[int])

    assert torch.jit.script(multiples)(3) == [3, 6]  # the compiler checks each annotation


@any_torch
def holding_the_packages_around_is_not_too_late() -> None:
    held = library("import torch; import torch.distributed as dist; from torch.distributed import Store")
    if hasattr(held.dist, "rpc"):
        exec("import torch.distributed.rpc, torch.distributed.autograd", held.__dict__)
    install()
    assert held.dist.rpc.__name__ == "backhaul.dropin.rpc"


@with_rpc
def packages_that_were_imported_before() -> None:
    import torch
    import torch.distributed.nn.api.remote_module
    import torch.distributed.optim

    shards: Any = importlib.import_module("torch.distributed._shard.sharded_tensor.api")
    theirs = torch.distributed.rpc
    assert shards.rpc is theirs
    install()
    assert shards.rpc is torch.distributed.rpc is not theirs
    assert torch.distributed.optim.DistributedOptimizer.__module__.startswith("backhaul.")
    assert torch.distributed.optim.optimizer.__name__ == "backhaul.dropin.optimizer"
    assert torch.distributed.nn.RemoteModule.__module__.startswith("backhaul.")
    assert torch.distributed.nn.api.remote_module.__name__ == "backhaul.dropin.remote_module"


@with_rpc
def too_late_for_a_holder_of_a_module() -> None:
    library("import torch.distributed.rpc as rpc; from torch.distributed import autograd")
    with refused("too late", "some_library.rpc", "some_library.autograd", "python -m backhaul.dropin"):
        install()


@with_rpc
def too_late_for_a_holder_of_a_member() -> None:
    library("from torch.distributed.rpc import RRef as Reference, rpc_sync")
    library("from torch.distributed.autograd import backward", "another")
    library("from torch._C._distributed_rpc import WorkerInfo", "a_third")
    library("from torch.distributed.nn import RemoteModule", "a_fourth")
    held = "another.backward", "a_third.WorkerInfo", "a_fourth.RemoteModule"
    with refused("some_library.Reference", "some_library.rpc_sync", *held):
        install()


@with_rpc
def too_late_for_a_holder_of_the_optimizer() -> None:
    library("from torch.distributed.optim import DistributedOptimizer", "training.loop")
    with refused("training.loop.DistributedOptimizer"):
        install()


@with_rpc
def too_late_for_classes_made_of_it() -> None:
    library(
        "import torch\n"
        "class Options(torch.distributed.rpc.TensorPipeRpcBackendOptions): pass\n"
        "class Caller:\n"
        "    call = torch.distributed.rpc.rpc_sync\n"
    )
    with refused("some_library.Options", "some_library.Caller.call"):
        install()


@with_rpc
def of_many_holders_some_are_named() -> None:
    for number in range(9):
        library("from torch.distributed import rpc", f"library{number}")
    with refused("library0.rpc, library1.rpc, library2.rpc, library3.rpc, library4.rpc and 4 more already came"):
        install()


@with_rpc
def too_late_changes_nothing_and_can_be_mended() -> None:
    import torch

    library("from torch.distributed import rpc")
    before = torch.distributed.rpc, dict(sys.modules), list(sys.meta_path)
    with refused("some_library.rpc"):
        install()
    assert not is_installed()
    assert before == (torch.distributed.rpc, sys.modules, sys.meta_path)
    del sys.modules["some_library"]
    install()
    assert torch.distributed.rpc.__name__ == "backhaul.dropin.rpc"


@with_rpc
def too_late_when_torch_s_rpc_runs() -> None:
    import torch

    def start() -> None:
        rpc = torch.distributed.rpc
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/store")
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)

    with tempfile.TemporaryDirectory() as directory:
        start()
        with refused("too late", "torch's own RPC runs", "python -m backhaul.dropin"):
            install()
        torch.distributed.rpc.shutdown()
    install()


def outcome(case: Case) -> str:
    """Run the case in a child process; returns its error, or nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            case()
            problem = ""
        except BaseException:
            problem = traceback.format_exc()
        os.write(writing, problem.encode()[-4000:])
        os._exit(0 if not problem else 1)
    os.close(writing)
    with open(reading, "rb") as pipe:
        problem = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return problem or ("" if code == 0 else f"the process ended with {code}")


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    cases = {**ANY_TORCH, **WITH_RPC}
    print(json.dumps({name: outcome(cases[name]) for name in sys.argv[1:]}))
