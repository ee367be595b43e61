# Set-up needs only python3 (3.10 or newer, with the venv module) and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt
# Tests wait a lot, for other ranks, deadlines and kills: two files of them at once take about two thirds of the time.
WORKERS ?= 2

# the part of the simulated accelerator's tests that takes seconds; it is compiled once
SIM := $(addprefix tests/simdevice/,test_build.py test_planted_faults.py test_operators.py)

.PHONY: run test check shake soak clean help
.DEFAULT_GOAL := help

help:
	@echo "make run    set up and show what lowtide does, about two minutes after the download"
	@echo "make test   set up and run all tests"
	@echo "make check  lint, types, unit and property tests: under two minutes, before every commit"
	@echo "make shake  all tests, while disks and other ranks are late by chance, with new random examples"
	@echo "make soak   the full products and long runs"
	@echo "make clean  remove what the other targets made, the virtual environment included"

run: $(VENV)/.installed
	@$(BIN)/lowtide demo

test: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: $(VENV)/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/python -m pytest -q $(wildcard tests/unit tests/property) $(SIM) tests/test_source_rules.py $(ARGS)

shake: $(VENV)/.installed-dev
	@HYPOTHESIS_PROFILE=new PYTHONPATH=$(CURDIR)/tests/kit/shaken $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

soak: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -m soak --timeout 1800 $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "lowtide needs Python 3.10 or newer; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "$(PYTHON) has no venv module: install it (Debian and Ubuntu: apt-get install python3-venv) and run make again." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# torch goes first and alone: once the pinned build is there, nothing that depends on torch pulls in another one.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "Installing PyTorch into $(VENV) (once) ..."
	@$(PIP) install -qq -c constraints.txt torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(INPUTS) | $(BIN)/python
	@echo "Installing lowtide into $(VENV) (once) ..."
	@$(PIP) install -qq -c constraints.txt -e '.[bpe]'
	@touch $@

# Open MPI is in dev. MPICH's mpirun would overwrite Open MPI's, so it has a folder of its own.
$(VENV)/.installed-dev: $(VENV)/.torch $(INPUTS) | $(BIN)/python
	@echo "Installing lowtide and its development tools into $(VENV) (once) ..."
	@$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@$(PIP) install -qq -c constraints.txt --no-deps --ignore-installed --prefix $(VENV)/mpich mpich
	@touch $@ $(VENV)/.installed
