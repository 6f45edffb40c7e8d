# `make help` lists the targets. PYTHON: the interpreter (3.11+) of the virtual environment that `setup` makes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.qlm-installed
PROTOS := $(sort $(shell find protos -name '*.proto'))
TRACE ?=
SEEDS ?= 1000
START ?= 1
PROCESSES ?= 2
TEST_WORKERS ?= 4

.DEFAULT_GOAL := help
.PHONY: help setup warm protos docs format lint type imports test test-seeds demo up clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-11s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with everything for running and developing

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

# Half a minute when the solver has changed, else a second: not in the middle of a test, or while requests wait.
warm: $(STAMP) ## Compile the planner's solver
	@$(BIN)/python -c 'from qlm_planner.solver import warm_up; warm_up()'

protos: $(STAMP) ## Generate the stubs in src/qlm from protos/
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
		--python_out=src --grpc_python_out=src --mypy_out=src --mypy_grpc_out=src $(PROTOS)

docs: $(STAMP) ## Write docs/configuration.md and docs/metrics.md from the code
	$(BIN)/python -m qlm.cli.settings_reference > docs/configuration.md
	$(BIN)/python -m qlm.cli.metrics_reference > docs/metrics.md

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

lint: $(STAMP) ## Check style (ruff)
	$(BIN)/ruff check .

type: $(STAMP) ## Check types (mypy, strict)
	$(BIN)/mypy

imports: $(STAMP) ## Check who may import whom (import-linter)
	$(BIN)/lint-imports --no-cache

# Tests mostly wait for processes of their own, so there are more workers than cores. Byte code is kept even where the environment says
# not to: a cluster is six processes and more, each of which would compile all of the code again.
test: warm ## Run the core tests (well under ten minutes on two cores; TEST_WORKERS=4, 0: one after the other in one process)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal

test-seeds: warm ## Run the cluster in virtual time through many storms of faults (SEEDS=1000 START=1 PROCESSES=2)
	$(BIN)/python -m qlm_sim --count $(SEEDS) --start $(START) --processes $(PROCESSES) --require

demo: warm ## Replay 2,000+ requests on a whole cluster with kills; table, picture, comparison in out/demo (TRACE=file.csv.gz: your own)
	$(BIN)/python -m qlm_load demo $(if $(TRACE),--trace $(TRACE))

up: warm ## Run everything on this machine, gateway on 127.0.0.1:50051
	$(BIN)/qlm up

clean: ## Remove the virtual environment, caches and outputs (not qlm-state)
	rm -rf $(VENV) out dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
