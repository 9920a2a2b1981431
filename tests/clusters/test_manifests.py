"""The manifests of deploy/kubernetes: by schema, and with their environments as processes in namespaces (`pods`)."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pods import ISOLATED, PATIENCE, ROOT, Pod, Running, pods_of, pods_of_volcano, running, script_of

yaml = pytest.importorskip("yaml", reason="`make clusters` installs it")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make clusters` installs it")
models = pytest.importorskip("kubeflow_trainer_api.models", reason="`make clusters` installs it")
operator = pytest.importorskip("kubeflow.training.models", reason="`make clusters` installs it")

pytestmark = pytest.mark.timeout(600)

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
WORKLOADS = [name for name in FILES if name != "network-policy.yaml"]
VERSION = "1.31"

# Kinds outside Kubernetes itself; Kubeflow's package has models of them, and of the JobSet.
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}


def load(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@pytest.mark.parametrize("name", FILES)
def test_schema(name: str) -> None:
    for manifest in load(name):
        kind = manifest["kind"]
        if kind in MODELS:
            check_model(MODELS[kind], manifest)
        elif kind == "PyTorchJob":
            check_operator_type("KubeflowOrgV1PyTorchJob", manifest)
        else:
            kubernetes_validate.validate(manifest, VERSION, strict=True)


@pytest.mark.parametrize("name", WORKLOADS)
def test_schema_of_the_pods(name: str) -> None:
    for pod in pods_of(load(name)):
        check_pod(pod)


def check_pod(pod: Pod) -> None:
    metadata = {"name": pod.name, "labels": pod.labels, "annotations": pod.annotations}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod.spec}, VERSION, strict=True
    )


def check_model(model: Any, manifest: dict[str, Any]) -> None:
    """All fields are known and have the right types: unknown fields would be dropped on the way."""
    made = model.from_dict(manifest)
    assert made.to_dict() == manifest


PLAIN = {"str": str, "int": int, "bool": bool, "object": object}


def check_operator_type(name: str, value: Any) -> None:
    """As `check_model`, for the training operator, whose models are of another generator and come without a parser."""
    if name in PLAIN:
        assert isinstance(value, PLAIN[name]), (name, value)
    elif name.startswith("list["):
        for each in value:
            check_operator_type(name[len("list[") : -1], each)
    elif name.startswith("dict("):
        for each in value.values():
            check_operator_type(name[len("dict(str, ") : -1], each)
    else:
        # The operator's own models, then Kubernetes's.
        model = getattr(operator, name, None) or getattr(pytest.importorskip("kubernetes.client"), name)
        fields = {shown: field for field, shown in model.attribute_map.items()}
        assert value.keys() <= fields.keys(), (name, value.keys() - fields.keys())
        for shown, each in value.items():
            check_operator_type(model.openapi_types[fields[shown]], each)
        model(**{fields[shown]: each for shown, each in value.items()})  # raises if a required field is missing


def test_schemas_find_mistakes() -> None:
    """The check above can fail."""
    (job_set,) = load("jobset.yaml")
    job_set["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(AssertionError):
        check_model(MODELS["JobSet"], job_set)
    for wrong in ({"nprocPerNode": 1}, {"pytorchReplicaSpec": {}}):
        (job,) = load("pytorchjob.yaml")
        job["spec"].update(wrong)
        with pytest.raises(AssertionError):
            check_operator_type("KubeflowOrgV1PyTorchJob", job)
    (job,) = load("pytorchjob.yaml")
    del job["spec"]["pytorchReplicaSpecs"]
    with pytest.raises(ValueError, match="must not be `None`"):
        check_operator_type("KubeflowOrgV1PyTorchJob", job)
    (pod, *_) = pods_of(load("indexed-job.yaml"))
    pod.container["readinessprobe"] = pod.container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError):
        check_pod(pod)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_manifest_has_a_key_a_probe_and_labels(name: str) -> None:
    """The key as a file, a probe, requests, no rights, and the labels that the policy selects."""
    (policy,) = load("network-policy.yaml")
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": chosen}}]}]
    pods = pods_of(load(name))
    assert len(pods) > 1
    for pod in pods:
        assert chosen.items() <= pod.labels.items()
        container, environment = pod.container, pod.environment()
        assert container["readinessProbe"]["exec"]["command"][:3] == ["backhaul", "doctor", "--ready"]
        assert container["readinessProbe"]["timeoutSeconds"] > 2
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert environment["BACKHAUL_HOST"] == pod.address
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert environment["BACKHAUL_KEY_FILE"].startswith(mounts["key"] + "/")
        assert mounts["shm"] == "/dev/shm"
        assert not [variable for variable in environment if "SECRET" in variable]


def test_the_image(tmp_path: Path) -> None:
    """The image cannot be built here. But pip can build the package from the files that it copies, the program is where
    the manifests start it, and its user is theirs."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            # As COPY does: the content of a directory, and several files into a directory.
            to = tmp_path / target.lstrip("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                to = to / source if len(sources) > 1 else to
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, to)
    ((package, removed),) = re.findall(r"^RUN pip install --no-cache-dir (/\S+) && rm -r (/\S+)$", text, re.MULTILINE)
    assert package == removed
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path / "wheels")]
    subprocess.run([*wheel, str(tmp_path / package.lstrip("/"))], check=True, timeout=PATIENCE)
    (made,) = (tmp_path / "wheels").glob("backhaul-*.whl")
    with zipfile.ZipFile(made) as file:
        assert {"backhaul/__init__.py", "backhaul/py.typed", "backhaul/doctor/ready.py"} <= set(file.namelist())
    assert (tmp_path / "app" / "train.py").read_bytes() == (ROOT / "deploy" / "train.py").read_bytes()
    user = re.search(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
    assert user is not None
    for name in WORKLOADS:
        for pod in pods_of(load(name)):
            context = pod.spec["securityContext"]
            assert (str(context["runAsUser"]), str(context["runAsGroup"])) == user.groups()


MISSING = ["root, for namespaces"] if os.geteuid() != 0 else []
MISSING += [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]

needs_root = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")


@needs_root
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_sees_an_environment_in_the_folder_of_a_volume(name: str, tmp_path: Path) -> None:
    """A checkout of this repository may be in /tmp, which is a volume of the pods."""
    pod = pods_of(load(name))[0]
    (mount,) = [mount for mount in pod.container["volumeMounts"] if mount["mountPath"] == "/tmp"]
    assert "emptyDir" in {volume["name"]: volume for volume in pod.spec["volumes"]}[mount["name"]]
    own = tmp_path / pod.name
    with tempfile.TemporaryDirectory(dir="/tmp") as prefix:
        (Path(prefix) / "python").write_text("here")
        (own / "image").mkdir(parents=True)
        (own / "hosts").write_text("127.0.0.1 localhost\n")
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "cluster.key").write_text("key")
        look = ["sh", "-c", f"cat {prefix}/python && ls /tmp"]
        argv = [*ISOLATED, "sh", "-ec", script_of(pod, own, look, [prefix])]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    # Nothing else of this machine's /tmp is in the pod.
    assert (done.returncode, done.stdout) == (0, f"here{Path(prefix).name}\n"), done.stderr


