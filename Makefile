# Two commands: `make demo` (record, train, evaluate, report) and `make test` (lint, types, tests).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint install
demo: install
	$(BIN)/python -m tools.demo

test: install lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/installed
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
