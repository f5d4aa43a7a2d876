# Everything below runs in a virtual environment of its own, made on demand. Needed before: python3 (3.10 or newer), g++, make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PEER ?= .venv-peer
CLIENTS ?= .venv-clients
INSTALLED := $(VENV)/.installed
# Installed first and exactly as pinned, so that a build of it on disk is taken, whatever else would ask for torch.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
# Installed without its needs: ray, vllm and flash-attn, and one release of stock DeepSpeed.
BARE_CLIENTS := $(shell sed -n 's/^ *"\(openrlhf==[^"]*\)".*/\1/p' pyproject.toml)
# What the patch for stock is made of, the files behind its links too.
PATCH := $(shell find -L stock_patch \( -name build -o -name '*.egg-info' \) -prune -o -type f \
	! -name '*.pyc' ! -name '*.md' -print 2>/dev/null)
CPP := $(shell find csrc -name '*.cpp' -o -name '*.h' 2>/dev/null)

BENCHMARKS := $(wildcard benchmarks/host_step.py benchmarks/engine_step.py benchmarks/host_memory.py)

.PHONY: demo test test-peer test-stock test-clients check bench sanitize torture format clean

demo: $(INSTALLED)  ## train a small GPT on two ranks with the optimizer on the host, and show what it cost
	$(BIN)/deepspeed --num_gpus 2 examples/train_gpt.py

test: $(INSTALLED)  ## all tests
	$(BIN)/python -m pytest

check: $(INSTALLED)  ## formatting, lint, types, spelling, size limits
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/codespell
	$(BIN)/python -m pytest -q tests/unit/test_style.py tests/unit/test_layers.py

bench: $(INSTALLED)  ## every benchmark, one after the other
	for script in $(BENCHMARKS); do $(BIN)/python $$script || exit 1; done

sanitize: $(INSTALLED)  ## the kernels under the address, undefined-behaviour and thread sanitizers
	$(BIN)/python -m pytest tests/unit/ops/test_sanitizers.py

test-peer: $(INSTALLED)  ## exchange of checkpoints with stock DeepSpeed, in an environment of its own
	@$(MAKE) --no-print-directory $(PEER)/.installed || \
		echo "SKIPPED: stock DeepSpeed cannot be installed here; its checkpoints are NOT tested against ours."
	@test ! -f $(PEER)/.installed || DS_STOCK_PYTHON=$(abspath $(PEER))/bin/python \
		$(BIN)/python -m pytest -m compat tests/compat

test-stock: $(INSTALLED) $(PEER)/.patched  ## the patch for stock DeepSpeed, in stock's environment
	DS_STOCK_PYTHON=$(abspath $(PEER))/bin/python $(BIN)/python -m pytest -m stock tests/stock

test-clients: $(CLIENTS)/.installed  ## transformers, accelerate, lightning, trl and others train on this package
	DS_REQUIRE_CLIENTS=1 $(CLIENTS)/bin/python -m pytest -m clients tests/clients

torture: $(INSTALLED)  ## 100 kills at random moments of a save: the last whole checkpoint loads
	$(BIN)/python -m tests.torture.kill_during_save --kills 100

format: $(INSTALLED)  ## rewrite sources as check wants them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(PEER) $(CLIENTS) build dist *.egg-info stock_patch/build stock_patch/*.egg-info \
		.mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml setup.py deepspeed/version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "PYTHON: expected Python 3.10 or newer, got $$($(PYTHON) --version 2>&1). Run: make PYTHON=python3.11 ..."; exit 1; }
	@command -v g++ >/dev/null || { echo "g++: expected a C++ compiler, got none. Install it (apt-get install g++)."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]'
	touch $@

# Stock's package, which cannot share an environment with ours: both are named deepspeed. Its ops compile at first use.
$(PEER)/.installed:
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet $(TORCH) setuptools wheel ninja packaging psutil
	DS_BUILD_OPS=0 $(PEER)/bin/python -m pip install --quiet --no-build-isolation deepspeed==0.19.8
	touch $@

# Not switched on in test-peer, so it changes nothing there. A build folder that lies there would go into the wheel.
$(PEER)/.patched: $(PEER)/.installed $(PATCH)
	rm -rf stock_patch/build
	$(PEER)/bin/python -m pip install --quiet --no-build-isolation --no-deps --force-reinstall ./stock_patch
	rm -rf stock_patch/build stock_patch/*.egg-info
	touch $@

$(CLIENTS)/.installed: pyproject.toml setup.py deepspeed/version.py
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet $(TORCH)
	$(CLIENTS)/bin/python -m pip install --quiet --no-build-isolation --editable '.[dev,clients]'
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps $(BARE_CLIENTS)
	touch $@
