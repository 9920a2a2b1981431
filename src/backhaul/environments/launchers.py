"""What each launcher says, in environment variables, about a process that it started. Pure.

From the innermost to the outermost, with the variables that reveal the launcher:

    BACKHAUL_RANK, BACKHAUL_WORLD_SIZE    set by hand; override everything
    backhaul run       BACKHAUL_INIT_METHOD with RANK
    torchrun           TORCHELASTIC_RUN_ID
    by hand            RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; also PyTorchJob, and Volcano's plugin for PyTorch
    Open MPI           OMPI_COMM_WORLD_RANK
    PMI                PMI_RANK: MPICH, Intel MPI and others with Hydra
    PMIx               PMIX_RANK: has no world size
    Kubeflow Trainer   PET_NNODES: meant for torchrun, which reads it; enough if each node has one process
    Volcano            VC_TASK_INDEX, VC_<TASK>_HOSTS, VC_<TASK>_NUM
    Slurm              SLURM_PROCID with SLURM_STEP_ID: a task of a step, not the batch script
    JobSet, Job        JOB_COMPLETION_INDEX, JOBSET_*
"""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from backhaul.environments import nodelists
from backhaul.errors import OptionError

LOOPBACK = "127.0.0.1"
USUAL_PORT = 29500
"""Torch's own default, for places where the worker's network has no other user."""

_LOWEST, _HIGHEST = 15000, 32000
"""The range for ports derived from a job's number. The kernel gives ports from 32768 up to any outgoing connection."""
_STEP = 997
"""The distance between the ports of two steps of a job, since steps may run at the same time."""

Environ = Mapping[str, str]
HostName = Callable[[], str]


class Said(NamedTuple):
    """One fact from a launcher."""

    value: Any
    source: str
    text: str = ""
    """The value as written in the environment."""
    problem: str = ""
    derived: bool = False
    """Derived from something else, not set by anyone. A value that was set overrules it silently."""

    def __str__(self) -> str:
        return f"{self.source}={self.text or self.value}" if not self.derived else f"{self.value} ({self.source})"


class Launcher(NamedTuple):
    """A launcher that the environment reveals."""

    name: str
    said: dict[str, Said]
    inside: frozenset[str] = frozenset()
    """Launchers that may start this one, and whose ranks say nothing about its own."""
    starts: bool = True
    """False for variables that anyone may have set."""
    how_many: str = ""
    """What to do if nothing gives the world size; empty if a rank alone is enough."""
    hints: tuple[str, ...] = ()
    agent_store: bool = False

    def says(self, field: str) -> Said | None:
        return self.said.get(field)


def own_name() -> str:
    """The full name of this machine, as far as the machine knows it."""
    return socket.getfqdn()


OVERRIDE, RUN, TORCHRUN, HAND = "set by hand", "backhaul run", "torchrun", "the environment"
OPEN_MPI, PMI, PMIX = "Open MPI", "PMI", "PMIx"
TRAINER, VOLCANO, SLURM, JOB = "Kubeflow Trainer", "Volcano", "Slurm", "Job"

_SCHEDULERS = frozenset({TRAINER, VOLCANO, SLURM, JOB})
_ALL = frozenset({OVERRIDE, RUN, TORCHRUN, HAND, OPEN_MPI, PMI, PMIX, *_SCHEDULERS})


# The launchers.


def _override(environ: Environ, host_name: HostName) -> Launcher | None:
    said = _numbers(environ, rank="BACKHAUL_RANK", world_size="BACKHAUL_WORLD_SIZE")
    return Launcher(OVERRIDE, said, _ALL, starts=False) if said else None


def _backhaul_run(environ: Environ, host_name: HostName) -> Launcher | None:
    if not environ.get("BACKHAUL_INIT_METHOD") or "RANK" not in environ:
        return None
    said = {**_torch(environ), **_numbers(environ, restart="BACKHAUL_RESTARTS")}
    return Launcher(RUN, said, _ALL)


