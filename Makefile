# make demo   set up, then train a small network on real data with every core destination attached;
#             STORE=s3://bucket/prefix uploads what it leaves there, and not to runs/store
# make test   set up, then lint, check types, run the tests
# make bench  the measured claims of the docs, as ratios against whatever peers are installed
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types bench format clean

demo: $(READY)
	$(BIN)/python docs/examples/digits.py $(if $(STORE),--store "$(STORE)")

test: lint types
	$(BIN)/python -m pytest -n auto --dist loadgroup

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m tests.benchmarks

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch goes first and alone: a package that pulls it in would choose a build of its own.
$(READY): pyproject.toml .ci/constraints.txt .ci/no-deps.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python must be 3.11 or newer, got " + sys.version.split()[0] + ". Say which: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement .ci/no-deps.txt
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
