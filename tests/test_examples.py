"""Every example runs and keeps its promises, and the check at its end can fail.

Notebooks run without Jupyter: their code cells one after the other, as one script. test_demo.py covers demo.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PATIENCE = 110.0
LOSS = re.compile(r"^(?:\[\w+\] )?(?:step|round|epoch) +\d+ +loss(?:es)? ([\d.]+)", re.MULTILINE)


class Spoiled(NamedTuple):
    """A change in a copy of the example that must make its check fail; and how the copy then ends."""

    changes: dict[str, str]
    end: str  # its last output, or the text of its final error
    constants: str = ""  # other values for some constants, to save time


class Example(NamedTuple):
    shows: str  # one of its lines
    end: str  # its last line
    spoiled: Spoiled


LONG = {"elastic.py": pytest.mark.slow}
"""Kills workers and waits for replacements: half a minute."""

KNOWN = {
    "two_workers.py": Example(
        r"\[worker0\] all 4 gradients .*",
        r"\[worker0\] all 4 gradients equal those of one process",
        Spoiled({"[found[parameter] for": "[1.01 * found[parameter] for"}, r"AssertionError: \(tensor"),
    ),
    "parameter_server.py": Example(
        r"numbers on the server: 8896; on each trainer: 65",
        r"✓ after 10 turns of each trainer all 8 tensors are, bit by bit, those of one process",
        Spoiled(
            {"[loss])": "[loss * (1 + 1e-9)])"},
            r"✗ trainers that take turns do not step as one process does",
            "STEPS, TURNS = 60, 1",
        ),
    ),
    "batch_updating_parameter_server.py": Example(
        r"round 149   losses 0\.\d+   0\.\d+   0\.\d+   last to come: trainer\d",
        r"✓ after 150 updates the model is, bit by bit, that of data-parallel SGD in one process",
        Spoiled(
            {"[parameter.grad for": "[parameter.grad * (1 + 1e-9) for"},
            r"✗ 2 updates; not as in one process: 0\.weight, .*",
            "ROUNDS = 2",
        ),
    ),
    "reinforcement_learning.py": Example(
        r"mean reward of the last five rounds 0\.8\d; the best possible is 0\.86",
        r"✓ the agent has learned it, by the gradients of one process",
        Spoiled(
            {"append(log_probabilities[action])": "append(log_probabilities[action] * (1 + 1e-9))"},
            r"✗ .* the distance at most 1e-12",
            "ROUNDS, ENOUGH = 5, -1.0",  # so few rounds that only the gradients can be judged
        ),
    ),
    "vertical_federated.py": Example(
        r"shop gave activations   120 times, of shape \(32, 4\)",
        r"✓ the parameters are, bit by bit, those of one process; rows and labels stayed where they were",
        Spoiled(
            {"= super().forward(step)": "= super().forward(step) * (1 + 1e-9)"},
            r"✗ the parameters are not those of one process",
            "STEPS = 2",
        ),
    ),
    "rnn.py": Example(
        r"it writes: Ada .*",
        r"✓ all 7 tensors of the trained model are, bit by bit, those of one process",
        Spoiled(
            {"params, LARGEST_NORM)": "params, 0.99 * LARGEST_NORM)"},
            r"✗ not as in one process: embedding\.weight, .*",
            "EPOCHS = 1",
        ),
    ),
    "u_shaped_split.py": Example(
        r"the server was given  features \(8, 6, 6\), torch.float32",
        r"✓ all 8 tensors of the trained model are, bit by bit, those of one process",
        Spoiled({"[loss])": "[loss * 1.01])"}, r"✗ not as in one process: .*middle\.layers.*", "STEPS = 2"),
    ),
    "pipeline.py": Example(
        r"8 chunks +\d+ ms = forward +\d+ \+ backward +\d+   16 gradients, apart by [\de-]+ of the largest",
        r"✓ the gradients are those of one process",
        Spoiled(
            {"[found[param.local_value()] for": "[found[param.local_value()] * (1 + 1e-8) for"},
            r"✗ the gradients are not those of one process",
            "REPEATS = 1",
        ),
    ),
    "elastic.py": Example(
        r" +worker 'worker\d' is lost: it was killed by SIGKILL \(signal 9\)",
        r"✓ 2 workers were killed, and all 40 losses are, bit by bit, those of the undisturbed run",
        Spoiled(
            {'restore="all"': 'restore="lost"'},
            r"✗ the losses of the disturbed run are not those of the undisturbed one",
            "STEPS, KILLS = 8, 1",
        ),
    ),
    "slow_worker.py": Example(
        r"mean entropy of a mixture 3\.27\d\d",
        r"✓ the gradients and the entropy are those of one process",
        Spoiled(
            {"[found[param.local_value()] for": "[found[param.local_value()] * (1 + 1e-6) for"},
            r"✗ the gradients or the entropy are not those of one process",
            "VECTORS = 2_000",
        ),
    ),
    "ddp_remote_embedding.py": Example(
        r"the dense layers on trainer1 +577 numbers, [\d.e-]+ apart",
        r"✓ after 150 steps these are the numbers of one process",
        Spoiled(
            {
                '"lr": RATE / len(TRAINERS)': '"lr": 1.001 * RATE / len(TRAINERS)',
                "losses[-1] < losses[0] / 5": "losses",  # the numbers alone, after one epoch
            },
            r"✗ these are not the numbers of one process",
            "EPOCHS = 1",
        ),
    ),
    "parameter_server.ipynb": Example(
        r"0\.weight +is on server",
        r"✓ all 4 tensors are those of one process",
        Spoiled(
            {"/ 2  # the mean over two trainers": "/ 2.01", "range(60)": "range(2)", "seed, 100)": "seed, 20)"},
            r"AssertionError: not as in one process: .*0\.weight",
        ),
    ),
    "split_learning.ipynb": Example(
        r"\[server\] I was given \(400, 16\) of torch.float32",
        r"✓ all 8 tensors are those of one process",
        Spoiled(
            {"[loss])\n        optimizer": "[loss * 1.01])\n        optimizer", "range(100)": "range(2)"},
            r"AssertionError: not as in one process: .*1\.0\.weight",
        ),
    ),
}
ELSEWHERE = ("ray_cluster.py",)
"""Needs Ray: tests/ray runs it, with and without the spoiling change."""
OTHER_CHECKS = {
    "parameter_server.py": Spoiled(
        {"lr=RATE": "lr=0.0"}, r"✗ the loss of trainer\d has not fallen to a third", "STEPS = 20"
    ),
    "reinforcement_learning.py": Spoiled(
        {"lr=0.02": "lr=0.0"}, r"✗ the reward should be at least 0\.8, .*", "ROUNDS = 6"
    ),
    "parameter_server.ipynb": Spoiled({"lr=0.3": "lr=0.0"}, r"AssertionError: the loss has not fallen: it was 0\.69"),
    "vertical_federated.py": Spoiled(
        {"def make_rows": "@rpc.expose\ndef make_rows"}, r"✗ something left a party that should not have", "STEPS = 2"
    ),
}
THREADS = "torch.set_num_threads(1)"  # follows the constants in all examples that have some


def source_of(name: str) -> str:
    text = (EXAMPLES / name).read_text()
    if name.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return text


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "backhaul", "run", "-n", "2"] if script.name == "two_workers.py" else []
    return subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def run_copy(name: str, source: str, directory: Path) -> subprocess.CompletedProcess[str]:
    script = directory / Path(name).with_suffix(".py").name
    script.write_text(source)
    return run(script)


def run_spoiled(name: str, spoiled: Spoiled, directory: Path) -> subprocess.CompletedProcess[str]:
    source = source_of(name)
    for old, new in spoiled.changes.items():
        assert old in source, f"{name} has no {old!r} to be changed"
        source = source.replace(old, new)
    if spoiled.constants:
        assert THREADS in source
        source = source.replace(THREADS, f"{spoiled.constants}\n{THREADS}")
    return run_copy(name, source, directory)


def last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]


def test_all_examples_are_known_and_listed() -> None:
    found = {path.name for pattern in ("*.py", "*.ipynb") for path in EXAMPLES.glob(pattern)}
    assert found == {*KNOWN, *ELSEWHERE, "demo.py"}
    listed = re.findall(r"^\| \[`?([\w.]+)`?\]\(([\w.]+)\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((name, name) for name in found)


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in KNOWN])
def test_an_example_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    example = KNOWN[name]
    done = run(EXAMPLES / name) if name.endswith(".py") else run_copy(name, source_of(name), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(rf"^{example.shows}$", done.stdout, re.MULTILINE), done.stdout
    assert re.fullmatch(example.end, last_line(done.stdout)), done.stdout
    losses = [float(loss) for loss in LOSS.findall(done.stdout)]
    assert not losses or losses[-1] < losses[0], done.stdout


# `make slow` runs all of them; each takes some seconds.
SAMPLED = ("pipeline.py",)


@pytest.mark.parametrize(
    "name", [each if each in SAMPLED else pytest.param(each, marks=pytest.mark.slow) for each in KNOWN]
)
def test_the_check_of_an_example_can_fail(name: str, tmp_path: Path) -> None:
    spoiled = KNOWN[name].spoiled
    check_failure(spoiled, run_spoiled(name, spoiled, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_CHECKS)
def test_the_other_check_of_an_example_can_fail(name: str, tmp_path: Path) -> None:
    spoiled = OTHER_CHECKS[name]
    check_failure(spoiled, run_spoiled(name, spoiled, tmp_path))


def check_failure(spoiled: Spoiled, done: subprocess.CompletedProcess[str]) -> None:
    """The example ended as its spoiled copy must."""
    assert done.returncode == 1, done.stdout + done.stderr
    if spoiled.end.startswith("✗"):
        assert done.stderr == ""
        assert re.fullmatch(spoiled.end, last_line(done.stdout)), done.stdout
    else:
        assert re.search(spoiled.end, done.stderr), done.stderr


def test_reinforcement_learning_says_that_it_needs_gymnasium() -> None:
    """The program hides the module: Python does not import a module whose entry in sys.modules is None."""
    script = str(EXAMPLES / "reinforcement_learning.py")
    program = (
        f"import runpy, sys; sys.modules['gymnasium'] = None; sys.argv = [{script!r}, '--gym']; "
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "--gym needs gymnasium: pip install gymnasium\n")