def _torchrun(environ: Environ, host_name: HostName) -> Launcher | None:
    if not _has_torchrun(environ):
        return None
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    numbers = _numbers(environ, restart="TORCHELASTIC_RESTART_COUNT", nodes="GROUP_WORLD_SIZE")
    said = {**_torch(environ), **numbers}
    if run:
        said["run"] = Said(f"torchrun {run}", "TORCHELASTIC_RUN_ID", run)
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launcher(TORCHRUN, said, _ALL, agent_store=hosted)


def _has_torchrun(environ: Environ) -> bool:
    return "TORCHELASTIC_RUN_ID" in environ or "TORCHELASTIC_USE_AGENT_STORE" in environ


def _by_hand(environ: Environ, host_name: HostName) -> Launcher | None:
    if _has_torchrun(environ) or _backhaul_run(environ, host_name) is not None:
        return None  # these variables are torchrun's or ours
    said = _torch(environ)
    # Volcano counts the pods of one task, but its plugin for PyTorch counts all pods.
    return Launcher(HAND, said, frozenset({VOLCANO}), starts="rank" in said) if said else None


def _open_mpi(environ: Environ, host_name: HostName) -> Launcher | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    said = _numbers(
        environ, rank="OMPI_COMM_WORLD_RANK", world_size="OMPI_COMM_WORLD_SIZE", local_rank="OMPI_COMM_WORLD_LOCAL_RANK"
    )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if job:
        source = "PMIX_NAMESPACE" if environ.get("PMIX_NAMESPACE") else "OMPI_MCA_ess_base_jobid"
        said["run"] = Said(f"mpirun {job}", source, job)
    give = "mpirun -x MASTER_ADDR" if job else "mpirun -x MASTER_ADDR -x MASTER_PORT"
    hints = _on_one_machine(environ, said, "OMPI_COMM_WORLD_LOCAL_SIZE", give)
    if job:
        said["port"] = Said(_port(zlib.crc32(job.encode())), source, derived=True)
    return Launcher(OPEN_MPI, said, _SCHEDULERS | {PMIX}, how_many="OMPI_COMM_WORLD_SIZE is missing", hints=hints)


def _pmi(environ: Environ, host_name: HostName) -> Launcher | None:
    if "PMI_RANK" not in environ:
        return None
    said = _numbers(environ, rank="PMI_RANK", world_size="PMI_SIZE", local_rank="MPI_LOCALRANKID")
    if environ.get("PMI_JOBID"):
        said["run"] = Said(f"PMI {environ['PMI_JOBID']}", "PMI_JOBID", environ["PMI_JOBID"])
    hints = _on_one_machine(environ, said, "MPI_LOCALNRANKS", "mpiexec -genv MASTER_ADDR … -genv MASTER_PORT …")
    if "address" in said and "MASTER_PORT" not in environ:
        hints = (
            "PMI_RANK names no job that a port could follow from: start it with `mpiexec -genv MASTER_PORT 29500`",
        )
    return Launcher(PMI, said, _SCHEDULERS | {PMIX}, how_many="PMI_SIZE is missing", hints=hints)


def _pmix(environ: Environ, host_name: HostName) -> Launcher | None:
    if "PMIX_RANK" not in environ:
        return None
    rank = environ["PMIX_RANK"]
    how_many = f"PMIX_RANK={rank} gives a rank, but PMIx has no variable for the world size: set WORLD_SIZE"
    return Launcher(PMIX, _numbers(environ, rank="PMIX_RANK"), _SCHEDULERS, how_many=how_many)


