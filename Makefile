# Works from a fresh clone with Python 3.11+ and a package index only; nothing outside .venv is installed.
PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
DEMO_OPTIONS = --contexts 6 --granularity 3
DEMO_OUT = outputs/demo

.PHONY: setup check test demo clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# The quick gate: format, lint, types, fast tests.
check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not slow"

# Everything.
test: check
	$(BIN)/python -m pytest -q -m slow

# A small sweep of the demo pair and its frontier.
demo: $(STAMP)
	$(BIN)/kvprofile sweep recipes/demo.yaml $(DEMO_OPTIONS) --out $(DEMO_OUT)
	$(BIN)/kvprofile pareto $(DEMO_OUT)

# Keeps outputs/: measurements are dear.
clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
