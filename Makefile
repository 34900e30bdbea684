# make serve   an OpenAI-compatible server with a real model        make test   all tests
# `make help` lists the rest.  Everything is made inside this folder (.venv, build, dist) and in the user's model cache.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODELS := smollm2-135m gemma3-270m
KERNELS := CMakeLists.txt pyproject.toml $(shell find csrc -type f 2>/dev/null)

# The first Python on the path that is new enough and can make virtual environments.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then echo $$p; break; fi; done)

# What a list in pyproject.toml holds, one entry a line: $(call listed,expression on p)
listed = $(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); print('\n'.join($(1)))"
say = @echo "== $(1)"

.PHONY: help serve demo test lint format wheel wheel-check bench bench-all kl sanitize fuzz soak models clean

help:
	@echo "make serve        build, fetch SmolLM2-135M, serve it on 127.0.0.1:8000 (ARGS=... goes to octavo serve)"
	@echo "make demo         build, fetch SmolLM2-135M, answer 16 prompts in one batch"
	@echo "make test         run all tests (ARGS=... goes to pytest; FRESH=1 draws other examples)"
	@echo "make lint         ruff, mypy, import contracts          make format   let ruff rewrite"
	@echo "make bench        speed on this machine (PEER=path/to/llama-server measures llama.cpp beside it)"
	@echo "make bench-all    that, and what does without a peer: kernels, steps, speculation, prefixes, memory rules"
	@echo "make kl           how far 8-bit activations are from exact ones, in nats a token, on both real models"
	@echo "make wheel        build a wheel into dist/              make wheel-check   install and try it without a compiler"
	@echo "make sanitize     kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make fuzz         Schemathesis against the server's OpenAPI for 20 minutes"
	@echo "make soak         1,000 streams at once for two minutes, some dropped, some slow; then kill -9 and restart"
	@echo "make clean        remove everything that was made here"

# ---- environment -----------------------------------------------------------------------------------------------------

$(VENV)/.made:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "error: Octavo needs Python 3.11 or newer with venv (on Debian: apt-get install python3 python3-venv)" >&2; \
	  exit 1; fi
	$(call say,making the virtual environment in $(VENV) with $(PYTHON))
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The project itself, editable, with its kernels.  Made again when the kernels or the build change, not for Python.
$(VENV)/.installed: $(VENV)/.made $(KERNELS)
	@if ! command -v "$${CXX:-c++}" >/dev/null; then \
	  echo "error: Octavo needs a C++ compiler to build its kernels (on Debian: apt-get install g++)" >&2; exit 1; fi
	@if ! $(BIN)/python -c 'import os, sysconfig, sys; \
	  sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then \
	  echo "error: Octavo needs Python's headers to build its kernels (on Debian: apt-get install python3-dev)" >&2; \
	  exit 1; fi
	$(call say,installing build tools)
	@$(call listed,p['build-system']['requires'] + 'cmake ninja'.split()) > $(VENV)/build.txt
	@$(PIP) install -q -r $(VENV)/build.txt
	$(call say,building the kernels and installing Octavo; this takes a few minutes)
	@$(PIP) install -q --no-build-isolation -e '.[server]'
	@touch $@

$(VENV)/.lint: $(VENV)/.installed
	@$(PIP) install -q ruff mypy import-linter
	@touch $@

# torch on its own first: the pin decides which build comes, and nothing that is resolved later may change it.
$(VENV)/.test: $(VENV)/.installed pyproject.toml
	$(call say,installing what the tests need)
	@$(call listed,p['project']['optional-dependencies']['test']) > $(VENV)/test.txt
	@$(PIP) install -q "$$(grep '^torch==' $(VENV)/test.txt)"
	@$(PIP) install -q -r $(VENV)/test.txt
	@touch $@

models: $(VENV)/.installed
	@$(BIN)/octavo pull $(MODELS) >/dev/null

# ---- what people call ------------------------------------------------------------------------------------------------

serve: $(VENV)/.installed
	@$(BIN)/octavo serve $(ARGS)

demo: $(VENV)/.installed
	@$(BIN)/octavo demo

test: $(VENV)/.test models
	@HF_HUB_OFFLINE=1 OCTAVO_REAL_MODELS=1 $(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kl: models
	@$(BIN)/python bench/kl.py $(ARGS)

bench: $(VENV)/.installed
	@$(BIN)/octavo pull smollm2-135m >/dev/null
	@$(BIN)/python bench/run.py $(if $(PEER),--peer-server "$(PEER)") $(ARGS)

# Kernels against what the machine can do, steps without them, and speculation; each goes on after a missed figure.
bench-all: bench
	@missed=; for name in gemm attention steps speculate prefix preempt oversubscribe; do \
	  echo; echo "== bench/$$name.py"; $(BIN)/python bench/$$name.py || missed="$$missed $$name"; done; \
	if [ -n "$$missed" ]; then echo "missed in:$$missed" >&2; exit 1; fi

wheel: $(VENV)/.installed
	@rm -rf dist
	@$(PIP) wheel -q --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

# An empty environment, no compiler, outside the source folder.
wheel-check: wheel
	@rm -rf build/wheel-check && mkdir -p build/wheel-check
	@$(BIN)/python -m venv build/wheel-check/venv
	@CC=false CXX=false build/wheel-check/venv/bin/python -m pip --disable-pip-version-check install -q \
	  --only-binary :all: dist/*.whl
	@cd build/wheel-check && unset PYTHONPATH && venv/bin/octavo doctor && venv/bin/octavo pull smollm2-135m && \
	  venv/bin/octavo generate smollm2-135m "Why is the sky blue?" -t 0 -m 32 | tee answer && \
	  grep -qw sky answer

# Kernel modules built for the sanitizers, which the tests take in place of the installed ones.
SANITIZED := build/sanitize
# Besides the scalar build, the widest one: that is where an access past the end would be.
SANITIZED_ISAS ?= $(if $(filter x86_64 amd64,$(shell uname -m)),avx512,neon)
sanitize: $(VENV)/.test
	$(call say,building the kernels for the sanitizers)
	@PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B $(SANITIZED) -G Ninja -DOCTAVO_SANITIZE=ON \
	  "-DOCTAVO_ISAS=$(SANITIZED_ISAS)" \
	  -DPython_EXECUTABLE="$(abspath $(BIN))/python" >$(VENV)/sanitize.log || { cat $(VENV)/sanitize.log; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" cmake --build $(SANITIZED) >$(VENV)/sanitize.log || { cat $(VENV)/sanitize.log; exit 1; }
	@$(BIN)/python tests/run_sanitized.py $(SANITIZED) $(ARGS)

fuzz: $(VENV)/.test
	@HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python tests/run_fuzz.py $(ARGS)

soak: $(VENV)/.installed
	@$(BIN)/octavo pull smollm2-135m >/dev/null
	@$(BIN)/python bench/soak.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache bench/out
