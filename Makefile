# Every target sets itself up: the first run makes .venv, later runs only compare file times.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup test lint format types check demo bench documents clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with the pinned tools (PYTHON=python3.x chooses the interpreter)

test: $(READY) ## run the whole test suite (ARGS="-k anderson" to narrow it)
	$(BIN)/pytest $(ARGS)

lint: $(READY) ## check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(READY) ## repair style and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(READY) ## check types
	$(BIN)/pyright

check: lint types test ## everything a review expects

demo: $(READY) ## a short tour on this machine
	$(BIN)/python examples/demo.py

bench: $(READY) ## compare the solvers
	$(BIN)/deqkit bench solvers

documents: $(READY) ## write the tables and figures of README.md and docs/ anew from results/
	$(BIN)/deqkit paper --document
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/plots.py

clean: ## remove .venv and caches
	rm -rf .venv .hypothesis .pytest_cache .ruff_cache

# The version test avoids f-strings so that an old Python can still print it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("deqkit needs Python 3.11 or newer; %s is %d.%d. Choose another: make PYTHON=python3.11 ..." % (sys.executable, v[0], v[1]))'
	@echo "setting up .venv (the first time takes a few minutes)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
