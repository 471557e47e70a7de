# Two commands: `make demo` (record, train, evaluate, report) and `make test` (lint, types, tests).
# `make fuzz` reads thousands of damaged datasets: an error or the right data, never a wrong frame;
# a hundred thousand damaged headers of checkpoints; and sends thousands of malformed messages, and
# a thousand silent connections, to a policy server, whose good clients must not notice.
# `make drill` kills runs at random moments until they have all come through.
# `make test-h100` compiles for an H100 without one (0.6 GB of NVIDIA's compiler, no driver, no GPU);
# `make test EXTRAS=dev,plan` installs that compiler from the start, and its tests are not skipped.
# `make client`, `make metaworld`, `make libero` and `make gym` install openpi's websocket client,
# these benchmarks (0.4 and 2.1 GB) and gymnasium into environments of their own, .venv-NAME; tests
# use them.
PYTHON ?= python3
EXTRAS ?= dev
BIN := .venv/bin

.PHONY: demo test fuzz drill test-h100 lint install client metaworld libero gym
demo: install
	$(BIN)/python -m tools.demo

test: install lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

fuzz: install
	$(BIN)/python -m pytest -m fuzz

drill: install
	$(BIN)/python -m pytest -m drill

test-h100: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plan]'
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -k 'h100 or deviceless or budgets'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/installed
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

client metaworld libero gym: %: .venv-%/installed
.venv-%/installed: tools/suites/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@
