"""torch's own test suites for RPC and distributed autograd, from the installed wheel, made to fork instead of spawn."""

from __future__ import annotations

import importlib
import sys
import unittest
from typing import Any

NAMES = (
    "RpcTest",
    "DistAutogradTest",
    "TensorPipeAgentRpcTest",
    "TensorPipeAgentDistAutogradTest",
    "JitRpcTest",
    "JitDistAutogradTest",
    "FaultyAgentRpcTest",
    "FaultyAgentDistAutogradTest",
    "JitFaultyAgentRpcTest",
    "RemoteModuleTest",
    "ThreeWorkersRemoteModuleTest",
    "DistOptimizerTest",
    "DdpUnderDistAutogradTest",
    "DdpComparisonTest",
    "ParameterServerTest",
    "ReinforcementLearningRpcTest",
)
_INTERNAL = "torch.testing._internal.distributed"

UNSKIPPED = {"RpcTest": ("test_profiler_rpc_key_names",)}
"""Tests that torch skips on Linux because of its issue 125365. They run here, and count like any other."""


def load() -> dict[str, type[unittest.TestCase]]:
    """The suites by their names. Imports torch, and the module that then replaces ``torch.distributed.rpc``."""
    utils: Any = importlib.import_module(f"{_INTERNAL}.rpc_utils")
    plain: Any = importlib.import_module(f"{_INTERNAL}.rpc.tensorpipe_rpc_agent_test_fixture")
    faulty: Any = importlib.import_module(f"{_INTERNAL}.rpc.faulty_rpc_agent_test_fixture")
    found: dict[str, type[unittest.TestCase]] = {}
    for fixture, suites in (
        (plain.TensorPipeRpcAgentTestFixture, utils.GENERIC_TESTS + utils.TENSORPIPE_TESTS),
        (faulty.FaultyRpcAgentTestFixture, utils.FAULTY_AGENT_TESTS),
    ):
        for suite in suites:
            # torch is imported once, in the process that forks the ranks of a test: half a second instead of fifteen.
            body: dict[str, Any] = {"_spawn_processes": _fork_processes, "__module__": __name__}
            name = suite.__name__
            for test in UNSKIPPED.get(name, ()):
                if hasattr(getattr(suite, test, None), "__unittest_skip__"):
                    body[test] = getattr(suite, test).__wrapped__
            found[name] = type(name, (suite, fixture, utils.SpawnHelper), body)
            setattr(sys.modules[__name__], name, found[name])
    return {name: found[name] for name in NAMES}


def _fork_processes(self: Any) -> None:
    import torch

    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def tests(suites: dict[str, type[unittest.TestCase]]) -> list[str]:
    """All tests, as ``Suite.test``."""
    loader = unittest.TestLoader()
    return [f"{name}.{test}" for name, suite in suites.items() for test in loader.getTestCaseNames(suite)]
