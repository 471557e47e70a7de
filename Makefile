# Two commands: `make demo` (record, train, evaluate, report) and `make test` (lint, types, tests).
# `make notebooks` executes the notebooks and writes the files with outputs beside their sources.
# `make docs` builds the site of guides, results and reference into site/, in .venv-docs.
# `make test-slow` runs the tests that `make test` leaves out, which take some three seconds or more;
# `make test-turn` those of them, and of the drills, that CI takes where SINCE, a commit, landed last.
# `make everything` runs all tests, in hours, and writes docs/results/suite.md; it goes on where it was
# stopped. `make everything VENV=.venv-3.12 PYTHON=python3.12 JAX=0.11.2` takes another Python and JAX.
# `make test-optimised` runs a few of parity, packing and sharding on programs as users run them,
# compiled at XLA's own optimisation level; the other tests do not optimise.
# `make coverage` runs the tests of `make test` and lists the lines that none of them reaches, worst
# file first; lines that run in the environments of their own count where these are installed.
# `make mutants` changes one operator or number after the other in what must be exact, and lists the
# changes that no test notices (docs/results/mutants.md); hours.
# `make smoke PYTHON=python3.13` tries another Python in an environment of its own, .venv-smoke-3.13:
# every module is imported, one test file of each package runs, those of what reads JAX's programs
# too, and beside them a shrunk demo.
# `make fuzz` reads thousands of damaged datasets: an error or the right data, never a wrong frame;
# a hundred thousand damaged headers of checkpoints; and sends thousands of malformed messages, and
# a thousand silent connections, to a policy server, whose good clients must not notice.
# `make drill` kills runs at random moments until they have all come through.
# `make test-h100` compiles for an H100 without one (0.6 GB of NVIDIA's compiler, no driver, no GPU);
# `make test EXTRAS=dev,plan` installs that compiler from the start, and its tests are not skipped.
# `make gpu PYTHON=python3` measures what matters most on an NVIDIA GPU with that Python's packages,
# in ten minutes (docs/gpu.md).
# `make gpu-wheels` downloads what a GPU machine without network may lack, for its Python 3.12: 2 MB
# to .wheels, and 38 MB of the simulator to .wheels-sim.
# `make te` builds Transformer Engine, whose attention can be one of ours, with a C++ compiler into
# .venv-te, 8 GB with the packages of CUDA 13 (docs/results/attention.md).
# `make client`, `make metaworld`, `make libero` and `make gym` install openpi's websocket client,
# these benchmarks (0.4 and 2.1 GB) and gymnasium into environments of their own, .venv-NAME; tests
# use them.
PYTHON ?= python3
EXTRAS ?= dev
VENV ?= .venv
BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PINS := constraints/py$(subst .,,$(VERSION)).txt
ifdef JAX
OTHER := $(PINS)
PINS := $(VENV).pins
endif
SMOKE := .venv-smoke-$(VERSION)
OPTIMISED := $(addprefix tests/, \
  models/families/pi/test_openpi_parity.py \
  models/families/pi/test_model.py::test_a_samples_loss_and_gradients_do_not_depend_on_what_it_is_packed_with \
  models/attention/test_ring.py::test_a_split_row_is_attended_to_as_a_whole_one \
  parallel/test_chunked_step.py \
  parallel/test_axes.py::test_three_axes_and_accumulation_give_the_losses_weights_and_averages_of_one_device)
SMOKED := tests/test_imports.py tests/data/lerobot/test_dataset.py tests/models/families/pi/test_model.py \
  tests/models/attention/test_attention.py tests/models/attention/test_mosaic.py \
  tests/parallel/test_step.py tests/rl/test_objectives.py tests/sim/rendering/test_raycast.py \
  tests/tools/test_data.py tests/tools/test_export.py tests/parallel/planning/test_explain.py

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo notebooks docs test test-slow test-turn everything coverage mutants test-optimised smoke smoke-demo smoke-tests fuzz drill test-h100 gpu gpu-wheels lint install te client metaworld libero gym
demo: install
	$(BIN)/python -m tools.demo

notebooks: install
	$(BIN)/python -m tests.helpers.notebooks

docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@echo The site is site/index.html.

test: install lint
	$(PYTEST) -m 'not slow and not fuzz and not drill'

test-slow: install
	$(PYTEST) -m 'slow and not fuzz and not drill'

test-turn: install
	$(PYTEST) -m 'slow or drill' --since $(SINCE)

everything: EXTRAS = dev,plan
everything: install
	$(BIN)/python -m tests.helpers.everything

coverage: install
	for bin in $(wildcard .venv .venv-client .venv-metaworld .venv-libero .venv-gym); do \
	  $$bin/bin/pip install --quiet --disable-pip-version-check pytest-cov || exit; done
	$(PYTEST) -m 'not slow and not fuzz and not drill' --cov

mutants: install
	$(BIN)/pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.helpers.mutants

test-optimised: install
	XLA_FLAGS=--xla_backend_optimization_level=3 $(BIN)/python -m pytest -n 2 --dist loadfile $(OPTIMISED)

smoke: $(SMOKE)/installed
	$(MAKE) -j 2 smoke-demo smoke-tests

smoke-demo: $(SMOKE)/installed
	$(SMOKE)/bin/python -m tools.demo --task reach --episodes 64 --train-steps 120 --evaluations 8 \
	  --out runs/smoke-$(VERSION)

smoke-tests: $(SMOKE)/installed
	$(SMOKE)/bin/python -m pytest $(SMOKED)

$(SMOKE)/installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(SMOKE)
	$(SMOKE)/bin/pip install --quiet --disable-pip-version-check -c $(PINS) -e '.[export]' beartype pytest safetensors
	touch $@

fuzz: install
	$(BIN)/python -m pytest -m fuzz

drill: install
	$(BIN)/python -m pytest -m drill

test-h100: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(PINS) -e '.[dev,plan]'
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -k 'h100 or deviceless or budgets'

gpu:
	$(PYTHON) -m tools.bench.gpu

GPU_WHEELS := $(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps \
  --only-binary=:all: --python-version 3.12 --implementation cp \
  $(addprefix --platform manylinux,_2_28_x86_64 _2_27_x86_64 _2_17_x86_64 2014_x86_64) \
  -c constraints/py312.txt
gpu-wheels:
	rm -rf .wheels .wheels-sim
	$(GPU_WHEELS) --dest .wheels google-crc32c httpx2 httpcore2 truststore tyro docstring-parser \
	  typeguard tensorboardX beartype websockets
	$(GPU_WHEELS) --dest .wheels-sim mujoco mujoco-mjx trimesh glfw pyopengl

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/installed
$(VENV)/installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(PINS) -e '.[$(EXTRAS)]'
	touch $@

$(VENV).pins: $(OTHER)
	sed -E 's/^(jax|jaxlib|jax-cuda12-[a-z]+)==.*/\1==$(JAX)/' $< > $@

te: .venv-te/installed
.venv-te/installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv .venv-te
	.venv-te/bin/pip install --quiet --disable-pip-version-check -c $(PINS) -e '.[dev,cuda13]' \
	  pybind11 setuptools nvidia-cudnn-frontend nvidia-curand nvidia-nvtx
	CUDA_VERSION=13.0 NVTE_BUILD_USE_NVIDIA_WHEELS=1 .venv-te/bin/pip install --quiet \
	  --disable-pip-version-check --no-cache-dir --no-build-isolation -c $(PINS) -e '.[te]'
	touch $@

client metaworld libero gym: %: .venv-%/installed
.venv-%/installed: tools/suites/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@