@needs_root
@pytest.mark.parametrize("name", WORKLOADS)
def test_workers_train_in_the_environments_of_a_manifest(name: str, tmp_path: Path) -> None:
    pods = pods_of(load(name))
    train(pods, len(pods) * (2 if name == "trainjob.yaml" else 1), tmp_path)


@needs_root
def test_a_straggler_of_an_earlier_attempt_does_not_join_a_job_set(tmp_path: Path) -> None:
    """The set has been restarted. A pod of the attempt before starts late, and finds the new pods by their names."""
    pods = pods_of(load("jobset.yaml"), attempt=1)
    straggler = pods_of(load("jobset.yaml"))[-1]
    assert straggler.name == pods[-1].name
    straggler.address = f"10.78.0.{len(pods) + 1}"
    pods.insert(-1, straggler)
    with running(pods, tmp_path, secrets.token_hex(32) + "\n", {"TRAIN_STEPS": "20"}) as pods_up:
        pods_up.start(4)
        late = pods_up[-1]
        assert late.pod is straggler
        await_that(late, lambda: late.is_connected_to(pods[0].address, 29500))
        assert not any(pod.is_ready() for pod in pods_up)
        pods_up.start(1)
        for pod in pods_up:
            if pod is not late:
                assert pod.process.wait(PATIENCE) == 0, pod.text()
        assert re.search(r"4 workers, loss \d+\.\d+ -> \d+\.\d+\n", pods_up[0].text())
        assert "worker3 is done" in pods_up[-1].text()
        assert "worker3 is done" not in late.text()


