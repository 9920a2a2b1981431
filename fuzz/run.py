"""Feed each target of `targets` with inputs that atheris makes, guided by the code that they reach.

    python fuzz/run.py [--inputs 1000000] [--seconds 240] [target ...]

Prints for each target the number of inputs, the inputs per second, and the finding, if any. Findings are kept in
fuzz/findings, and `python fuzz/run.py --replay FILE target` shows one again. Inputs that reach new code are kept in
fuzz/corpus, where the next run starts.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
LIVE = ("gradients", "contexts", "notices", "operators")  # the targets with a live worker
NAMES = ("frames", "greetings", "values", "tensors", "compressed", "references", *LIVE)
LIVE_SHARE = 20  # an input for a live worker takes milliseconds, since it ends with calls of a good peer
MAX_LENGTH = {"references": 129, **dict.fromkeys(LIVE, 64)}  # bytes of an input; its script ends there
CASES = "operator_cases"  # the target that forks its own children, and needs no guidance


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = ", ".join((*NAMES, CASES))
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {known}; all of them without any")
    fewer = f"those with a live worker get one in {LIVE_SHARE}"
    parser.add_argument("--inputs", type=int, default=1_000_000, help=f"for each target (default: a million); {fewer}")
    parser.add_argument("--seconds", type=int, default=0, help="for each target, at most; 0 sets no limit")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; 0 takes another one each time")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="give this one input to the target")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = options.targets or (*NAMES, CASES)
    unknown = [name for name in wanted if name not in (*NAMES, CASES)]
    if unknown:
        parser.error(f"there is no target {unknown[0]!r}; there are {known}")
    if options.replay is not None:
        return replay(wanted[0], options.replay)
    if options.child:
        fuzz(wanted[0], options.inputs, options.seconds, options.seed)
        return 0
    print(f"{'target':<16}{'inputs':>10}{'seconds':>9}{'inputs/s':>10}  found", flush=True)
    shares = {name: options.inputs // LIVE_SHARE if name in LIVE else options.inputs for name in wanted}
    return max([watch(name, inputs, options.seconds, options.seed) for name, inputs in shares.items()])


def watch(name: str, inputs: int, limit: int, seed: int) -> int:
    """Fuzz one target in its own process, since a finding may be a crash. Prints its line."""
    began = time.monotonic()
    bounds = ["--seconds", str(limit)]
    command = [sys.executable, __file__, "--child", "--inputs", str(inputs), *bounds, "--seed", str(seed), name]
    if name == CASES:
        script = str(HERE / f"{CASES}.py")
        command = [sys.executable, script, "--cases", str(inputs), *bounds, "--seed", str(seed << 32)]
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    seconds = time.monotonic() - began
    counts = r"^stat::number_of_executed_units: *(\d+)|^#(\d+)\t|^(\d+) cases in "
    ran = re.findall(counts, child.stdout, re.MULTILINE)
    count = max((int("".join(found)) for found in ran), default=0)
    kept = re.findall(r"Test unit written to (\S+)", child.stdout)
    found = "nothing" if child.returncode == 0 else ", ".join(kept) or f"it ended with {child.returncode}"
    print(f"{name:<16}{count:>10}{seconds:>9.0f}{count / seconds:>10.0f}  {found}", flush=True)
    if child.returncode:
        print(child.stdout[-6000:], flush=True)
    return int(child.returncode != 0)


def fuzz(name: str, inputs: int, seconds: int, seed: int) -> None:
    """Fuzz this target. Never returns: the fuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["backhaul"]):
        import targets

    import seeds
    import torch

    torch.set_num_threads(1)
    corpus, first, findings = HERE / "corpus" / name, HERE / "corpus" / f"{name}-seeds", HERE / "findings"
    for directory in (corpus, first, findings):
        directory.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds.seeds(name)):
        (first / str(number)).write_bytes(data)
    limits = [
        f"-runs={inputs}",
        f"-max_total_time={seconds}",
        f"-max_len={MAX_LENGTH.get(name, 4096)}",
        "-timeout=30",
        "-rss_limit_mb=4096",
        f"-seed={seed}",
    ]
    outputs = [f"-artifact_prefix={findings}/{name}-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, *outputs, str(corpus), str(first)], targets.TARGETS[name])
    atheris.Fuzz()


def replay(name: str, file: Path) -> int:
    import targets

    try:
        targets.TARGETS[name](file.read_bytes())
    except Exception:
        traceback.print_exc()
        return 1
    print("nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
