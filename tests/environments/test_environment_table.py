"""Which variable wins: environments as launchers make them, and the resulting rows."""

from __future__ import annotations

from typing import Any

import pytest

from backhaul.environments.table import Table, read
from backhaul.errors import OptionError

FULL_NAME = "elsewhere.example.org"

# Taken from real processes, reduced to what is read: torchrun of torch 2.13, Slurm 22.05, Open MPI 4.1, MPICH 4.0.
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM_JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
SLURM = {
    **SLURM_JOB,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1941110785",
}
# mpirun on the two nodes of a job: it runs on the first node, and its daemon on the second node is a step of its own.
OPEN_MPI_IN_SLURM = [
    {**SLURM_JOB, **OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    {
        **SLURM_JOB,
        **OPEN_MPI,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NODELIST": "node02",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
    },
]
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TRAINER = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
}
PYTORCH_JOB = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-master-0",
    "PET_MASTER_PORT": "23456",
}
VOLCANO = {"VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "t-worker-0.t,t-worker-1.t", "VC_WORKER_NUM": "2"}
VOLCANO_PYTORCH = {
    "VC_TASK_INDEX": "0",
    "VC_MASTER_HOSTS": "t-master-0.t",
    "VC_WORKER_HOSTS": "t-worker-0.t,t-worker-1.t",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "t-master-0.t",
    "MASTER_PORT": "23456",
}
JOB = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3"}
JOB_NAME = "train-2.train.default.svc.cluster.local"
JOB_SET = {
    "JOB_COMPLETION_INDEX": "1",
    "JOBSET_JOB_INDEX": "1",
    "JOBSET_REPLICAS": "2",
    "JOBSET_NAME": "train",
    "JOBSET_RESTART_ATTEMPT": "2",
    "WORLD_SIZE": "4",
}
JOB_SET_NAME = "train-workers-1-1.train.default.svc.cluster.local"


def values(said: Table) -> dict[str, Any]:
    """The rows that have a value."""
    rows = said._asdict()
    return {name: rows[name].value for name in rows if getattr(rows[name], "value", None) is not None}


KNOWN: list[tuple[str, dict[str, str], str, dict[str, Any]]] = [
    ("nothing", {}, FULL_NAME, {}),
    (
        "torchrun",
        TORCHRUN,
        FULL_NAME,
        {
            "name": "worker3",
            "rank": 3,
            "world_size": 4,
            "local_rank": 1,
            "nodes": 2,
            "address": "node1",
            "port": 29400,
            "restart": 1,
            "run": "torchrun job-7",
        },
    ),
    (
        "backhaul run",
        {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "4000",
            "BACKHAUL_INIT_METHOD": "file:///tmp/store",
            "BACKHAUL_NAME": "trainer",
            "BACKHAUL_RESTARTS": "1",
            "BACKHAUL_SECRET": "ab" * 32,
        },
        FULL_NAME,
        {
            "name": "trainer",
            "rank": 0,
            "world_size": 2,
            "local_rank": 0,
            "address": "127.0.0.1",
            "port": 4000,
            "restart": 1,
            "key": "(not shown)",
        },
    ),
    (
        "srun",
        {**SLURM, "BACKHAUL_KEY_FILE": "/home/me/cluster.key"},
        FULL_NAME,
        {
            "name": "worker3",
            "rank": 3,
            "world_size": 4,
            "local_rank": 1,
            "nodes": 2,
            "address": "node01",
            "port": 15000 + 4711,
            "run": "slurm 4711.0",
            "key": "/home/me/cluster.key",
        },
    ),
    (
        "srun on one node, a later step of a job that was started again",
        {
            **SLURM,
            "SLURM_STEP_ID": "2",
            "SLURM_STEP_NODELIST": "node02",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_RESTART_COUNT": "1",
        },
        FULL_NAME,
        {
            "name": "worker3",
            "rank": 3,
            "world_size": 4,
            "local_rank": 1,
            "nodes": 1,
            "address": "127.0.0.1",
            "port": 15000 + 4711 + 2 * 997,
            "restart": 1,
            "run": "slurm 4711.2 restart 1",
        },
    ),
    (
        "the batch script of a job",
        SLURM_JOB,
        FULL_NAME,
        {"nodes": 2, "address": "node01", "port": 15000 + 4711},
    ),
    (
        "mpirun on one machine",
        OPEN_MPI,
        FULL_NAME,
        {
            "name": "worker1",
            "rank": 1,
            "world_size": 2,
            "local_rank": 1,
            "nodes": 1,
            "address": "127.0.0.1",
            "port": 24218,
            "run": "mpirun 1941110785",
        },
    ),
    (
        "mpirun in a batch script, on several nodes",
        OPEN_MPI_IN_SLURM[1],
        FULL_NAME,
        {
            "name": "worker1",
            "rank": 1,
            "world_size": 2,
            "local_rank": 1,
            "nodes": 2,
            "address": "node01",
            "port": 24218,
            "run": "mpirun 1941110785",
        },
    ),
    (
        "mpirun on several machines, with an address",
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "node01"},
        FULL_NAME,
        {
            "name": "worker1",
            "rank": 1,
            "world_size": 2,
            "local_rank": 1,
            "address": "node01",
            "port": 24218,
            "run": "mpirun 1941110785",
        },
    ),
    (
        "mpiexec",
        {**HYDRA, "MASTER_PORT": "29500"},
        FULL_NAME,
        {
            "name": "worker1",
            "rank": 1,
            "world_size": 2,
            "local_rank": 1,
            "nodes": 1,
            "address": "127.0.0.1",
            "port": 29500,
        },
    ),
    (
        "srun --mpi=pmi2",
        {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "4711.0"},
        FULL_NAME,
        {
            "name": "worker3",
            "rank": 3,
            "world_size": 4,
            "local_rank": 1,
            "nodes": 2,
            "address": "node01",
            "port": 15000 + 4711,
            "run": "PMI 4711.0",
        },
    ),
    (
        "PMIx with a world size",
        {"PMIX_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        FULL_NAME,
        {"name": "worker1", "rank": 1, "world_size": 2, "address": "a", "port": 1},
    ),
    (
        "Kubeflow Trainer without torchrun",
        TRAINER,
        FULL_NAME,
        {
            "name": "worker1",
            "rank": 1,
            "world_size": 2,
            "nodes": 2,
            "address": "train-node-0-0.train",
            "port": 29400,
        },
    ),
    (
        "PyTorchJob",
        PYTORCH_JOB,
        FULL_NAME,
        {"name": "worker1", "rank": 1, "world_size": 2, "nodes": 2, "address": "train-master-0", "port": 23456},
    ),
    (
        "PyTorchJob without nprocPerNode: the operator passes its default on, and counts one worker for each pod",
        {**PYTORCH_JOB, "PET_NPROC_PER_NODE": "auto"},
        FULL_NAME,
        {"name": "worker1", "rank": 1, "world_size": 2, "nodes": 2, "address": "train-master-0", "port": 23456},
    ),
    (
        "Volcano with one task",
        VOLCANO,
        FULL_NAME,
        {"name": "worker1", "rank": 1, "world_size": 2, "nodes": 2, "address": "t-worker-0.t", "port": 29500},
    ),
    (
        "Volcano with its plugin for PyTorch",
        VOLCANO_PYTORCH,
        FULL_NAME,
        {"name": "worker1", "rank": 1, "world_size": 3, "address": "t-master-0.t", "port": 23456},
    ),
    (
        "an indexed Job",
        JOB,
        JOB_NAME,
        {
            "name": "worker2",
            "rank": 2,
            "world_size": 3,
            "address": "train-0.train.default.svc.cluster.local",
            "port": 29500,
        },
    ),
    (
        "a JobSet of several Jobs",
        JOB_SET,
        JOB_SET_NAME,
        {
            "name": "worker3",
            "rank": 3,
            "world_size": 4,
            "address": "train-workers-0-0.train.default.svc.cluster.local",
            "port": 29500,
            "restart": 2,
            "run": "jobset train 2",
        },
    ),
    (
        "a JobSet with a coordinator",
        {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "JOBSET_COORDINATOR": "train-driver-0-0.train"},
        FULL_NAME,
        {"name": "worker1", "rank": 1, "world_size": 2, "address": "train-driver-0-0.train", "port": 29500},
    ),
    (
        "by hand over what Slurm says, in agreement",
        {**SLURM, "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"},
        FULL_NAME,
        {
            "name": "worker3",
            "rank": 3,
            "world_size": 4,
            "local_rank": 1,
            "nodes": 2,
            "address": "10.0.0.1",
            "port": 7000,
            "run": "slurm 4711.0",
        },
    ),
]


@pytest.mark.parametrize(("environ", "full_name", "expected"), [each[1:] for each in KNOWN], ids=[e[0] for e in KNOWN])
def test_each_environment_gives_the_expected_rows(
    environ: dict[str, str], full_name: str, expected: dict[str, Any]
) -> None:
    said = read(environ, lambda: full_name)
    assert values(said) == expected
    assert [row.problem for row in said if getattr(row, "problem", "")] == []


NESTED: list[tuple[dict[str, str], tuple[str, ...], int, str, tuple[str, ...]]] = [
    # torchrun as a task of Slurm, as a pod of Kubeflow Trainer, as a process of mpirun
    ({**SLURM, **TORCHRUN, "SLURM_PROCID": "1"}, ("torchrun", "Slurm"), 3, "RANK", ("SLURM_PROCID=1",)),
    (
        {**TRAINER, **TORCHRUN},
        ("torchrun", "Kubeflow Trainer", "Job"),
        3,
        "RANK",
        ("PET_NODE_RANK=1", "JOB_COMPLETION_INDEX=1"),
    ),
    (
        {**OPEN_MPI, **TORCHRUN, "OMPI_COMM_WORLD_RANK": "0"},
        ("torchrun", "Open MPI", "PMIx"),
        3,
        "RANK",
        ("OMPI_COMM_WORLD_RANK=0", "PMIX_RANK=1"),
    ),
    # mpirun starts its daemons with srun: they have ranks among the tasks
    (
        {**SLURM, **OPEN_MPI, "SLURM_PROCID": "0"},
        ("Open MPI", "PMIx", "Slurm"),
        1,
        "OMPI_COMM_WORLD_RANK",
        ("PMIX_RANK=1", "SLURM_PROCID=0"),
    ),
    # set by hand for us
    (
        {**SLURM, "RANK": "1", "BACKHAUL_RANK": "2"},
        ("the environment", "Slurm"),
        2,
        "BACKHAUL_RANK",
        ("RANK=1", "SLURM_PROCID=3"),
    ),
    # Volcano counts pods within a task
    (VOLCANO_PYTORCH, ("the environment", "Volcano"), 1, "RANK", ()),
]


@pytest.mark.parametrize(("environ", "launchers", "rank", "source", "over"), NESTED)
def test_the_inner_launcher_wins(
    environ: dict[str, str], launchers: tuple[str, ...], rank: int, source: str, over: tuple[str, ...]
) -> None:
    said = read(environ, lambda: FULL_NAME)
    assert said.launchers == launchers
    assert said.rank == (rank, source, over, "")
    assert not said.world_size.problem


PROBLEMS: list[tuple[dict[str, str], str, str]] = [
    # contradictions name both
    (
        {**SLURM, "SLURM_PROCID": "2", "RANK": "1"},
        "rank",
        "RANK=1 (the environment) and SLURM_PROCID=2 (Slurm) give this worker different ranks",
    ),
    (
        {**SLURM, "RANK": "3", "WORLD_SIZE": "8"},
        "world_size",
        "WORLD_SIZE=8 (the environment) and SLURM_STEP_NUM_TASKS=4",
    ),
    ({**OPEN_MPI, "RANK": "0"}, "rank", "RANK=0 (the environment) and OMPI_COMM_WORLD_RANK=1 (Open MPI)"),
    ({**OPEN_MPI, **HYDRA, "PMI_RANK": "0"}, "rank", "OMPI_COMM_WORLD_RANK=1 (Open MPI) and PMI_RANK=0 (PMI)"),
    ({**JOB, "RANK": "0"}, "rank", "RANK=0 (the environment) and JOB_COMPLETION_INDEX=2 (Job)"),
    ({**SLURM, "JOB_COMPLETION_INDEX": "1"}, "rank", "SLURM_PROCID=3 (Slurm) and JOB_COMPLETION_INDEX=1 (Job)"),
    (
        {**PYTORCH_JOB, "MASTER_ADDR": "other"},
        "address",
        "MASTER_ADDR=other (the environment) and PET_MASTER_ADDR=train-master-0 (Kubeflow Trainer) give this worker "
        "different addresses to meet at, and it is unclear which launcher started it: unset one of them",
    ),
    ({**PYTORCH_JOB, "MASTER_PORT": "1"}, "port", "MASTER_PORT=1 (the environment) and PET_MASTER_PORT=23456"),
    # only a part of a launcher's variables
    ({"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "a"}, "world_size", "set WORLD_SIZE to the completions of the Job"),
    ({"PMIX_RANK": "0"}, "world_size", "PMIx has no variable for the world size: set WORLD_SIZE"),
    ({**JOB, "JOBSET_JOB_INDEX": "1"}, "rank", "the rank follows only with JOBSET_REPLICAS as well"),
    ({**JOB_SET, "JOBSET_JOB_INDEX": "2"}, "rank", "do not fit JOBSET_REPLICAS=2 Jobs with WORLD_SIZE=4"),
    ({**JOB_SET, "WORLD_SIZE": "3"}, "rank", "do not fit JOBSET_REPLICAS=2 Jobs with WORLD_SIZE=3"),
    (JOB, "address", "the name of this pod, 'elsewhere.example.org', does not lead to the first pod"),
    # torchrun is missing
    ({**TRAINER, "PET_NPROC_PER_NODE": "4"}, "rank", "PET_NPROC_PER_NODE=4 asks for a number of workers that torchrun"),
    ({**TRAINER, "PET_NPROC_PER_NODE": "auto"}, "world_size", "start it with `torchrun train.py`"),
    ({**TRAINER, "PET_NNODES": "1:4"}, "world_size", "PET_NNODES=1:4 allows for a number of workers that torchrun"),
    ({**PYTORCH_JOB, "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "8"}, "world_size", "torchrun did not start"),
    ({**PYTORCH_JOB, "PET_NPROC_PER_NODE": "auto", "WORLD_SIZE": "8"}, "world_size", "torchrun did not start"),
    ({**PYTORCH_JOB, "PET_NPROC_PER_NODE": "auto", "PET_NNODES": "1:4"}, "rank", "PET_NNODES=1:4 allows for"),
    # values that cannot be read
    ({**SLURM, "SLURM_PROCID": "x"}, "rank", "the environment variable SLURM_PROCID='x' must be a whole number"),
    ({**TORCHRUN, "MASTER_PORT": "99999"}, "port", "MASTER_PORT=99999 is not a port"),
    (
        {**SLURM, "SLURM_STEP_NODELIST": "n[1-"},
        "address",
        "SLURM_STEP_NODELIST: the list of nodes 'n[1-' cannot be read",
    ),
]


@pytest.mark.parametrize(("environ", "field", "text"), PROBLEMS)
def test_the_problem_of_a_row_is_raised_when_the_row_is_used(environ: dict[str, str], field: str, text: str) -> None:
    row = getattr(read(environ, lambda: FULL_NAME), field)
    assert row.value is None
    with pytest.raises(OptionError) as caught:
        row.take()
    assert text in str(caught.value)


def test_all_processes_of_mpirun_in_a_job_meet_at_one_place() -> None:
    for inside in ({}, {"PMIX_NAMESPACE": ""}):  # without a name of its own, the job's
        first, second = (read({**environ, **inside}, lambda: FULL_NAME) for environ in OPEN_MPI_IN_SLURM)
        assert [first.rank.value, second.rank.value] == [0, 1]
        assert first.address.value == "node01"
        for field in ("world_size", "nodes", "address", "port", "run"):
            assert getattr(first, field).value == getattr(second, field).value, field
            assert not getattr(first, field).problem


def test_hints() -> None:
    (batch,) = read(SLURM_JOB).hints
    assert (
        batch == "this is the batch script of job 4711 of Slurm, and not one of its tasks: start the workers with srun"
    )
    (mpi,) = read({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}).hints
    assert "OMPI_COMM_WORLD_SIZE=2 and OMPI_COMM_WORLD_LOCAL_SIZE=1: the workers are on several machines" in mpi
    (hydra,) = read(HYDRA).hints
    assert "mpiexec -genv MASTER_PORT 29500" in hydra
    (tasks,) = read({**VOLCANO, "VC_MASTER_HOSTS": "t-master-0.t"}).hints
    assert "of tasks MASTER, WORKER" in tasks


def test_the_name_of_the_host_is_not_asked_for_without_need() -> None:
    def never() -> str:
        raise AssertionError("asked")

    for environ in ({}, TORCHRUN, SLURM, OPEN_MPI, TRAINER, {**JOB, "MASTER_ADDR": "a"}):
        read(environ, never)


def test_the_secret_is_in_no_row() -> None:
    secret = "cd" * 32
    assert secret not in repr(read({**SLURM, "BACKHAUL_SECRET": secret}))
    both = read({"BACKHAUL_SECRET": secret, "BACKHAUL_KEY_FILE": "/k"}).key
    assert (both.value, both.source, both.over) == ("/k", "BACKHAUL_KEY_FILE", ("BACKHAUL_SECRET",))


def test_only_torchrun_hosts_the_store_itself() -> None:
    assert read(TORCHRUN).agent_store
    assert not read({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store
    assert not read(SLURM).agent_store
