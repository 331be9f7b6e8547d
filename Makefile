# Two commands: `make run` trains the default job, `make test` runs the tests. Both set up `.venv` first, once.
# `make run ARGS="strategy=mirrored strategy.virtual_devices=2"` hands ARGS to the runner, `make test ARGS="-k config"` to pytest.

# Importing TensorFlow without cached bytecode takes 10 s instead of 4.
unexport PYTHONDONTWRITEBYTECODE
# An outer virtual environment or PYTHONPATH must not leak into ours.
unexport PYTHONPATH VIRTUAL_ENV

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
UV ?= uv

.DEFAULT_GOAL := help
.PHONY: help run test lint format lock bench clean setup browser golden

help:
	@sed -n 's/^# //p' Makefile | head -2
	@echo "targets: run test lint format lock bench clean setup golden"

run: $(STAMP)
	$(BIN)/python -m runner $(ARGS)

test: $(STAMP) browser
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python "$$script" $(ARGS) || exit 1; done

setup: $(STAMP)

# What tests/test_browser.py opens MLflow's pages with; a package of the system, installed where that is allowed.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing chromium for tests/test_browser.py"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			chromium chromium-driver >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "No chromium here, and none could be installed: tests/test_browser.py is skipped." >&2

# A TensorFlow 2.15 with its tf.estimator beside ours, for tests/test_golden.py; no Python after 3.11 has one.
GOLDEN := .venv-2.15
PYTHON_2_15 ?= $(firstword $(foreach py,python3 python3.11 python3.10,$(shell \
	$(py) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 12))' >/dev/null 2>&1 && echo $(py))))

golden: $(GOLDEN)/.installed

$(GOLDEN)/.installed: requirements-2.15.lock
	@test -n "$(PYTHON_2_15)" || { echo "No Python 3.10 or 3.11 found. Give one: make golden PYTHON_2_15=/path/to/python" >&2; exit 1; }
	test -x $(GOLDEN)/bin/python || $(PYTHON_2_15) -m venv $(GOLDEN)
	$(GOLDEN)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-2.15.lock
	@touch $@

# The first of these that is a Python we support; override with `make PYTHON=/path/to/python`.
PYTHON ?= $(firstword $(foreach py,python3 python3.12 python3.11 python3.13,$(shell \
	$(py) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1 && echo $(py))))

# `touch` last: an interrupted set-up is repeated.
$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 found. Give one: make PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

lock:
	$(UV) pip compile --universal --python-version 3.11 --all-extras --quiet \
		--no-emit-package tf-runner --custom-compile-command "uv pip compile --universal --python-version 3.11 --all-extras pyproject.toml -o requirements.lock" \
		pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV) $(GOLDEN) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
