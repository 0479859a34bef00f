# Entry points: each target makes .venv from the lock when needed, then runs the tool named in its recipe.
# On GPUs: `export LOCK=requirements/cuda.lock` first, so that every target uses the same environment.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: repro compare test test-all lint lock clean help

LOCK ?= requirements/cpu.lock
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
PIP_ARGS ?=
PYTEST_ARGS ?=

# Stages are started as `python`, by DVC and by tests: it has to be this one.
VENV := $(CURDIR)/.venv
RUN := PATH="$(VENV)/bin:$$PATH"

export DVC_NO_ANALYTICS := 1
export VLLM_NO_USAGE_STATS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Two test files at a time. Their OpenMP threads share the cores only if none of them spins while it waits.
PYTEST := OMP_WAIT_POLICY=PASSIVE KMP_BLOCKTIME=0 python -m pytest -n 2 --dist loadfile

repro: .venv/.installed ## run the pipeline (dvc repro), then print its summary
	@$(RUN) dvc repro
	@$(RUN) python -m eagle3 summary

compare: .venv/.installed ## print one table of all experiments
	@$(RUN) python -m eagle3 compare

test: .venv/.installed ## run the default tests
	@$(RUN) $(PYTEST) -m "not long" $(PYTEST_ARGS)

test-all: .venv/.installed ## run all tests, the long ones too
	@$(RUN) $(PYTEST) $(PYTEST_ARGS)

lint: .venv/.installed ## check style, format and types
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

lock: ## resolve requirements/*.lock again; versions that still fit stay
	$(PYTHON) requirements/lock.py cpu
	$(PYTHON) requirements/lock.py cuda

clean: ## remove .venv and the tools' caches; data, reports and DVC's cache stay
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache

help: ## print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s '|'

# The stamp is a copy of the installed lock, written last. It is compared by content: Git sets the times of files as it
# likes, and another LOCK is another environment.
ifneq ($(shell cmp -s $(LOCK) .venv/.installed && echo same),same)
.PHONY: .venv/.installed
endif

TORCH = $(shell grep -s '^torch==' $(LOCK))

define OLD_PYTHON
make: $(PYTHON) is not Python 3.11 or newer.
  Install python3.11 and its venv module, or name another one: make PYTHON=/path/to/python3.12 repro
endef

define NO_TORCH
make: pip could not install $(TORCH).
  A version that ends in +cpu is not on the default package index: PyTorch publishes it on an index of its own for CPU
  wheels, shown on its installation page. Pass that index to pip:
      make PIP_ARGS="--extra-index-url <PyTorch's CPU wheel index>" repro
endef
export OLD_PYTHON NO_TORCH

.venv/.installed:
	@test -f "$(LOCK)" || { echo "make: there is no lock file $(LOCK)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$OLD_PYTHON" >&2; exit 1; }
	@echo "make: installing the $$(grep -c == "$(LOCK)") packages of $(LOCK) into .venv (one to two minutes)"
	@rm -rf .venv
	@"$(PYTHON)" -m venv .venv
	@.venv/bin/python -m pip install --no-deps $(PIP_ARGS) "$(TORCH)" || { echo "$$NO_TORCH" >&2; exit 1; }
	@.venv/bin/python -m pip install --no-deps $(PIP_ARGS) -r "$(LOCK)"
	@cp "$(LOCK)" .venv/.installed.part
	@mv .venv/.installed.part .venv/.installed
	@echo "make: .venv is ready"
