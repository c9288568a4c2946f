# `make run` and `make test` do everything from a bare clone; `make help` lists the rest.
.DEFAULT_GOAL := help
PYTHON ?= python3
# The environment that is active, or one of this checkout's own.
VENV ?= $(or $(VIRTUAL_ENV),.venv)
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q
# Says that the environment holds this checkout, what these files ask for and the compiled kernel; made anew when one of
# them changes.
INSTALLED := $(VENV)/.optrun-installed
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(CURDIR))
.PHONY: $(INSTALLED)
endif

help:        ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14
run: setup   ## environment, package, and a run: make run ARGS="optimizer=lamb lr=2e-3"
	$(BIN)/optrun $(ARGS)
test: setup lint types unit ## environment, style, types, tests: what has to pass before every commit
setup: $(INSTALLED) ## the environment: everything, editable, in the tested versions
$(INSTALLED): pyproject.toml constraints.txt hatch_build.py $(wildcard optrun/optimizer/kernels/step.c optrun/optimizer/kernels/build.py)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"optrun needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Name another one: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@echo $(CURDIR) > $@
format: setup ## sort and format
	$(BIN)/python -m ruff check -q --fix-only . && $(BIN)/python -m ruff format -q .
lint: setup  ## style
	$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check .
types: setup ## mypy --strict
	$(BIN)/python -m mypy
smoke: setup ## some of every room, under half a minute: after every edit
	$(PYTEST) @tests/smoke.txt
unit: setup  ## tests, without the long proofs
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not gpu"
test-slow: setup ## the long proofs: kill loops, sweeps, the whole zoo
	$(PYTEST) -n 3 --dist worksteal --durations=15 -m "slow and not gpu"  # some wait for limits of time to pass
# No setup: the machine may have no network. It needs torch, transformers, pytest and the other dependencies.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:         ## on a machine with a CUDA device: its tests, then the table of speeds; OPTRUN_GPU_DRY=1 tries both on a CPU
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m pytest -q -m gpu -rs -W default tests/gpu
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) benchmarks/device.py
# Each in an environment of its own; docs/versions.md says what they showed.
PROMISED := @tests/smoke.txt tests/distributed/test_same_run.py -m "not slow and not gpu"
test-lowest: ## smoke list and ddp with the lowest declared version of every direct dependency
	$(PYTHON) -m venv --clear build/lowest
	build/lowest/bin/python -m pip install -q --disable-pip-version-check -c constraints-lowest.txt -e ".[dev]"
	build/lowest/bin/python -m pytest -q $(PROMISED)
test-newest: ## smoke list and ddp with the newest versions that pyproject.toml admits
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/python -m pip install -q --disable-pip-version-check -U -e ".[dev]"
	build/newest/bin/python -m pytest -q $(PROMISED)
test-full: test test-slow ## all that runs without a GPU
docs: setup  ## the tables in docs/reference (minutes), the site in build/site, the API reference in build/site/api
	$(BIN)/python -m tests.docs.configuration
	$(BIN)/python -m tests.foreign.record
	test -f docs/reference/zoo.md || $(BIN)/python -m tests.zoo.record
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/python -m mkdocs build --quiet --strict
	$(BIN)/python -m tests.docs.api
wheel: setup ## dist/
	$(BIN)/python -m build --wheel
.PHONY: help run test setup format lint types smoke unit test-slow test-lowest test-newest gpu test-full docs wheel
