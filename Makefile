# `make test` is what has to pass before every commit; `make test-slow` adds the long proofs.
.DEFAULT_GOAL := help
PYTEST := python -m pytest -q

help:        ## this list
	@grep -E '^[a-z-]+: *##' $(MAKEFILE_LIST) | sed -E 's/: *## /\t/' | expand -t 14
setup:       ## install everything, editable, in the tested versions
	python -m pip install -q -c constraints.txt -e ".[dev]"
format:      ## sort and format
	python -m ruff check -q --fix-only . && python -m ruff format -q .
lint:        ## style
	python -m ruff check . && python -m ruff format --check .
types:       ## mypy --strict
	python -m mypy
unit:        ## tests, without the long proofs
	$(PYTEST) -n 2 -m "not slow and not gpu"
test: setup lint types unit  ## install, style, types, tests
test-slow:   ## the long proofs: kill loops, sweeps, the whole zoo
	$(PYTEST) -n 2 --durations=15 -m "slow and not gpu"
test-gpu:    ## what needs a CUDA device
	$(PYTEST) -m gpu
test-full: test test-slow ## all that runs without a GPU
wheel:       ## dist/
	python -m build --wheel
.PHONY: help setup format lint types unit test test-slow test-gpu test-full wheel
