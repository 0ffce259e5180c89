# `make run` and `make test` do all their set-up themselves, in .venv. A second call is quick.
PYTHON ?= python3
VENV   ?= .venv
# Files of tests side by side, the long ones of tests/integration first; each server is started by
# the one file that needs it.
TEST_PROCESSES ?= 2
PYTEST := -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
BIN    := $(VENV)/bin
# Modules are compiled when they are first imported. Most never are, and pip would take longer to
# compile them all than to install them.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Another package index that has CPU builds of torch, where yours has none: the one that the install
# page of PyTorch names.
TORCH_INDEX ?=
TORCH  := $(shell sed -n 's/^torch==//p' constraints.txt)
NVIDIA ?= /proc/driver/nvidia/version
# The CPU build of torch on Linux without a GPU; fails where another one is wanted or there is none.
CPU_TORCH = [ "$$(uname)" = Linux ] && [ ! -e $(NVIDIA) ] && { \
	  $(PIP) $(TORCH_INDEX:%=--extra-index-url %) torch==$(TORCH)+cpu 2>/dev/null || { \
	  echo 'No CPU build of torch in your package index: pip fetches that for CUDA, several GB.' \
	    'For the small one: make setup TORCH_INDEX=URL, as the install page of PyTorch names it.'; \
	  false; }; }
# One thread per process: several small processes share the cores, and spinning OpenMP threads
# make each other ten times slower.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
# Tests start some hundred processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run test quick pythons lock lint format bench prove pictures clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 10

setup: $(VENV)/.ready  ## create .venv with all packages

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else \
	  "refiner needs Python 3.11 to 3.13, this is " + sys.version.split()[0] + ". Set PYTHON=python3.12, say.")'
	$(PYTHON) -m venv $(VENV)
ifdef LOCK
	$(PIP) --require-hashes --no-deps --requirement $(LOCK)
	$(PIP) --no-deps --no-build-isolation --editable .
else
	@$(CPU_TORCH) || $(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[dev]'
endif
	@touch $@

lock: setup  ## requirements.lock: what CI installs (make setup LOCK=requirements.lock), by hash
	$(PIP) --dry-run --ignore-installed --no-build-isolation --report $(VENV)/report.json \
	  --constraint constraints.txt setuptools torch==$(TORCH)+cpu --editable '.[dev,serving]'
	$(BIN)/python -m tests.support.lock $(VENV)/report.json > requirements.lock

run: setup  ## the whole pipeline on the tiny recipe: a few minutes, no account, no network
	$(BIN)/refiner run tiny

test: setup  ## all tests that this machine can run; others are skipped with a reason
	$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

quick: setup lint  ## style, types, and the tests that are not slow: before each commit, some three minutes on two cores
	$(BIN)/python $(PYTEST) -q -m 'not slow' tests/unit $(PYTEST_ARGS)

pythons:  ## the quick tests and a small run under each supported Python, in environments of their own
	@set -e; for version in 3.11 3.12 3.13; do \
	  $(MAKE) --no-print-directory quick VENV=.venv-$$version PYTHON=python$$version; \
	  .venv-$$version/bin/python -m pytest -q tests/integration/test_end_to_end.py; \
	done

lint: setup  ## style, types, and structure: imports, sizes, marks of fields, dead code, copies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.lint

format: setup  ## format with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

prove: setup  ## the long proofs: learning, recovery under faults, statistics, mutants (some hours)
	$(BIN)/python -m tests.prove.learning
	$(BIN)/python -m tests.prove.tools
	$(BIN)/python -m tests.prove.laboratory
	$(BIN)/python -m tests.prove.step100
	$(BIN)/python -m tests.prove.neighbour
	$(BIN)/python -m tests.prove.hangs
	$(BIN)/python -m tests.prove.simulation --mutations
	REFINER_THOROUGH=1 $(BIN)/python -m pytest -q tests/unit/test_every_*.py
	$(BIN)/python -m tests.prove.statistics
	$(BIN)/python -m tests.prove.labels
	$(BIN)/python -m tests.prove.criteria
	$(BIN)/python -m tests.prove.mutants
	$(BIN)/refiner prove-resume tiny --steps 12 --interruptions 6
	$(BIN)/refiner prove-resume tiny --steps 12 --interruptions 6 --stage grpo grpo.async_steps=1

bench: setup  ## speeds, each against its rival in one run
	$(BIN)/python -m tests.bench
	for name in attacks sweeps failures judgements many_runs many_samples monitor grpo_step trainer \
	  memory checkpoint_stall gpu; do $(BIN)/python -m tests.bench $$name || exit 1; done

pictures: setup  ## the pictures of the READMEs, from a real run and a real sweep (some twenty minutes)
	$(BIN)/refiner run tiny
	$(BIN)/refiner sweep citation-weight-tiny --yes
	$(BIN)/python -m tests.pictures runs

clean:  ## remove what building made (not your runs)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
