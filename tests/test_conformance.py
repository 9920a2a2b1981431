"""torch's own suites on Backhaul: a sample of each. ``make conformance`` runs all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "conformance" / "run.py"
SAMPLE = (
    "RpcTest.test_add",
    "RpcTest.test_all_gather*",
    "RpcTest.test_callback_chain",
    "RpcTest.test_cannot_infer_backend_from_options",
    "RpcTest.test_graceful_shutdown_with_uneven_workload",
    "RpcTest.test_multi_rpc",
    "RpcTest.test_nested_rpc",
    "RpcTest.test_nested_rref",
    "RpcTest.test_py_raise_in_user_func",
    "RpcTest.test_py_rref_args_user_share",
    "RpcTest.test_reinit",
    "RpcTest.test_return_future_async",
    "RpcTest.test_rref_context_debug_info",
    "RpcTest.test_rref_forward_chain",
    "RpcTest.test_user_rrefs_confirmed",
    "RpcTest.test_wait_all_exit_early_python",
    "RpcTest.test_profiler_rpc_record_shapes",
    "RpcTest.test_profiler_with_remote_builtin",
    "RpcTest.test_rpc_profiling_async_function",
    "RpcTest.test_server_process_global_profiler",
    "RpcTest.test_non_cont_tensors",  # listed as not passing
    "DistAutogradTest.test_autograd_context",
    "DistAutogradTest.test_backward_autograd_engine_error",
    "DistAutogradTest.test_backward_multiple_round_trips",
    "DistAutogradTest.test_backward_unused_send_function",  # listed as not passing
    "DistAutogradTest.test_clean_context_during_backward",
    "DistAutogradTest.test_context_cleanup_nested_rpc",
    "DistAutogradTest.test_dist_autograd_profiling",
    "DistAutogradTest.test_graph_for_py_nested_call",
    "DistAutogradTest.test_post_hooks",
    "DistAutogradTest.test_trainer_ps",
    "TensorPipeAgentRpcTest.test_dynamic_rpc_new_rank_can_communicate_with_existing_rank",
    "TensorPipeAgentRpcTest.test_mismatched_type_for_options",
    "TensorPipeAgentDistAutogradTest.test_embedding_bag_with_no_grad_tensors",
    "FaultyAgentRpcTest.test_builtin_remote_message_dropped_timeout",
    "FaultyAgentDistAutogradTest.test_context_cleanup_tensor_no_grad",
    "RemoteModuleTest.test_train_eval",
    "ThreeWorkersRemoteModuleTest.test_create_remote_module_from_module_rref",
    "DistOptimizerTest",
    "DdpComparisonTest.test_ddp_comparison",
    "DdpUnderDistAutogradTest.test_backward_ddp_inside",
    "ParameterServerTest",
    "ReinforcementLearningRpcTest",
    "JitRpcTest.test_torchscript_function",
)


@pytest.mark.timeout(420)  # a test may reach its limit and run again
def test_a_sample_of_torch_s_own_suites() -> None:
    """Listed tests must not pass, and all others must."""
    done = subprocess.run(
        [sys.executable, str(RUN), "--verbose", "--limit", "100", *SAMPLE], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    counts = [int(cell) for cell in done.stdout.splitlines()[-1].split("|")[2:5]]
    tests, passed, listed = counts
    assert tests >= 40
    assert (passed, listed) == (tests - 2, 2)


def test_a_wrong_list_is_noticed() -> None:
    """A listed test that passes, or an unlisted one that fails, fails the run."""
    script = (
        f"import sys; sys.path.insert(0, {str(RUN.parent)!r}); sys.argv = ['run.py', 'RpcTest.test_add', "
        "'RpcTest.test_non_cont_tensors']; import run; run.expected = lambda: {'RpcTest.test_add': 'a mistake'}; "
        "sys.exit(run.main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "RpcTest.test_add   but it is listed as not passing" in done.stdout
    assert "RpcTest.test_non_cont_tensors   and it is not listed" in done.stdout
    assert "wrong about 2 tests" in done.stdout
