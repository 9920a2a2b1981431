"""`make test`: the suite in two parts side by side; then every failed test again, alone.

Most tests wait for processes, and share two processors: now and then one of several thousand misses a deadline for
reasons unrelated to what it tests. A test that passes the second time, when nothing else runs, counts as passed, and
the last lines name it as unstable. A test that fails twice fails the run, and so do more than `TOLERATED` unstable
ones.

    python tests/suite.py [paths or options of pytest, for the part without coverage]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOLERATED = 3

# Layers without sockets, threads or a clock: they are cheap to test to the last branch. To find a single module of
# autograd, coverage would import the package, and torch with it, twice. So this names the whole package, and
# pyproject.toml excludes the files that are not pure.
PURE = (
    *("wire", "errors", "ids", "options", "security", "trust", "autograd"),
    *("agent.pending", "agent.role", "agent.link_state", "refs.counting", "refs.mailbox"),
    *("refs.actions", "refs.entries", "refs.numbers", "refs.sweeps"),
)
ENOUGH = 95  # per cent of the lines of those
# The tests of those layers run apart from the others. Tracing lines makes them several times slower: nothing is traced
# that covers no line more: neither fuzzing, nor simulations, nor attacks by the thousand.
UNTRACED = (
    "tests/wire/test_decoder_fuzz.py",
    *(f"tests/security/test_{name}.py" for name in ("fuzz_targets", "growth", "many_connections")),
)
PURE_TESTS = (
    *(
        path
        for folder in ("wire", "security")
        for path in sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / folder).glob("test_*.py"))
        if "test_attacks_" not in path and path not in UNTRACED
    ),
    *("tests/test_errors.py", "tests/test_options.py"),
    *(f"tests/agent/test_{name}.py" for name in ("pending", "role", "link_state")),
    *(f"tests/refs/test_{name}.py" for name in ("counting", "lives", "mailbox")),
    *(f"tests/autograd/test_{name}.py" for name in ("graph", "schedule", "completion", "node_hooks", "local_pass")),
)
# Processes of pytest for the others. Their tests wait most of the time.
ABREAST = (os.cpu_count() or 1) + 2


def missing(modules: Iterable[str], tests: Iterable[str]) -> list[str]:
    """The names above that do not exist, perhaps after a rename."""
    sources = ((module, ROOT / "src" / "backhaul" / module.replace(".", "/")) for module in modules)
    lost = [
        f"backhaul.{module}" for module, path in sources if not path.is_dir() and not path.with_suffix(".py").exists()
    ]
    return lost + [path for path in tests if not (ROOT / path).exists()]


class Part:
    """One run of pytest. It notes failures in its own folder."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name = name
        self._cache = ROOT / ".pytest_cache" / name
        self._failed = self._cache / "v" / "cache" / "lastfailed"
        self._failed.unlink(missing_ok=True)
        self._output = ROOT / ".pytest_cache" / f"{name}.txt"
        self._output.parent.mkdir(exist_ok=True)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*self._pytest(), "-m", "not slow", *arguments],
                cwd=ROOT,
                env={"OMP_NUM_THREADS": "1", **os.environ, "COVERAGE_FILE": f".coverage.{name}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._began = time.monotonic()

    def _pytest(self) -> list[str]:
        return [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={self._cache}"]

    def wait(self) -> int:
        """Print the run's output, once it has ended; returns its exit status."""
        status = self._process.wait()
        print(f"== {self.name}: {time.monotonic() - self._began:.0f} s", flush=True)
        sys.stdout.buffer.write(self._output.read_bytes())
        sys.stdout.flush()
        return status

    @property
    def failed(self) -> list[str]:
        return sorted(json.loads(self._failed.read_text())) if self._failed.exists() else []

    def repeat(self) -> int:
        """Run the failed tests again, one at a time."""
        return subprocess.run([*self._pytest(), "--last-failed"], cwd=ROOT, stdin=subprocess.DEVNULL).returncode

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def main(arguments: list[str]) -> int:
    if lost := missing(PURE, (*PURE_TESTS, *UNTRACED)):
        print(f"{Path(__file__).name} names what does not exist: {', '.join(lost)}", file=sys.stderr)
        return 2
    covered = [*(f"--cov=backhaul.{name}" for name in PURE), "--cov-report=term:skip-covered"]
    # By file, since files share processes between their tests; in the order of `conftest`, which has the longest first.
    others = ["-n", str(ABREAST), "--dist", "loadfile", "--no-loadscope-reorder"]
    others += [f"--ignore={path}" for path in PURE_TESTS]
    parts = [Part("pure", [*covered, *PURE_TESTS]), Part("others", [*others, *arguments])]
    try:
        statuses = [part.wait() for part in parts]
    finally:
        for part in parts:
            part.stop()
    if any(status > 1 for status in statuses):  # interrupted, or pytest itself failed
        return max(statuses)

    unstable = [test for part in parts for test in part.failed]
    if len(unstable) > TOLERATED:
        print(f"{len(unstable)} tests failed")
        return 1
    for part, status in zip(parts, statuses, strict=True):
        if status and not part.failed:  # not caused by a test
            return status
        if status:
            print(f"== {part.name}: what failed, once more", flush=True)
            if part.repeat():
                return 1
    for test in unstable:
        print(f"UNSTABLE {test}: failed beside the others, passed alone")
    return enough_is_covered()


def enough_is_covered() -> int:
    command = [sys.executable, "-m", "coverage", "report", "--format=total", f"--fail-under={ENOUGH}"]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "COVERAGE_FILE": ".coverage.pure"})
    if result.returncode:
        print(f"the pure layers are covered by less than {ENOUGH} %")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
