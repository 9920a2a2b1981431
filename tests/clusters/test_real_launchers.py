"""Real launchers on separate hosts: torchrun restarting a group, and Slurm's lists of nodes."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

from machines import PATIENCE, ROOT, Host

from backhaul.environments.nodelists import expand
from backhaul.security.keys import make_key_file


def test_torchrun_starts_the_group_again(hosts: list[Host], tmp_path: Path, environment: dict[str, str]) -> None:
    """On two nodes, one of which counts a restart and the other does not: they still form one group."""
    make_key_file(str(tmp_path / "cluster.key"))
    script = ROOT / "tests" / "scripts" / "elastic.py"
    command = (
        "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-id 7 --rdzv-backend c10d "
        f"--rdzv-endpoint 10.0.0.1:29400 --rdzv-conf join_timeout=200 {script}"
    )
    processes = []
    for host in hosts[:2]:
        env = {
            **environment,
            "BACKHAUL_KEY_FILE": str(tmp_path / "cluster.key"),
            "BACKHAUL_HOST": host.address,
            "FIRST_PORT": "7000",
        }
        processes.append(host.start(command, tmp_path, env, tmp_path / host.name))
    try:
        codes = [process.wait(PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [(tmp_path / host.name).read_text() for host in hosts[:2]]
    assert codes == [0, 0], texts
    # The node without the failure also restarted its worker, but does not count that.
    assert ["restarts 0 1" in text for text in texts] == [True, True], texts


def test_lists_of_nodes_are_what_scontrol_says(slurm: str) -> None:
    """Hundreds of random lists."""
    chance = random.Random(0)

    def number() -> str:
        low = chance.randrange(120)
        width = chance.choice([1, 1, 2, 3])
        high = "" if chance.random() < 0.4 else f"-{low + chance.randrange(4):0{width}d}"
        return f"{low:0{width}d}{high}"

    def item() -> str:
        text = chance.choice(["n", "gpu-", "rack"])
        for between in chance.choice([(), ("",), ("",), ("", "n"), ("", "")]):
            text += between + f"[{','.join(number() for _ in range(chance.randrange(1, 4)))}]"
        return text  # Slurm lists names individually if anything follows the last number

    lists = [",".join(item() for _ in range(chance.randrange(1, 4))) for _ in range(300)]
    env = {**os.environ, "SLURM_CONF": slurm}
    # In one shell: starting Python for each would take longer.
    script = "".join(f"scontrol show hostnames '{each}'; echo ==\n" for each in lists)
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=PATIENCE, check=True)
    answers = done.stdout.split("==\n")[:-1]
    assert len(answers) == len(lists)
    for text, answer in zip(lists, answers, strict=True):
        assert expand(text) == answer.split(), text
