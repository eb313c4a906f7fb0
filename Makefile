# Each target makes what it needs: a virtual environment with pinned dependencies, once per change of either file.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The real vLLM has other dependencies, so it has an environment of its own.
VLLM       := build/venv-vllm
VLLM_STAMP := $(VLLM)/.installed
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export COVERAGE_FILE := build/.coverage

.PHONY: help install demo test test-vllm check bench bench-vllm gpu clean
help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Ecotone and its dependencies into $(VENV) (about a minute)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[engine,ray,train,dev]"
	@touch $@

install: $(STAMP) ## create .venv with everything

demo: $(STAMP)   ## ask a real model about real images, with and without the cache
	@$(BIN)/ecotone demo

test: $(STAMP)   ## every test: Ecotone's own with branch coverage, then those in the real vLLM
	@mkdir -p build
	@$(BIN)/python -m pytest --cov --cov-report=json:build/coverage.json --cov-report=
	@$(BIN)/python tests/branches.py build/coverage.json
	@$(MAKE) --no-print-directory test-vllm

$(VLLM_STAMP): pyproject.toml tests/vllm/constraints.txt tests/vllm/make_venv.sh tests/vllm/torchvision_ops.py
	@echo "installing vLLM and this Ecotone into $(VLLM) (about two minutes)"
	@mkdir -p build
	@PYTHON=$(PYTHON) tests/vllm/make_venv.sh $(VLLM)
	@touch $@

test-vllm: $(VLLM_STAMP) ## the plug-in in the real vLLM (about 20 minutes on two cores)
	@$(VLLM)/bin/python -m pytest tests/vllm

check: $(STAMP)  ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(STAMP)  ## every benchmark, JSON under build/bench
	@$(BIN)/python -m benchmarks

bench-vllm: $(VLLM_STAMP) ## Ecotone in the real vLLM against vLLM's own ways, JSON and tables under build/bench
	@$(VLLM)/bin/python -m benchmarks.vllm

gpu: $(STAMP)    ## the checks that need a CUDA device; says so where there is none
	@$(BIN)/python tests/gpu/run.py

clean:           ## remove everything the targets made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
