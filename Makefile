# Two commands for newcomers: `make demo` and `make test`. Each sets up what it needs in $(VENV).
PYTHON ?= python3
VENV ?= .venv
RUNS ?= runs
DOCUMENTS := README.md docs/synthetic.md docs/cifar.md docs/beyond.md docs/tables.md docs/ablations.md
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit format tables bench clean

help:  ## What there is.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.plot  ## The paper's synthetic experiment: a table, a picture and a page. About 4 minutes on two cores.
	$(BIN)/kernelhead reproduce synthetic --runs $(RUNS)

test: lint types unit  ## Lint, types and tests.

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/pytest -n 2

format: $(VENV)/.dev  ## Put the code into the house format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: $(VENV)/.plot  ## Make the tables of results/ and of the documents again from the result files.
	$(BIN)/kernelhead report --runs results $(DOCUMENTS:%=--fill %)

bench: $(VENV)/.dev  ## Speed and memory of the head against a linear layer.
	$(BIN)/python benchmarks/head.py

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache

# One stamp file an extra, so that an edit of the dependencies installs again.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kernelhead needs Python 3.11 or later; name one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
