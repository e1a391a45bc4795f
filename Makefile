# Short on purpose: each target sets up what it needs by itself.
# TORCH names the torch to install: where the default index only has the CUDA build, pass a CPU build of your own choice
# (a wheel file or an index option works too):  make setup TORCH=/path/to/torch-cpu.whl
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=
# Processes that share out the test files, in the order of their names, whose last are short: each torch test computes on few threads and
# often waits, so two keep two cores busy.
JOBS   ?= 2
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.headrace-setup
PYTEST  = $(BIN)/python -m pytest -q
COMMON  = not slow and not gpu and not timing
SHARED  = -m "$(COMMON)" -n $(JOBS) --dist loadfile --no-loadscope-reorder
FAST    = $(SHARED) --kinds pure,loop,socket
# Apart from the others, so that few processes start a deployment that several files share.
PROCESS = $(SHARED) --kinds process
# `make check` runs the tests of the house.
SUITE   = tests --ignore=tests/tools --ignore=tests/house

# Every process of the tests, those that tests start included, reads the bytecode that the first one wrote, and compiles nothing again.
unexport PYTHONDONTWRITEBYTECODE

# The control side, which knows no tensors: less than a minute on a quiet machine.
CONTROL = $(addprefix tests/,core machine text wire observe policy engine/loop engine/server)

.PHONY: setup serve two-pools test test-control test-timing test-tools near coverage test-slow test-gpu gpu gpu-wheels test-mutants test-clients browser servers systemd check bench bench-smoke proto derived clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

serve: $(STAMP)
	$(BIN)/headrace serve $(ARGS)

# Two pools, two gateways, Redis and HAProxy on this machine: examples/two_pools. HAProxy, where it is missing, needs root.
two-pools: $(STAMP)
	tools/install_debian.sh haproxy
	$(BIN)/python examples/two_pools/start.py $(ARGS)

test: test-control
	$(PYTEST) $(FAST) $(SUITE) $(addprefix --ignore=,$(CONTROL)) $(ARGS)
	$(PYTEST) $(PROCESS) $(SUITE) $(ARGS)

test-control: $(STAMP)
	$(PYTEST) $(FAST) --no-torch $(if $(COVERAGE),$(MEASURED)) $(CONTROL) $(ARGS)

# `make test COVERAGE=1`: with the lines of core, machine, wire and policy that the control side's tests reach; fails below 95 %.
MEASURED = --cov=headrace.core --cov=headrace.machine --cov=headrace.wire --cov=headrace.policy --cov-report=term:skip-covered --cov-fail-under=95

coverage:
	$(MAKE) test-control COVERAGE=1

# What needs the wall clock or the memory of its process: alone, with its figures; fails beyond three times a bound.
test-timing: $(STAMP)
	$(PYTEST) -m "timing and not slow" -n 0 tests --ignore=tests/tools $(ARGS)

# What tests the tests, the benchmarks and the tools.
test-tools: $(STAMP)
	$(PYTEST) $(FAST) tests/tools $(ARGS)
	$(PYTEST) $(PROCESS) -n 0 tests/tools $(ARGS)

# The tests that mirror what the working tree changes, within two minutes. ARGS: a commit to compare with.
near: $(STAMP)
	$(BIN)/python tools/near.py $(ARGS)

# chDB is ClickHouse as a package, of half a gigabyte: for the slow test of the ledger's statements alone.
test-slow: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt chdb
	$(PYTEST) -m "slow" --hypothesis-profile=free $(ARGS)

# On a machine with a GPU, whose Python has torch with CUDA and Triton: what is marked gpu; and with it the table of docs/gpu.md, within four
# minutes, as text and JSON in build/gpu. Both use PYTHON and no environment of their own.
test-gpu:
	PYTHON=$(PYTHON) tools/gpu.sh --seconds 0

gpu:
	PYTHON=$(PYTHON) tools/gpu.sh $(ARGS)

# Beforehand, where there is a package index, for a GPU machine that has none: what `make gpu` needs beside torch and Triton.
GPU_PYTHON ?= 3.12
gpu-wheels:
	$(PYTHON) -m pip download --quiet --dest build/gpu-wheels -c constraints.txt --only-binary=:all: --python-version $(GPU_PYTHON) \
	  $(addprefix --platform manylinux_2_,12_x86_64 17_x86_64 28_x86_64 31_x86_64) llguidance msgspec safetensors psutil pytest pytest-asyncio pytest-timeout pytest-xdist execnet hypothesis

# Chromium from Debian, for the slow test of pages of other origins; needs root.
browser:
	tools/install_debian.sh chromium

# Servers from Debian that tests start: ClickHouse, Docker's registry, HAProxy, nginx, Prometheus with promtool; needs root.
servers:
	tools/install_debian.sh clickhouse-server docker-registry haproxy nginx prometheus

# systemd from Debian, for the tests of the shipped unit; nothing is started; needs root.
systemd:
	tools/install_debian.sh systemd-analyze:systemd

test-mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py $(ARGS)

test-clients: $(STAMP)
	$(BIN)/python tests/clients/run.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) --strict-skips tests/house
	$(BIN)/python tools/growth.py

bench: $(STAMP)
	$(BIN)/python -m bench.run $(ARGS)

bench-smoke: $(STAMP)
	$(BIN)/python -m bench.smoke.run $(ARGS)

proto: $(STAMP)
	$(BIN)/python tools/make_proto.py

# What pages have from the source: fields and paths, folders, the planner's tables, arithmetic by CPU. Tests fail where a page has another.
derived: $(STAMP)
	$(BIN)/python -m tests.support.api_tables
	$(BIN)/python tools/folder_tables.py
	$(BIN)/python -m tools.option_tables
	$(BIN)/python -m tests.house.options > tests/house/options.txt
	$(BIN)/python -m tools.plan_tables
	$(BIN)/python -m bench.precision_paths

clean:
	rm -rf .venv .venv-ci build dist .mypy_cache .ruff_cache .pytest_cache
