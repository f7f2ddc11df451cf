# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
PACKAGE := $(VENV)/.package
INSTALLED := $(VENV)/.installed
# Modules are compiled as they are imported, which a fifth of them are; all of them take 50 s.
PIP = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c .ci/constraints.txt

CRASH_TESTS := $(addprefix tests/,\
	convert/test_crash.py convert/test_crash_calibrated.py convert/test_crash_states.py \
	convert/test_failing_disk.py convert/test_ranks.py convert/test_push.py convert/test_push_ranks.py \
	convert/test_drop_ranks.py \
	checkpoint/test_http_ranges.py checkpoint/test_hub_streaming.py)

# Where it is set, every process that tests start compiles all of our modules again, for 0.3 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test suite crash fuzz clients lint clean

demo: $(PACKAGE)
	$(BIN)/qconvert demo

# mypy takes one core for a third of a minute when its cache is empty, so it runs beside the suite.
test: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs 2 lint suite

suite: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

# Kills conversions at every call that changes a file; the tests try some of them.
crash: $(INSTALLED)
	QCONVERT_CRASH=all $(BIN)/python -m pytest -n 2 $(CRASH_TESTS)

# Reads a million changed files; the tests read some thousand.
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz.hunt 1000000

# Installs vLLM, transformers, GPTQModel, mlx-lm and llama.cpp beside, and has them read every layout.
clients: $(PACKAGE)
	$(BIN)/python -m evals.clients install
	$(BIN)/python -m evals.clients run

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(CREATED):
	$(PYTHON) -c 'import sys; sys.exit("qconvert needs Python 3.10 or newer; run make PYTHON=python3.11") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'setuptools>=77' wheel
	touch $@

# The package and what it needs: enough for the demo.
$(PACKAGE): $(CREATED) pyproject.toml .ci/constraints.txt
	$(PIP) -e .
	touch $@

# The same with what the tests need beside it.
$(INSTALLED): $(CREATED) pyproject.toml .ci/constraints.txt
	$(PIP) -e '.[dev]'
	touch $(PACKAGE) $@

clean:
	rm -rf $(VENV) .clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
