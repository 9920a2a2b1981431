"""Which files of tests take long: an order for `make test`, and what `make quick` leaves out."""

from __future__ import annotations

# The files that take longest. `make test` begins with them: at the end one process would be busy with them alone.
LONGEST = (
    *(
        "test_examples.py",
        "test_docs.py",
        "test_bench.py",
        "test_cluster.py",
        "test_conformance.py",
        "test_processes.py",
    ),
    *("autograd/test_ddp.py", "autograd/test_ddp_graphs.py", "test_remote_profile.py", "test_rendezvous.py"),
    *("launch/test_run.py", "profiler/test_profile.py", "checkpoint/test_resume_loop.py", "seeing/test_live.py"),
    *("seeing/test_stuck_live.py", "dropin/test_dropin_command.py", "autograd/test_ddp_failures.py", "test_demo.py"),
    *("wire/test_decoder_fuzz.py", "agent/test_link_simulation.py", "checkpoint/test_checkpoint_resume.py"),
    *("launch/test_interactive.py", "autograd/test_programs.py", "security/test_fuzz_targets.py"),
)

# Simulations, random programs and fuzzing start no process, and take seconds for each file: not for every save.
LONG = {
    *("agent/test_growth_of_groups.py", "agent/test_link_simulation.py", "autograd/test_adversarial_programs.py"),
    *("autograd/test_hammer.py", "autograd/test_programs.py", "faults/test_chaos.py", "faults/test_turns.py"),
    *("refs/test_simulation.py", "security/test_fuzz_targets.py", "security/test_growth.py"),
    *("wire/test_decoder_fuzz.py",),
}