def _trainer(environ: Environ, host_name: HostName) -> Launcher | None:
    if "PET_NNODES" not in environ:
        return None
    said = _numbers(environ, rank="PET_NODE_RANK", port="PET_MASTER_PORT")
    if environ.get("PET_MASTER_ADDR"):
        said["address"] = Said(environ["PET_MASTER_ADDR"], "PET_MASTER_ADDR")
    nodes, each = environ["PET_NNODES"], environ.get("PET_NPROC_PER_NODE", "1")
    # A PyTorchJob has "auto" unless it says otherwise; its RANK and WORLD_SIZE then count one worker for each pod.
    counted = (environ.get("RANK"), environ.get("WORLD_SIZE")) == (environ.get("PET_NODE_RANK"), nodes)
    if nodes.isdecimal() and (each == "1" or (counted and not each.isdecimal())):
        said["world_size"] = Said(int(nodes), "PET_NNODES", nodes)
        said["nodes"] = Said(int(nodes), "PET_NNODES", nodes)
    else:
        what = f"PET_NPROC_PER_NODE={each} asks for" if nodes.isdecimal() else f"PET_NNODES={nodes} allows for"
        problem = (
            f"{what} a number of workers that torchrun sets up, but torchrun did not start this process: start it "
            "with `torchrun train.py`, which reads the same variables, or have one process for each of a fixed number "
            'of nodes (numProcPerNode: 1, in a PyTorchJob nprocPerNode: "1")'
        )
        said["world_size"] = Said(None, "PET_NNODES", nodes, problem)
        if "rank" in said:
            said["rank"] = said["rank"]._replace(problem=problem)
    return Launcher(TRAINER, said, frozenset({JOB, VOLCANO}))


_HOSTS = re.compile(r"VC_(\w+)_HOSTS")


def _volcano(environ: Environ, host_name: HostName) -> Launcher | None:
    if "VC_TASK_INDEX" not in environ:
        return None
    said: dict[str, Said] = {}
    tasks = sorted(found[1] for name in environ if (found := _HOSTS.fullmatch(name)))
    if len(tasks) != 1:
        # The index counts within a task, and nothing says to which task this pod belongs.
        found_tasks = f"of tasks {', '.join(tasks)}" if tasks else "of no task: the plugin svc is missing"
        hint = (
            f"VC_TASK_INDEX={environ['VC_TASK_INDEX']} is an index within a task, and there are hosts {found_tasks}. "
            "Let Volcano's plugin pytorch set RANK and WORLD_SIZE, or have one task"
        )
        return Launcher(VOLCANO, said, hints=(hint,))
    (task,) = tasks
    said = _numbers(environ, rank="VC_TASK_INDEX", world_size=f"VC_{task}_NUM", nodes=f"VC_{task}_NUM")
    hosts = [each.strip() for each in environ[f"VC_{task}_HOSTS"].split(",") if each.strip()]
    if hosts:
        said["address"] = Said(hosts[0], f"VC_{task}_HOSTS", derived=True)
        said["port"] = Said(USUAL_PORT, "torch's default", derived=True)
    return Launcher(VOLCANO, said, how_many=f"VC_{task}_NUM is missing: set WORLD_SIZE")


