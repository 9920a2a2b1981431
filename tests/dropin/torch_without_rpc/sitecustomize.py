"""With this directory in PYTHONPATH, a process has a torch without RPC from its start.

TORCH_WITHOUT_RPC says which kind:

- ``built``: as with ``USE_RPC=0``: no C++ part; the Python files say that RPC is not available
- ``gone``: the Python files are gone too. Torch's other modules still import one of them, so an empty module
  takes its place while torch is imported
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

KIND = os.environ["TORCH_WITHOUT_RPC"]
IN_C = ("_rpc_init", "_dist_autograd_init", "_faulty_agent_init", "_distributed_rpc", "_distributed_autograd")
GONE = (
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch.distributed.optim.optimizer",
    "torch.distributed.nn.api",
)


def within(name, packages=GONE):
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


class Nothing:
    """Loads a module that says that it is not available."""

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.is_available = lambda: False


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torch._jit_internal":
            # At this point torch's C++ part is loaded, and no Python part yet that looks for RPC in it.
            for each in IN_C:
                if hasattr(sys.modules["torch._C"], each):
                    delattr(sys.modules["torch._C"], each)
                sys.modules.pop(f"torch._C.{each}", None)
        if KIND == "gone" and within(name):
            return ModuleSpec(name, Nothing()) if sys.modules["torch"].__spec__._initializing else None
        spec = super().find_spec(name, path, target)
        if name == "torch" and KIND == "gone":
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                for each in [each for each in sys.modules if within(each)]:
                    package, _, last = each.rpartition(".")
                    del sys.modules[each]
                    delattr(sys.modules[package], last)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
