# From a fresh clone with Python 3.10 or later, pip and make: `make demo`, `make test`.
# Everything lives in .venv. PYTHON chooses the interpreter, PIP_ARGS is handed to pip.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
OTHER := .venv-third-party
FUZZ := .venv-fuzz
INPUTS ?= 1000000
CHAOS_SEEDS ?= 20000
SOAK_SECONDS ?= 1200
CUDA_PYTHON ?= $(BIN)/python

# The layers without sockets, threads or a clock: cheap to test to the last branch.
# (Not autograd.graph: to find a module of that package coverage would import it, and torch with it, twice. What of
# the package is not pure is left out in pyproject.toml.)
PURE := wire errors ids options agent.pending agent.role agent.link_state security refs.counting refs.mailbox autograd
COVER_PURE := $(PURE:%=--cov=backhaul.%)
# Their own tests, apart from the others: tracing lines makes threads and processes twice as slow.
SECURITY_TESTS := $(filter-out tests/security/test_attacks_%,$(wildcard tests/security/test_*.py))
PURE_TESTS := tests/wire $(SECURITY_TESTS) tests/test_errors.py tests/test_options.py tests/agent/test_pending.py \
	tests/agent/test_role.py tests/agent/test_link_state.py tests/agent/test_link_simulation.py \
	tests/refs/test_counting.py tests/refs/test_mailbox.py tests/refs/test_simulation.py \
	tests/autograd/test_graph.py tests/autograd/test_part.py tests/autograd/test_completion.py
# Of the layers that are not pure, up to training, and of what looks at them: about half of what is not pure.
LAYER_TESTS := tests/agent tests/autograd tests/calls tests/refs tests/testing tests/transport \
	tests/devices tests/drawing tests/inspection tests/profiler tests/seeing \
	tests/nn tests/optim tests/checkpoint tests/federation

.DEFAULT_GOAL := help
.PHONY: help demo test test-pure test-layers test-rest lint slow faults chaos soak attacks conformance cuda third-party \
	fuzz bench bench-pinned bench-check coverage clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(STAMP) ## train a model that lives in three processes, and check its gradients
	@$(BIN)/python examples/demo.py

# The first is work for one processor, the others wait for processes most of the time: so all at once.
test: lint ## everything that has to pass before a commit
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target test-pure test-layers test-rest

test-pure: $(STAMP)
	$(BIN)/pytest -q -m "not slow" $(COVER_PURE) --cov-fail-under=95 --cov-report=term:skip-covered $(PURE_TESTS)

test-layers: $(STAMP)
	$(BIN)/pytest -q -m "not slow" $(LAYER_TESTS) $(PURE_TESTS:%=--ignore=%)

test-rest: $(STAMP)
	$(BIN)/pytest -q -m "not slow" $(PURE_TESTS:%=--ignore=%) $(LAYER_TESTS:%=--ignore=%)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

slow: $(STAMP) ## the suites that take minutes: 10,000 simulated, 20,000 random and 2,000 adversarial programs, the speed floor
	$(BIN)/pytest -q -m slow --ignore=tests/faults

# Some need root, for network namespaces, TUN devices and cgroups; without it they are skipped, and say so.
faults: $(STAMP) ## every row of docs/reliability.md, in real processes, with the table of what was measured; an hour
	BACKHAUL_FAULT_TABLE=1 $(BIN)/pytest -q tests/faults

chaos: $(STAMP) ## 20,000 simulated training runs under cuts, deaths and rejoins (CHAOS_SEEDS=...), and planted mistakes
	$(BIN)/pytest -q tests/faults/test_chaos.py
	$(BIN)/python tests/faults/chaos.py 0 $(CHAOS_SEEDS)

soak: $(STAMP) ## five processes, a kill every 15 s, resets in between, for 20 minutes (SOAK_SECONDS=...); needs root
	$(BIN)/python tests/faults/soak.py $(SOAK_SECONDS)

attacks: $(STAMP) ## a hostile member of a federation, half a minute for each attack: what it costs a good one
	PYTHONPATH=tests $(BIN)/python tests/security/attacks.py

conformance: $(STAMP) ## torch's own RPC suites on Backhaul: 464 tests, some ten minutes
	$(BIN)/python conformance/run.py

# The virtual environment may have a torch without CUDA: CUDA_PYTHON names an interpreter whose torch has it, with
# msgspec, cryptography, rich, pytest, pytest-timeout, hypothesis and expecttest.
cuda: ## what needs a GPU: tests, random programs, torch's own CUDA tests, speed beside torch RPC (CUDA_PYTHON=...)
	PYTHONPATH=src $(CUDA_PYTHON) -m pytest -q tests/cuda
	PYTHONPATH=src BACKHAUL_PROGRAMS_DEVICE=cuda $(CUDA_PYTHON) tests/autograd/programs.py 0 2000
	PYTHONPATH=src $(CUDA_PYTHON) conformance/cuda.py
	PYTHONPATH=src $(CUDA_PYTHON) -m backhaul bench --cuda

third-party: $(OTHER)/.stamp ## unmodified torch_geometric and torchrl, from PyPI, on Backhaul
	$(OTHER)/bin/pytest -q third_party

fuzz: $(FUZZ)/.stamp ## a million hostile inputs for each target in fuzz/ (INPUTS=...); some half an hour
	$(FUZZ)/bin/python fuzz/run.py --inputs $(INPUTS)

bench: $(STAMP) ## measure calls and gradients beside torch.distributed and bare limits; into bench-results/
	$(BIN)/backhaul bench --json bench-results/bench.json --plot bench-results
	$(BIN)/backhaul bench --looking

bench-pinned: $(STAMP) ## the same with all processes on one processor, where nothing may be slower than torch
	$(BIN)/backhaul bench --pin --json bench-results/bench-pinned.json

bench-check: $(STAMP) ## fail if a ratio to torch.distributed has lost more than a quarter since bench-baseline.json
	$(BIN)/backhaul bench --quick --check bench-baseline.json

coverage: $(STAMP) ## coverage of the whole package, as HTML in htmlcov/
	$(BIN)/pytest -q -m "not slow" --cov=backhaul --cov-branch --cov-config=/dev/null --cov-report=term:skip-covered --cov-report=html

clean: ## remove what tools left behind; .venv stays
	rm -rf build dist htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# constraints.txt pins torch: without it pip would choose a build of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "backhaul needs Python 3.10 or later; try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "setting up $(VENV); the first time takes a while"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@

$(OTHER)/.stamp: pyproject.toml constraints.txt third_party/requirements.txt
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt \
		-r third_party/requirements.txt -e .
	@touch $@

$(FUZZ)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[fuzz]"
	@touch $@