def _slurm(environ: Environ, host_name: HostName) -> Launcher | None:
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    said = _numbers(environ, restart="SLURM_RESTART_COUNT")
    restart = said.get("restart")
    again = f" restart {restart.value}" if restart is not None and restart.value else ""
    step = environ.get("SLURM_STEP_ID")
    if "OMPI_COMM_WORLD_RANK" in environ:
        # The daemons of mpirun are a step of their own, without the node on which mpirun runs: there it starts the
        # processes itself. So the step differs from worker to worker, and only the job is the same for all.
        said |= _numbers(environ, nodes="SLURM_JOB_NUM_NODES", **({} if step is None else {"rank": "SLURM_PROCID"}))
        said["run"] = Said(f"slurm {job}{again}", "SLURM_JOB_ID")
        return Launcher(SLURM, said | _slurm_store(environ, job, None, ("SLURM_JOB_NODELIST",)))
    if step is None or "SLURM_PROCID" not in environ:
        hint = f"this is the batch script of job {job} of Slurm, and not one of its tasks: start the workers with srun"
        launcher = Launcher(SLURM, {}, starts=False, hints=(hint,))
    else:
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        said |= _numbers(environ, rank="SLURM_PROCID", world_size=size, local_rank="SLURM_LOCALID")
        said["run"] = Said(f"slurm {job}.{step}{again}", "SLURM_JOB_ID and SLURM_STEP_ID")
        launcher = Launcher(SLURM, said, how_many="SLURM_STEP_NUM_TASKS and SLURM_NTASKS are missing")
    nodes = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    said |= _numbers(environ, nodes=nodes)
    said |= _slurm_store(environ, job, step, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    return launcher._replace(said=said)


def _slurm_store(environ: Environ, job: str, step: str | None, lists: tuple[str, ...]) -> dict[str, Said]:
    """The store's address and port. Slurm and mpirun put rank 0 on the first node of the list."""
    listed = next((name for name in lists if environ.get(name)), None)
    said = {}
    if listed is not None:
        try:
            nodes = nodelists.expand(environ[listed])
            address = nodes[0] if len(nodes) > 1 else LOOPBACK
            source = f"first of {listed}" if len(nodes) > 1 else f"one node in {listed}"
            said["address"] = Said(address, source, derived=True)
        except OptionError as error:
            said["address"] = Said(None, listed, environ[listed], f"{listed}: {error}. Set MASTER_ADDR instead")
    if job.isdecimal():
        number = int(job) + _STEP * (int(step) if step is not None and step.isdecimal() else 0)
        source = "SLURM_JOB_ID" if step is None else "SLURM_JOB_ID and SLURM_STEP_ID"
        said["port"] = Said(_port(number), source, derived=True)
    return said


def _job(environ: Environ, host_name: HostName) -> Launcher | None:
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    said = _numbers(environ, rank="JOB_COMPLETION_INDEX", restart="JOBSET_RESTART_ATTEMPT")
    index = said["rank"]
    if "JOBSET_JOB_INDEX" in environ:
        said["rank"] = _rank_of_job_set(environ, index)
    if environ.get("JOBSET_COORDINATOR"):
        said["address"] = Said(environ["JOBSET_COORDINATOR"], "JOBSET_COORDINATOR")
    elif not index.problem and not any(environ.get(name) for name in ("MASTER_ADDR", "PET_MASTER_ADDR")):
        said["address"] = _first_pod(environ, index.value, host_name)
    if "address" in said:
        said["port"] = Said(USUAL_PORT, "torch's default", derived=True)
    if environ.get("JOBSET_NAME"):
        attempt = environ.get("JOBSET_RESTART_ATTEMPT", "")
        said["run"] = Said(f"jobset {environ['JOBSET_NAME']} {attempt}".strip(), "JOBSET_NAME")
    how_many = (
        f"JOB_COMPLETION_INDEX={index.text} gives a rank, but nothing gives the number of workers: set WORLD_SIZE "
        "to the completions of the Job"
    )
    return Launcher(JOB, said, how_many=how_many)


def _rank_of_job_set(environ: Environ, index: Said) -> Said:
    """The rank counts through the Jobs of a JobSet one after the other; all have the same number of pods."""
    numbers = _numbers(environ, job="JOBSET_JOB_INDEX", jobs="JOBSET_REPLICAS", pods="WORLD_SIZE")
    problem = next((each.problem for each in (index, *numbers.values()) if each.problem), "")
    if not problem and (missing := [name for name in ("jobs", "pods") if name not in numbers]):
        wanted = {"jobs": "JOBSET_REPLICAS", "pods": "WORLD_SIZE"}
        problem = (
            f"JOBSET_JOB_INDEX={environ['JOBSET_JOB_INDEX']} tells the Jobs of a JobSet apart, but the rank follows "
            f"only with {' and '.join(wanted[each] for each in missing)} as well: see docs/clusters-kubernetes.md"
        )
    if problem:
        return index._replace(value=None, problem=problem)
    job, jobs, pods = (numbers[name].value for name in ("job", "jobs", "pods"))
    if jobs < 1 or pods % jobs or not (0 <= job < jobs and index.value < pods // jobs):
        problem = (
            f"JOBSET_JOB_INDEX={job} and JOB_COMPLETION_INDEX={index.value} do not fit JOBSET_REPLICAS={jobs} Jobs "
            f"with WORLD_SIZE={pods} workers in total"
        )
        return index._replace(value=None, problem=problem)
    source = "JOBSET_JOB_INDEX and JOB_COMPLETION_INDEX"
    return Said(job * (pods // jobs) + index.value, source, f"{job} and {index.value}")


def _first_pod(environ: Environ, index: int, host_name: HostName) -> Said:
    """Pods of an indexed Job are named ``<job>-<index>``, and those of a JobSet ``<set>-<name>-<job>-<index>``."""
    full = host_name()
    name, _, domain = full.partition(".")
    ending = f"-{environ['JOBSET_JOB_INDEX']}-{index}" if "JOBSET_JOB_INDEX" in environ else f"-{index}"
    if not domain or not name.endswith(ending):
        problem = (
            f"the name of this pod, {full!r}, does not lead to the first pod: the pods of an indexed Job that have a "
            f"`subdomain`, and a headless Service of that name, are named like job{ending}.subdomain. Set MASTER_ADDR"
        )
        return Said(None, "the name of this host", full, problem, derived=True)
    first = "-0-0" if "JOBSET_JOB_INDEX" in environ else "-0"
    return Said(f"{name.removesuffix(ending)}{first}.{domain}", f"the name of this host, {name}", derived=True)


READERS: tuple[Callable[[Environ, HostName], Launcher | None], ...] = (
    _override,
    _backhaul_run,
    _torchrun,
    _by_hand,
    _open_mpi,
    _pmi,
    _pmix,
    _trainer,
    _volcano,
    _slurm,
    _job,
)


# Shared by several launchers.


def _torch(environ: Environ) -> dict[str, Said]:
    """The variables of torch's own rendezvous."""
    said = _numbers(environ, rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK", port="MASTER_PORT")
    if environ.get("MASTER_ADDR"):
        said["address"] = Said(environ["MASTER_ADDR"], "MASTER_ADDR")
    port = said.get("port")
    if port is not None and not port.problem and not 0 <= port.value < 1 << 16:
        text = f"the environment variable MASTER_PORT={port.text} is not a port: it must be below 65536"
        said["port"] = port._replace(problem=text)
    return said


def _on_one_machine(environ: Environ, said: dict[str, Said], local_size: str, give: str) -> tuple[str, ...]:
    """Workers that are all on this machine meet on loopback. Others need an address; the result says how to give it."""
    size = said.get("world_size")
    here = _numbers(environ, size=local_size).get("size")
    if size is None or here is None or size.problem or here.problem:
        return ()
    if here.value == size.value:
        said["address"] = Said(LOOPBACK, f"all are here: {local_size}", derived=True)
        said["nodes"] = Said(1, local_size, here.text)
        return ()
    return (f"{size} and {here}: the workers are on several machines and need to know where to meet: `{give}`",)


def _numbers(environ: Environ, **fields: str) -> dict[str, Said]:
    """field=variable: the values of those variables that are set."""
    return {field: _number(variable, environ[variable]) for field, variable in fields.items() if variable in environ}


def _number(variable: str, text: str) -> Said:
    try:
        return Said(int(text), variable, text)
    except ValueError:
        return Said(None, variable, text, f"the environment variable {variable}={text!r} must be a whole number")


def _port(number: int) -> int:
    return _LOWEST + number % (_HIGHEST - _LOWEST)
