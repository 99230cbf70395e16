# The developers' commands. `make` lists them. Everything happens in .venv, made with $(PYTHON), 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
SOURCES := mlxcel backends tests benchmarks examples setup.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format type bench bench-engine bench-gate engine-parity docs clean

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.base ## install, fetch the default model, and answer a question
	$(BIN)/mlxcel generate -p "Why is the sky blue?"

# A worker has one core: BLAS threads of two workers would wait for each other.
test test-slow: export OPENBLAS_NUM_THREADS := 1

test: $(VENV)/.dev ## install everything the tests need, and run them
	MLXCEL_TEST_MODEL="$$($(BIN)/mlxcel download smollm2-135m-instruct)" && export MLXCEL_TEST_MODEL && \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-slow: $(VENV)/.dev ## the statistical and load tests, and those that need 240 MB more of a model
	MLXCEL_TEST_MODEL="$$($(BIN)/mlxcel download smollm2-135m-instruct)" && export MLXCEL_TEST_MODEL && \
	MLXCEL_TEST_GEMMA3="$$($(BIN)/mlxcel download gemma3-270m)" && export MLXCEL_TEST_GEMMA3 && \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

lint: $(VENV)/.dev ## ruff: rules and format
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(VENV)/.dev ## let ruff correct what it can
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

type: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy --strict -p mlxcel -p mlxcel_jax_cuda -p mlxcel_reference_numpy

bench: $(VENV)/.dev ## what the command line costs to start, and how fast NumPy decodes
	$(BIN)/python benchmarks/cli_start.py
	$(BIN)/python benchmarks/cpu_decode.py "$$($(BIN)/mlxcel download smollm2-135m-instruct)"

bench-engine: $(VENV)/.base ## decode speed and time to first token: MODEL=..., ARGS=... (docs/benchmarking.md)
	$(BIN)/mlxcel bench-engine $(MODEL) $(ARGS)

bench-gate: $(VENV)/.base ## the same, and fail where it is slower than BASE=RECORDS: MODEL=..., ARGS=... as then
	@test -n "$(BASE)" || { echo "error: BASE names no records"; \
	  echo "hint: make bench-engine ARGS='--out FILE' takes them, make bench-gate BASE=FILE compares"; exit 2; }
	$(BIN)/mlxcel bench-engine $(MODEL) --compare "$(BASE)" $(ARGS)

engine-parity: $(VENV)/.base ## every way of running a request against the others: MODEL=... ARGS="..."
	MLXCEL_SDPA_DETERMINISTIC=1 $(BIN)/mlxcel engine-parity $(MODEL) $(ARGS)

docs: $(VENV)/.dev ## write the tables of the documentation anew
	$(BIN)/python -m mlxcel.cli.reference docs/cli.md docs/sampling.md docs/server.md

clean: ## remove what was made here
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: mlxcel needs Python 3.11 or newer, and $(PYTHON) is not: $$($(PYTHON) --version 2>&1)"; \
	  echo "hint: make PYTHON=python3.12 (or where yours is)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "error: $(PYTHON) cannot make environments with pip: its venv or ensurepip module is missing"; \
	  echo "hint: on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: pyproject.toml setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.base
