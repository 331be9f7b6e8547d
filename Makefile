# Two commands: `make run` trains the default job, `make test` runs the tests. Both set up `.venv` first, once. `make help` has
# the others that most people need, CONTRIBUTING.md all.

# Importing TensorFlow without cached bytecode takes 10 s instead of 4.
unexport PYTHONDONTWRITEBYTECODE
# An outer virtual environment or PYTHONPATH must not leak into ours.
unexport PYTHONPATH VIRTUAL_ENV

# The path of the first of the commands $(1) that is Python 3.$(2) or newer, and older than 3.$(3). PATH
# comes first. uv, where it is there, also knows those that it has installed; pyenv's are found where they are not active.
first_python = $(shell for name in $(1); do \
	for path in $$name $$($(UV) python find --system --no-project $$name 2>/dev/null) ~/.pyenv/versions/*/bin/$$name; do \
	"$$path" -c 'import sys; sys.version_info[0] == 3 and $(2) <= sys.version_info[1] < $(3) or sys.exit(1); print(sys.executable)' \
	2>/dev/null && exit; done; done)
found = $(call first_python,$(1),11,14)
version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# The default Python has its environment in .venv; `make check PYTHON=python3.12` has one in .venv-3.12, unless 3.12 is the default.
SUPPORTED := Python 3.11, 3.12 or 3.13
DEFAULT_PYTHON = $(call found,python3 python3.12 python3.11 python3.13)
ifeq ($(PYTHON),)
BASE_PYTHON = $(or $(DEFAULT_PYTHON),$(error No $(SUPPORTED) found. Give one: make PYTHON=/path/to/python))
VENV ?= .venv
else
BASE_PYTHON := $(or $(call found,$(PYTHON)),$(error No $(PYTHON) found that is $(SUPPORTED)))
VENV ?= .venv$(if $(filter $(call version_of,$(BASE_PYTHON)),$(call version_of,$(DEFAULT_PYTHON))),,-$(call version_of,$(BASE_PYTHON)))
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
UV ?= uv
# <environment> <list> <what to expect>. It takes uv where that is there, else pip, and says how far it is.
INSTALL = $(BASE_PYTHON) .ci/install.py

.DEFAULT_GOAL := help
.PHONY: help run check test docs bench release
.PHONY: setup fast lint format python check-pythons test-slow test-all test-gpu test-world golden browser clients team stores beside
.PHONY: messages schema docs-serve canary lowest lock clean

help:
	@echo 'make run      trains the default job in half a minute; the first time 3 minutes more for .venv (with uv 1)'
	@echo 'make check    before a commit: lint, and the quick tests; 3 minutes on 2 cores'
	@echo 'make test     before you hand in a change: all tests but the slow ones; 12 minutes on 2 cores'
	@echo 'make docs     builds the documentation in build/site; 10 seconds'
	@echo 'make bench    compares the speed with other ways, or with COMPARE=<revision>; hours, with ONLY=tiny_step minutes'
	@echo 'make release  builds the source distribution and the wheel and tries them; some minutes for each Python'
	@echo 'ARGS goes to the runner (make run ARGS="strategy=mirrored") or to pytest (make test ARGS="-k resume"),'
	@echo 'PYTHON=python3.12 takes another Python. CONTRIBUTING.md has the other targets.'

run: $(STAMP)
	$(BIN)/python -m runner $(ARGS)

# The tiers; tests/conftest.py says which test has which marker. ARGS may choose tests that are all of another tier, and
# none is left (pytest's exit code 5).
tier = $(BIN)/python -m pytest -m "$(1)" $(2) $(ARGS) $(if $(strip $(ARGS)),|| [ $$? = 5 ])
# Two more than two cores: a fifth of the time a test waits for processes, or for a server.
WORKERS ?= 4
# In the order of tests/conftest.py, not by the number of tests of a file.
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The few files with tests that run alone: collecting all others again takes 10 s. ARGS may name files itself.
ALONE = --durations=20 $(if $(strip $(ARGS)),,$(shell grep -rl --include='*.py' 'mark\.alone' tests))

# Those that are alone and not slow wait for processes that sleep: they may do so side by side.
QUICK_ALONE = $(call tier,alone and not (slow or gpu or world),-n $(WORKERS) $(ALONE))
SLOW_ALONE = $(call tier,alone and slow and not (gpu or world),$(ALONE))

test: $(STAMP)
	$(call tier,not (alone or slow or gpu or world),$(SIDE_BY_SIDE) --durations=20)
	$(QUICK_ALONE)

test-slow: $(STAMP)
	$(call tier,slow and not (alone or gpu or world),$(SIDE_BY_SIDE) --durations=20)
	$(SLOW_ALONE)

# Both in one session: each worker imports, and trains for several tests, once.
test-all: $(STAMP)
	$(call tier,not (alone or gpu or world),$(SIDE_BY_SIDE) --durations=40)
	$(QUICK_ALONE)
	$(SLOW_ALONE)

# Its file alone: others use TensorFlow when they are collected, and a card is split before that. RUNNER_GPU_TESTS_ON=CPU
# is a rehearsal.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu tests/integration/test_gpu.py $(ARGS)

# What needs an environment or a server of its own: not for CI. Debian's Slurm and PostgreSQL are installed where that is
# allowed. The libraries of test_clients.py, of the server of test_mlflow_team.py and of test_other_stores.py are in folders
# of their own: .venv and .venv-2.15 see them by PYTHONPATH.
CLIENTS := build/clients
TEAM := build/team
STORES := build/stores
AZURITE := build/azurite
test-world: $(STAMP)
	$(MAKE) --no-print-directory clients || true
	$(MAKE) --no-print-directory team || true
	$(MAKE) --no-print-directory stores || true
	$(MAKE) --no-print-directory beside || true
	command -v slurmctld >/dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; } || true
	ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >/dev/null; } || true
	$(call tier,world)

clients: $(CLIENTS)/.installed
team: $(TEAM)/.installed
stores: $(STORES)/.installed $(AZURITE)/.installed

# Azurite 3.36 needs Node 22.
$(AZURITE)/.installed:
	npm install --silent --no-fund --no-audit --prefix $(@D) azurite@3.35.0
	@touch $@

$(CLIENTS)/.installed $(TEAM)/.installed $(STORES)/.installed: build/%/.installed: requirements/%.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) -r $<
	@touch $@

# TensorFlow Transform and ONNX, in an environment of their own: they want another protobuf than our lock.
BESIDE := .venv-beside
beside: $(BESIDE)/.installed

$(BESIDE)/.installed: requirements/beside.lock
	@$(INSTALL) $(BESIDE) $< "1 GB to download, 3 minutes"
	@touch $@

# What a change passes before it is committed. `make check PYTHON=python3.13` does the same with another Python.
check: python lint fast

FAST := not (long or processes or slow or gpu or world)
fast: python $(STAMP)
	$(call tier,$(FAST),$(SIDE_BY_SIDE))

# The fast tests with each Python that the lock supports and that is found here. 3.14 waits until the lock has TensorFlow
# 2.22: 2.21 has no wheel for it, 2.22.0rc0 has.
PYTHONS := python3.11 python3.12 python3.13
check-pythons:
	@for python in $(PYTHONS); do \
		if ! $(MAKE) --silent python PYTHON=$$python >/dev/null 2>&1; then missing="$$missing $$python"; continue; fi; \
		$(MAKE) --no-print-directory fast PYTHON=$$python || exit 1; done; \
	echo "Not found, and so not checked:$${missing:- none}"

# The first line of a check: which Python it is. Before its environment is set up it is the one that will be used.
python:
	@$(or $(wildcard $(BIN)/python),$(BASE_PYTHON)) -c 'import platform; print("Python", platform.python_version(), "in $(VENV)")'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/reading.py --check
	$(BIN)/codespell
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site of the documentation, in build/site: dead links and anchors are errors. docs-serve shows it at localhost:8000.
DOCS := .venv-docs
SITE = $(BIN)/python docs/make_config_reference.py && $(DOCS)/bin/zensical
docs: $(STAMP) $(DOCS)/.installed
	$(SITE) build --strict --clean

docs-serve: $(STAMP) $(DOCS)/.installed
	$(SITE) serve

$(DOCS)/.installed: requirements/docs.lock
	@$(INSTALL) $(DOCS) $< "30 MB to download, half a minute"
	@touch $@

# `make bench COMPARE=<revision>` compares with another revision: ONLY="tiny_step startup" chooses scripts, ROUNDS=5 is how often each runs.
ONLY ?=
COMPARE ?=
ONLY_BY_NAME := compare gpu object_store table_memory wide_deep
bench: $(STAMP)
ifeq ($(COMPARE),)
	@for script in $(if $(ONLY),$(ONLY:%=benchmarks/%.py),$(filter-out $(ONLY_BY_NAME:%=benchmarks/%.py),$(wildcard benchmarks/[a-z]*.py))); do \
		echo "== $$script"; $(BIN)/python "$$script" $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGS) || exit 1; done
else
	$(BIN)/python benchmarks/compare.py $(COMPARE) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ONLY),--only "$(ONLY)") $(if $(ARGS),-- $(ARGS))
endif

# The newest pre-releases of TensorFlow, Keras, MLflow, Optuna, Hydra and OmegaConf: which of their names have moved with
# each alone, beside our lock, and with all of them; then the fast tests with all.
CANARY := .venv-canary
canary: $(STAMP)
	$(BIN)/python .ci/canary.py alone
	test -x $(CANARY)/bin/python || $(BASE_PYTHON) -m venv $(CANARY)
	$(CANARY)/bin/python .ci/canary.py install
	$(CANARY)/bin/python .ci/canary.py names
	$(CANARY)/bin/python -m pytest -m "$(FAST)" $(SIDE_BY_SIDE) $(ARGS)

# The fast tests with the lowest versions that pyproject.toml allows, of what it names itself, on the oldest Python. Only uv
# chooses so; it stands in that environment.
LOWEST := .venv-lowest
lowest:
	test -x $(LOWEST)/bin/python || $(or $(call first_python,python3.11 python3,11,12),$(error No Python 3.11 found)) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/uv pip install --quiet --compile-bytecode --upgrade --resolution lowest-direct --python $(LOWEST)/bin/python -e ".[test]"
	$(LOWEST)/bin/python -m pytest -m "$(FAST)" $(SIDE_BY_SIDE) $(ARGS)

# dist/: the source distribution and the wheel, checked, and the wheel installed from an empty cache with each Python found.
release: $(STAMP)
	$(BIN)/python .ci/release.py $(foreach one,$(PYTHONS),$(call found,$(one)))

setup: $(STAMP)

# For CI: what tests/integration/test_browser.py opens MLflow's pages with, a package of the system.
browser:
	command -v chromium >/dev/null && command -v chromedriver >/dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; }

# A TensorFlow 2.15 with its tf.estimator beside ours, for tests/integration/test_golden.py; no Python after 3.11 has one.
GOLDEN := .venv-2.15
PYTHON_2_15 ?= $(call first_python,python3 python3.11 python3.10,10,12)
golden: $(GOLDEN)/.installed

$(GOLDEN)/.installed: requirements/tensorflow-2.15.txt
	@test -n "$(PYTHON_2_15)" || { echo "No Python 3.10 or 3.11 found. Give one: make golden PYTHON_2_15=/path/to/python" >&2; exit 1; }
	@$(PYTHON_2_15) .ci/install.py $(GOLDEN) $< "0.6 GB to download, 1 to 2 minutes"
	@touch $@

# The messages that tests meet: tests/config/mistakes.txt and messages.txt of each package. Read their diff.
messages: $(STAMP)
	$(BIN)/python -m tests.config.test_messages
	$(BIN)/python -m pytest --quiet --write-messages $(ARGS)

# conf/schema/, by which editors know the keys: after a change of a key or its comment.
schema: $(STAMP)
	$(BIN)/python docs/make_config_schema.py

# `touch` last: an interrupted set-up is repeated.
$(STAMP): requirements/dev.lock pyproject.toml
	@$(INSTALL) $(VENV) $< "1 GB to download, 3.3 GB on disk, 3 minutes (with uv 1)" --with-this
	@touch $@

# Versions, and hashes of what most people install: pip refuses a file that is not the one that the tests ran with. The
# extra dev brings all others but gpu, whose 3 GB nobody needs who has no GPU. A version stays until it no longer fits, or
# `make lock ARGS="--upgrade-package mlflow"` asks for a newer one.
LOCK := $(UV) pip compile --universal --python-version 3.11 --quiet --no-emit-package estimator-runner --custom-compile-command "make lock"
lock:
	$(LOCK) --generate-hashes --group docs -o requirements/docs.lock $(ARGS)
	$(LOCK) --no-annotate --extra classic --group beside pyproject.toml -o requirements/beside.lock $(ARGS)
	$(LOCK) --generate-hashes --extra dev pyproject.toml -o requirements/dev.lock $(ARGS)
	$(LOCK) --generate-hashes --constraint requirements/dev.lock pyproject.toml -o deploy/requirements.lock $(ARGS)

clean:
	rm -rf .venv .venv-3.* $(GOLDEN) $(BESIDE) $(CANARY) $(LOWEST) $(DOCS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
