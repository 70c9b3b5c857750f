# Everything sets itself up: a machine needs Python 3.11 or newer, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE_URL ?=
# What happens in the demo that `make run` plays; docs/commands/demo.md has the scenarios.
SCENARIO ?= healthy
ENGINE_FOLDER ?= .engine
CARD_FOLDER ?= .card
IMAGE_FOLDER ?= .image
DOCKER ?= docker
CLUSTER_FOLDER ?= .cluster
CLUSTER_OPTIONS ?=
BROWSER_FOLDER ?= .browser
# Further options for the scorer, such as SCORE="--scenario flat --seeds 0-0"; the last of each counts.
SCORE ?=
# Processes that each take whole files: what a file has started is started once. Five for two cores, since end-to-end tests wait.
# A test that hangs for five minutes ends its process and is named; a second one ends the run.
HANGS := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true --max-worker-restart 1
PYTEST := $(BIN)/pytest -n 5 --dist loadfile --no-loadscope-reorder $(HANGS)

# An environment of another Python than the one that PYTHON names is made again: `make test PYTHON=python3.13`.
SHOW_VERSION := -c 'import sys; print(sys.version_info[:2])'
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard $(BIN)/python),)
ifneq ($(shell $(PYTHON) $(SHOW_VERSION)),$(shell $(BIN)/python $(SHOW_VERSION)))
$(shell rm -rf $(VENV))
endif
endif
endif

# Compiled files are kept even where the environment forbids it: else pip, pytest and every process compile again.
export PYTHONDONTWRITEBYTECODE :=

# What `make mutants` breaks: the files of src that differ from SINCE, or these files and folders.
SINCE ?= main
ROOMS ?=
.PHONY: run test check coverage ruff mypy imports mutants bench bench-leak engine-test card-test gpu-test image image-test cluster-test browser-test helm soak soak-node fuzz docs clean

# At 120 times the clock's speed the verdict on the leak, which takes an hour and a quarter, is there in 40 seconds.
run: $(VENV)/.run
ifeq ($(ENGINE_URL),)
	$(BIN)/vllm-headroom demo --scenario '$(SCENARIO)' --speed 120
else
	$(BIN)/vllm-headroom run --engine-url '$(ENGINE_URL)'
endif

test: $(VENV)/.test
	$(PYTEST)

# The same examples of the property tests in every run; `make test` looks for new ones.
check: $(VENV)/.test
	$(MAKE) --jobs=2 ruff mypy imports
	$(PYTEST) --hypothesis-profile=ci
	$(if $(CI),,$(MAKE) --no-print-directory coverage)

# By tests/unit alone, and not in CI: on Python 3.11 it takes twice the CPU that the tests do.
coverage: $(VENV)/.test
	mkdir -p .cache
	COVERAGE_FILE=$(CURDIR)/.cache/coverage $(PYTEST) --hypothesis-profile=ci tests/unit

ruff: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

mypy: $(VENV)/.test
	$(BIN)/mypy

imports: $(VENV)/.test
	$(BIN)/lint-imports

mutants: $(VENV)/.test
	$(BIN)/python tests/mutants.py --since '$(SINCE)' $(ROOMS)

bench: $(VENV)/.test
	$(BIN)/pytest -m bench -s tests/bench

# Some 150 traces of a seed and 90 recorded ones, about five and two seconds of processor each; no threshold was chosen on seeds 150 to 199.
# tests/bench/leak/benign.py runs days without a leak for hours, and goes on where it stopped.
bench-leak: $(VENV)/.test
	$(BIN)/python tests/bench/leak/measure.py --seeds 150 --jobs 2 --write docs/leaks.md $(SCORE)
	$(BIN)/python tests/bench/leak/rent.py --seeds 150 --jobs 2 --write docs/leaks.md
	$(BIN)/python tests/bench/leak/delays.py --write docs/leaks.md

engine-test: $(VENV)/.test
	tests/engine/setup.sh $(ENGINE_FOLDER)
	ENGINE_FOLDER=$(ENGINE_FOLDER) $(BIN)/pytest -m engine -s tests/engine

card-test: $(VENV)/.test
	tests/card/setup.sh $(CARD_FOLDER)
	CARD_FOLDER=$(CARD_FOLDER) $(BIN)/pytest -m card -s tests/card

gpu-test: $(VENV)/.test
	$(BIN)/pytest -m gpu -s tests/gpu

# Builds the image that deploy/kubernetes/example-local runs, and prints its size.
image:
	$(DOCKER) build --tag vllm-headroom:local .
	$(DOCKER) image inspect vllm-headroom:local --format '{{.Size}}' | awk '{printf "%.0f MB\n", $$1 / 1e6}'

image-test: $(VENV)/.test
	tests/image/setup.sh $(IMAGE_FOLDER)
	IMAGE_FOLDER=$(IMAGE_FOLDER) $(BIN)/pytest -m image -s tests/image

# A cluster of its own needs root, what tests/cluster/node/start.sh lists, and half an hour; with KUBECONFIG it takes that one.
cluster-test: $(VENV)/.test
	tests/cluster/run.sh $(CLUSTER_FOLDER) tests/cluster/play.sh $(BIN)/pytest $(CLUSTER_OPTIONS)

browser-test: $(VENV)/.test
	tests/browser/setup.sh $(BROWSER_FOLDER)
	BROWSER_FOLDER=$(BROWSER_FOLDER) $(BIN)/pytest -m browser tests/browser

# A week of the daemon's time in 34 minutes, with random faults; SOAK="--days 1 --seed 7" for another.
SOAK ?=
soak: $(VENV)/.test
	PYTHONPATH=. nice -n 15 $(BIN)/python tests/soak/soak.py $(SOAK)

# A day of a node's daemon in 12 minutes, while engines come and go; SOAK_NODE="--days 7 --seed 7" for another.
SOAK_NODE ?=
soak-node: $(VENV)/.test
	PYTHONPATH=. nice -n 15 $(BIN)/python tests/soak/node.py $(SOAK_NODE)

# Spoiled texts for each reader, a minute each and half an hour in all; FUZZ=600 for longer. What ends one is kept in tests/fuzz/seeds.
FUZZ ?= 60
fuzz: $(VENV)/.test
	FUZZ_SECONDS=$(FUZZ) nice -n 15 $(BIN)/pytest -m fuzz -s tests/fuzz tests/unit/daemon/test_borders.py

# Helm's SDK, with which the tests of the charts install them; it needs Python 3.12 or newer, under one of these names.
HELM_PYTHONS ?= python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python) python3
helm:
	@for python in $(HELM_PYTHONS); do $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || continue; \
	    $$python -m venv .helm && exec .helm/bin/python -m pip install --quiet --disable-pip-version-check helm-sdkpy==0.1.32; done; \
	    echo "make helm needs Python 3.12 or newer: make helm HELM_PYTHONS=/path/to/python3.12" && exit 1

# In a separate environment: what builds the site is no part of what is tested.
docs: .venv-docs/bin/mkdocs
	NO_MKDOCS_2_WARNING=true .venv-docs/bin/mkdocs build --quiet --strict --site-dir .cache/site
	@echo "The site is in .cache/site"

.venv-docs/bin/mkdocs: requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	@touch $@

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "vllm-headroom needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: requirements/runtime.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV), about half a minute ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/runtime.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# Not compiled: most of it is never imported.
$(VENV)/.test: requirements/dev.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV), about a minute ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) .venv-docs .helm .engine .image .browser .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
