"""Pods without Kubernetes: processes with their own network, file system, process ids and user.

`pods_of` does what the controllers and the kubelet do. It relies on these facts:

- The Job controller gives each pod of an indexed Job the environment variable JOB_COMPLETION_INDEX, the annotation
  ``batch.kubernetes.io/job-completion-index``, and the host name ``<job>-<index>``.
- The JobSet controller names its Jobs ``<set>-<replicated job>-<index>``, makes a headless Service with the name of
  the subdomain, and labels pods with ``jobset.sigs.k8s.io/`` jobset-name, replicatedjob-name, replicatedjob-replicas,
  job-index and restart-attempt.
- Kubeflow Trainer makes a JobSet with the name of the TrainJob from its runtime, puts numNodes into completions and
  parallelism of the Job whose template is labelled ``trainer.kubeflow.org/trainjob-ancestor-step: trainer``, takes
  command and environment for its container ``node`` from the TrainJob, and sets PET_NNODES, PET_NPROC_PER_NODE,
  PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT there.
- The training operator names pods of a PyTorchJob ``<job>-master-0`` and ``<job>-worker-<index>``, makes a headless
  Service of that name for each, and sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and the same values as PET_*.
  Without nprocPerNode, PET_NPROC_PER_NODE is "auto", and WORLD_SIZE counts one process for each pod.
- Volcano names pods ``<job>-<task>-<index>``. Its plugin ``svc`` makes a headless Service with the name of the job, and
  sets VC_<TASK>_HOSTS and VC_<TASK>_NUM for each task; its plugin ``env`` sets VC_TASK_INDEX; its plugin ``pytorch``
  sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, which counts through the tasks.
- A name in a headless Service means the address of the pod, also before it is ready with publishNotReadyAddresses.
- The kubelet writes the full name of a pod that has a subdomain into its /etc/hosts.
- With fsGroup, files of a Secret belong to root and that group, and have mode ``defaultMode | 0440``.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NAMESPACE_DOMAIN = "default.svc.cluster.local"
PATIENCE = 240.0

# Set by the Dockerfile.
IMAGE_ENVIRONMENT = {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}

# Python and this virtual environment. /usr is in the container anyway.
PREFIXES = [prefix for prefix in (sys.base_prefix, sys.prefix) if not prefix.startswith("/usr/")]

ISOLATED = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--propagation", "private")

Manifest = dict[str, Any]


@dataclasses.dataclass
class Pod:
    """A pod as the controllers make it."""

    name: str
    spec: Manifest
    domain: str
    """The full name is ``name.domain``; empty if the pod has none."""
    labels: dict[str, str]
    annotations: dict[str, str]
    injected: list[Manifest]
    """Environment variables that a controller adds to the container."""
    address: str = ""

    @property
    def container(self) -> Manifest:
        (container,) = self.spec["containers"]
        return container  # type: ignore[no-any-return]

    @property
    def names(self) -> list[str]:
        """The names that resolve to its address, in the pods of its namespace."""
        if not self.domain:
            return [self.name]  # it has its own Service
        subdomain = self.domain.partition(".")[0]
        return [f"{self.name}.{self.domain}", f"{self.name}.{subdomain}"]

    def environment(self) -> dict[str, str]:
        found = dict(IMAGE_ENVIRONMENT)
        found["HOSTNAME"] = self.name
        for variable in [*self.container.get("env", []), *self.injected]:
            found[variable["name"]] = self._value(variable)
        return found

    def _value(self, variable: Manifest) -> str:
        if "value" in variable:
            return str(variable["value"])
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        if path == "status.podIP":
            return self.address
        kind, key = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path).groups()  # type: ignore[union-attr]
        return (self.labels if kind == "labels" else self.annotations)[key]


def pods_of(manifests: list[Manifest], attempt: int = 0) -> list[Pod]:
    """The pods that result from these manifests, with their addresses. ``attempt``: the restarts of a JobSet."""
    by_kind = {manifest["kind"]: manifest for manifest in manifests}
    if "Job" in by_kind:
        pods = _of_job(by_kind["Job"])
        (service,) = [each for each in manifests if each["kind"] == "Service"]
        for pod in pods:
            assert service["spec"]["clusterIP"] == "None"
            assert service["spec"]["publishNotReadyAddresses"]
            assert service["metadata"]["name"] == pod.spec["subdomain"]
            assert service["spec"]["selector"].items() <= pod.labels.items()
    elif "JobSet" in by_kind:
        pods = _of_job_set(by_kind["JobSet"], attempt)
    elif "TrainJob" in by_kind:
        pods = _of_train_job(by_kind["TrainJob"], by_kind["TrainingRuntime"])
    else:
        pods = _of_pytorch_job(by_kind["PyTorchJob"])
    return _addressed(pods)


def _addressed(pods: list[Pod]) -> list[Pod]:
    for number, pod in enumerate(pods, 1):
        pod.address = f"10.78.0.{number}"
    return pods


def _of_job(job: Manifest, domain: str | None = None, labels: dict[str, str] | None = None) -> list[Pod]:
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    template = spec["template"]
    subdomain = domain or template["spec"]["subdomain"]
    pods = []
    for index in range(spec["completions"]):
        annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
        field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        injected = [{"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": field}}}]
        pod = Pod(
            f"{job['metadata']['name']}-{index}",
            template["spec"],
            f"{subdomain}.{NAMESPACE_DOMAIN}",
            {**template["metadata"]["labels"], **(labels or {})},
            annotations,
            injected,
        )
        pods.append(pod)
    return pods


def _of_job_set(job_set: Manifest, attempt: int = 0) -> list[Pod]:
    name, network = job_set["metadata"]["name"], job_set["spec"].get("network", {})
    assert network.get("enableDNSHostnames", True)
    assert network.get("publishNotReadyAddresses", True)
    pods = []
    for replicated in job_set["spec"]["replicatedJobs"]:
        for index in range(replicated.get("replicas", 1)):
            prefix = "jobset.sigs.k8s.io/"
            labels = {
                f"{prefix}jobset-name": name,
                f"{prefix}replicatedjob-name": replicated["name"],
                f"{prefix}replicatedjob-replicas": str(replicated.get("replicas", 1)),
                f"{prefix}job-index": str(index),
                f"{prefix}restart-attempt": str(attempt),
            }
            metadata = {"name": f"{name}-{replicated['name']}-{index}"}
            job = {"metadata": metadata, "spec": {"completionMode": "Indexed", **replicated["template"]["spec"]}}
            pods += _of_job(job, network.get("subdomain", name), labels)
    return pods


def _of_train_job(train_job: Manifest, runtime: Manifest) -> list[Pod]:
    reference, trainer = train_job["spec"]["runtimeRef"], train_job["spec"]["trainer"]
    assert (reference["kind"], reference["name"]) == ("TrainingRuntime", runtime["metadata"]["name"])
    assert "torch" in runtime["spec"]["mlPolicy"]
    name = train_job["metadata"]["name"]
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]
    assert job["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    nodes = trainer.get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    job["spec"].update(completions=nodes, parallelism=nodes)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    container["command"] = trainer["command"]
    container.setdefault("env", []).extend(
        [
            {"name": "PET_NNODES", "value": str(nodes)},
            {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
            {
                "name": "PET_NODE_RANK",
                "valueFrom": {
                    "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
                },
            },
            {"name": "PET_MASTER_ADDR", "value": f"{name}-{replicated['name']}-0-0.{name}"},
            {"name": "PET_MASTER_PORT", "value": "29500"},
        ]
    )
    return _of_job_set({"metadata": {"name": name}, "spec": spec})


def _of_pytorch_job(job: Manifest) -> list[Pod]:
    name, specs = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
    count = sum(spec["replicas"] for spec in specs.values())
    each = job["spec"].get("nprocPerNode", "auto")
    processes = int(each) if each.isdecimal() else 1
    pods: list[Pod] = []
    for kind in ("Master", "Worker"):
        for index in range(specs[kind]["replicas"]):
            rank = len(pods)
            said = {
                "MASTER_ADDR": f"{name}-master-0",
                "MASTER_PORT": "23456",
                "WORLD_SIZE": str(count * processes),
                "RANK": str(rank),
                "PET_MASTER_ADDR": f"{name}-master-0",
                "PET_MASTER_PORT": "23456",
                "PET_NNODES": str(count),
                "PET_NODE_RANK": str(rank),
                "PET_NPROC_PER_NODE": each,
            }
            template = specs[kind]["template"]
            (container,) = template["spec"]["containers"]
            assert container["name"] == "pytorch"
            injected = [{"name": key, "value": value} for key, value in said.items()]
            pods.append(
                Pod(
                    f"{name}-{kind.lower()}-{index}", template["spec"], "", template["metadata"]["labels"], {}, injected
                )
            )
    return pods


def pods_of_volcano(like: Pod, tasks: dict[str, int], *, pytorch: bool = False) -> list[Pod]:
    """The pods of a Volcano Job ``train``, with these numbers of replicas. Their container is that of ``like``."""
    names = {task: [f"train-{task}-{index}" for index in range(count)] for task, count in tasks.items()}
    said: dict[str, str] = {}
    for task, found in names.items():
        said[f"VC_{task.upper()}_HOSTS"] = ",".join(f"{name}.train" for name in found)
        said[f"VC_{task.upper()}_NUM"] = str(len(found))
    places = [(task, index) for task, count in tasks.items() for index in range(count)]
    if pytorch:
        said |= {"MASTER_ADDR": f"train-{places[0][0]}-0.train", "MASTER_PORT": "23456", "WORLD_SIZE": str(len(places))}
    spec = copy.deepcopy(like.spec)
    (container,) = spec["containers"]
    container["env"] = [variable for variable in container["env"] if variable["name"] != "WORLD_SIZE"]
    pods = []
    for rank, (task, index) in enumerate(places):
        own = {**said, "VC_TASK_INDEX": str(index), **({"RANK": str(rank)} if pytorch else {})}
        injected = [{"name": key, "value": value} for key, value in own.items()]
        pods.append(Pod(names[task][index], spec, f"train.{NAMESPACE_DOMAIN}", like.labels, {}, injected))
    return _addressed(pods)


# Running them.


class Running:
    """A pod whose container runs."""

    def __init__(
        self, pod: Pod, namespace: str, directory: Path, command: list[str], environment: dict[str, str]
    ) -> None:
        self.pod = pod
        self._environment = environment
        self.output = directory / "output"
        self._as_user = _as_user(pod)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", namespace),
                    *ISOLATED,
                    *("sh", "-ec", script_of(pod, directory, [*self._as_user, *_with(environment), *command])),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def main(self) -> int:
        """The id of the first process of the container."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        deadline = time.monotonic() + PATIENCE
        while not (children := path.read_text().split()):
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.text()
            time.sleep(0.02)
        return int(children[0])

    def execute(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, like a probe."""
        enter = ["nsenter", "--target", str(self.main()), "--mount", "--uts", "--net", "--pid", "--root", "--wd=/"]
        argv = [*enter, *self._as_user, *_with(self._environment), *command]
        return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)

    def is_ready(self) -> bool:
        """The result of the manifest's readiness probe."""
        probe = self.pod.container["readinessProbe"]
        return self.execute(probe["exec"]["command"]).returncode == 0

    def is_connected_to(self, address: str, port: int) -> bool:
        enter = ["nsenter", "--target", str(self.main()), "--net", "ss", "-Htn", f"dport = :{port}"]
        found = subprocess.run(enter, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
        return re.search(rf"[ :]{re.escape(address)}\]?:{port}\b", found) is not None  # perhaps as ::ffff:…

    def terminate(self, rank: str) -> bool:
        """Send SIGTERM to the process with this rank, or to the only one. False if it is not here."""
        seen = [self.main()]
        for parent in seen:
            for task in Path(f"/proc/{parent}/task").glob("*/children"):
                seen += map(int, task.read_text().split())
        for process in reversed(seen):
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables or len(seen) == 1:
                os.kill(process, signal.SIGTERM)
                return True
        return False


def _with(environment: dict[str, str]) -> list[str]:
    return ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]


def _as_user(pod: Pod) -> list[str]:
    context, own = pod.spec["securityContext"], pod.container["securityContext"]
    assert context["runAsNonRoot"]
    assert own["capabilities"]["drop"] == ["ALL"]
    user = [f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}", f"--groups={context['fsGroup']}"]
    none = ["--bounding-set=-all", "--inh-caps=-all"]
    return ["setpriv", *user, *([] if own["allowPrivilegeEscalation"] else ["--no-new-privs"]), *none]


def script_of(pod: Pod, directory: Path, command: list[str], prefixes: Iterable[str] = PREFIXES) -> str:
    """A script that sets up the file system of the container, and then becomes its first process.

    ``prefixes`` are directories of this machine that the container sees under the same path.
    """
    image = directory / "image"
    lines = [f"hostname {shlex.quote(pod.name)}", f"mount -t tmpfs -o mode=755 image {image}"]
    lines.append(f"mkdir {' '.join(f'{image}/{each}' for each in ('etc', 'proc', 'tmp', 'app', 'backhaul'))}")
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            lines.append(f"ln -s {os.readlink(f'/{name}')} {image}/{name}")
    binds = {
        "/usr": "/usr",
        "/dev": "/dev",
        "/sys": "/sys",
        str(ROOT / "src"): "/backhaul",
        str(ROOT / "deploy"): "/app",
    }
    lines += [_bind(here, image, there) for here, there in binds.items()]
    lines.append(f"mount -t proc proc {image}/proc")
    lines.append(f"cp -r /etc/passwd /etc/group /etc/nsswitch.conf /etc/ld.so.cache {image}/etc/")
    lines.append(f"cp {directory}/hosts {image}/etc/hosts")
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    for mount in pod.container["volumeMounts"]:
        where, volume = f"{image}{mount['mountPath']}", volumes[mount["name"]]
        lines.append(f"mkdir -p {where}")
        if "emptyDir" in volume:
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
            lines.append(f"mount -t tmpfs -o mode=777,size={size} volume {where}")
        else:
            group, mode = pod.spec["securityContext"]["fsGroup"], volume["secret"]["defaultMode"] | 0o440
            lines.append(f"mount -t tmpfs -o mode=755 secret {where}; cp {directory.parent}/secret/* {where}")
            lines.append(f"chown -R 0:{group} {where}; chmod {mode:o} {where}/*; mount -o remount,ro {where}")
    # After the volumes, because a prefix may be inside of one: /tmp is a volume in all manifests.
    lines += [_bind(prefix, image, prefix) for prefix in prefixes]
    if pod.container["securityContext"]["readOnlyRootFilesystem"]:
        lines.append(f"mount -o remount,ro {image}")
    lines.append(f"exec chroot {image} {shlex.join(command)}")
    return "\n".join(lines)


def _bind(here: str, image: Path, there: str) -> str:
    return f"mkdir -p {image}{there}; mount --rbind {here} {image}{there}"


@contextmanager
def network(pods: list[Pod], directory: Path) -> Iterator[dict[str, str]]:
    """A network of namespaces with the addresses of the pods; yields the names of the namespaces, by address."""
    switch = f"places-{os.getpid()}-switch"
    spaces = {pod.address: f"places-{os.getpid()}-{number}" for number, pod in enumerate(pods)}
    made: list[str] = []

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for space in (switch, *spaces.values()):
            ip("netns", "add", space)
            made.append(space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, pod in enumerate(pods):
            space, port = spaces[pod.address], f"port{number}"
            ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", space, "address", "add", f"{pod.address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        yield spaces
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "delete", space], check=False)


@contextmanager
def running(pods: list[Pod], directory: Path, key: str, image: dict[str, str]) -> Iterator[list[Running]]:
    """The pods, one after the other; a pod starts when the next one is requested. ``image`` adds to its environment."""
    secret = directory / "secret"
    secret.mkdir()
    (secret / "cluster.key").write_text(key)
    started: list[Running] = []
    with network(pods, directory) as spaces:
        try:
            for pod in pods:
                own = directory / pod.address
                (own / "image").mkdir(parents=True)
                lines = ["127.0.0.1 localhost"]
                # The pod's own name first, because the host takes that as its full name.
                for each in (pod, *(other for other in pods if other.name != pod.name)):
                    short = [each.name] if each is pod else []
                    lines.append(" ".join([each.address, *each.names, *short]))
                (own / "hosts").write_text("\n".join(lines) + "\n")
            yield _Starting(pods, directory, spaces, image, started)  # type: ignore[misc]
        finally:
            for each in started:
                each.process.kill()
            for each in started:
                each.process.wait()


class _Starting(list[Running]):
    """The running pods, and `start` for the next ones."""

    def __init__(
        self, pods: list[Pod], directory: Path, spaces: dict[str, str], image: dict[str, str], started: list[Running]
    ) -> None:
        super().__init__()
        self._left = list(pods)
        self._directory = directory
        self._spaces = spaces
        self._image = image
        self._started = started

    def start(self, count: int) -> None:
        for _ in range(count):
            pod = self._left.pop(0)
            environment = {**pod.environment(), **self._image, "PYTHONPATH": "/backhaul"}
            command = [*pod.container["command"], *pod.container.get("args", [])]
            own = self._directory / pod.address
            made = Running(pod, self._spaces[pod.address], own, command, environment)
            self._started.append(made)
            self.append(made)
