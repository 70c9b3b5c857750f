# Everything sets itself up: a machine needs Python 3.11 or newer, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE_URL ?=
ENGINE_FOLDER ?= .engine
IMAGE_FOLDER ?= .image
# Further options for the scorer, such as SCORE="--scenario flat --seeds 0-0"; the last of each counts.
SCORE ?=

.PHONY: run test check bench bench-leak engine-test gpu-test image-test clean

run: $(VENV)/.run
ifeq ($(ENGINE_URL),)
	$(BIN)/vllm-headroom demo
else
	$(BIN)/vllm-headroom run --engine-url '$(ENGINE_URL)'
endif

test: $(VENV)/.test
	$(BIN)/pytest

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest

bench: $(VENV)/.test
	$(BIN)/pytest -m bench -s tests/bench

bench-leak: $(VENV)/.test
	$(BIN)/python tests/bench/leak/score.py --seeds 50-53 --jobs 2 --write docs/leaks.md $(SCORE)

engine-test: $(VENV)/.test
	tests/engine/setup.sh $(ENGINE_FOLDER)
	ENGINE_FOLDER=$(ENGINE_FOLDER) $(BIN)/pytest -m engine -s tests/engine

gpu-test: $(VENV)/.test
	$(BIN)/pytest -m gpu -s tests/gpu

image-test: $(VENV)/.test
	tests/image/setup.sh $(IMAGE_FOLDER)
	IMAGE_FOLDER=$(IMAGE_FOLDER) $(BIN)/pytest -m image -s tests/image

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "vllm-headroom needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: requirements/runtime.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV), about half a minute ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/runtime.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/.test: requirements/dev.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV), about a minute ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) .engine .image .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