def await_that(pod: Running, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert pod.process.poll() is None, pod.text()
        assert time.monotonic() < deadline, pod.text()
        time.sleep(0.1)


@needs_root
def test_workers_train_in_a_train_job_without_torchrun(tmp_path: Path) -> None:
    """As the page says: with one process for each node, the nodes' own variables are enough."""
    manifests = load("trainjob.yaml")
    (trainer,) = [each["spec"]["trainer"] for each in manifests if each["kind"] == "TrainJob"]
    trainer.update(numProcPerNode=1, command=["python", "/app/train.py"])
    pods = pods_of(manifests)
    for pod in pods:
        pod.container["readinessProbe"]["exec"]["command"] = ["backhaul", "doctor", "--ready"]
    train(pods, 2, tmp_path)


@needs_root
def test_workers_train_in_a_pytorch_job_without_a_number_of_processes(tmp_path: Path) -> None:
    """The default number is "auto", which the operator passes on for torchrun, and counts as one."""
    (job,) = load("pytorchjob.yaml")
    del job["spec"]["nprocPerNode"]
    train(pods_of([job]), 2, tmp_path)


@needs_root
@pytest.mark.parametrize(
    ("tasks", "pytorch"),
    [({"worker": 3}, False), ({"master": 1, "worker": 2}, True)],
    ids=["plugins svc and env", "plugin pytorch"],
)
def test_workers_train_in_the_environments_of_volcano(tasks: dict[str, int], pytorch: bool, tmp_path: Path) -> None:
    (like, *_) = pods_of(load("indexed-job.yaml"))
    train(pods_of_volcano(like, tasks, pytorch=pytorch), 3, tmp_path)


def train(pods: list[Pod], processes: int, directory: Path) -> None:
    """The pods wait for the last one, become ready then, train, and exit with 0."""
    with running(pods, directory, secrets.token_hex(32) + "\n", {"TRAIN_STEPS": "1000000"}) as pods_up:
        pods_up.start(len(pods) - 1)
        assert not pods_up[0].is_ready()
        pods_up.start(1)
        deadline = time.monotonic() + PATIENCE
        for pod in pods_up:
            while not pod.is_ready():
                assert pod.process.poll() is None, pod.text()
                assert time.monotonic() < deadline, pod.text()
        doctor = pods_up[-1].execute(["backhaul", "doctor"])
        assert "TLS 1.3, both sides with certificates from /etc/backhaul/cluster.key, mode 0440" in doctor.stdout
        while not (found := re.search(r"step 40: loss (.+)", pods_up[0].text())):
            assert time.monotonic() < deadline, pods_up[0].text()
            time.sleep(0.1)
        assert float(found[1]) < 2.0  # 15 at the start
        assert any(pod.terminate("0") for pod in pods_up)
        for pod in pods_up:
            assert pod.process.wait(max(1.0, deadline - time.monotonic())) == 0, pod.text()
        texts = "".join(pod.text() for pod in pods_up)
    assert re.search(rf"{processes} workers, loss \d+\.\d+ -> \d+\.\d+\n", texts), texts
    for rank in range(processes):
        assert f"worker{rank} is done" in texts
