# Everything a fresh machine needs is Python 3.11 and make; the first target that runs creates .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check soak

demo: .venv/installed
	$(BIN)/gpuqueue demo

test: .venv/installed
	$(BIN)/python -m pytest

soak: .venv/installed
	$(BIN)/python -m pytest -m soak

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@
