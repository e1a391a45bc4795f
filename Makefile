# Short on purpose: each target sets up what it needs by itself.
# TORCH names the torch to install: where the default index only has the CUDA build, pass a CPU build of your own choice
# (a wheel file or an index option works too):  make setup TORCH=/path/to/torch-cpu.whl
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=
# Processes that share out the test files: each torch test computes on few threads and often waits, so two keep two cores busy.
JOBS   ?= 2
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.headrace-setup
PYTEST  = $(BIN)/python -m pytest -q
FAST    = -m "not slow and not gpu" -n $(JOBS) --dist loadfile

# Every process of the tests, those that tests start included, reads the bytecode that the first one wrote, and compiles nothing again.
unexport PYTHONDONTWRITEBYTECODE

# The control side, which knows no tensors: less than a minute on a quiet machine.
CONTROL = $(addprefix tests/,core text wire observe policy engine/loop engine/server)

.PHONY: setup serve test test-control coverage test-slow test-mutants test-clients browser balancers systemd redis clickhouse check bench bench-smoke proto clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

serve: $(STAMP)
	$(BIN)/headrace serve $(ARGS)

test: test-control
	$(PYTEST) $(FAST) $(addprefix --ignore=,$(CONTROL)) $(ARGS)

test-control: $(STAMP)
	$(PYTEST) $(FAST) --no-torch $(CONTROL) $(ARGS)

# Without the property tests, which tracing makes twice as slow and which reach few lines that the others do not.
coverage: $(STAMP)
	$(PYTEST) $(FAST) -k "not machine and not same_plans and not stages" --no-torch \
	  --cov=headrace.core --cov=headrace.wire --cov=headrace.policy --cov-report=term:skip-covered $(CONTROL) $(ARGS)

# chDB is ClickHouse as a package, of half a gigabyte: for the slow test of the ledger's statements alone.
test-slow: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt chdb
	$(PYTEST) -m "slow" $(ARGS)

# Chromium from Debian, for the slow test of pages of other origins; needs root.
browser:
	tools/install_chromium.sh

# HAProxy and nginx from Debian, for the slow test of load balancers; needs root.
balancers:
	tools/install_balancers.sh

# systemd from Debian, for the tests of the shipped unit; nothing is started; needs root.
systemd:
	tools/install_systemd.sh

# Redis from Debian, for the tests of the store that several machines share; needs root.
redis:
	tools/install_redis.sh

# ClickHouse from Debian, for the tests of the ledger's sink; needs root.
clickhouse:
	tools/install_clickhouse.sh

test-mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py $(ARGS)

test-clients: $(STAMP)
	$(BIN)/python tests/clients/run.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) tests/house

bench: $(STAMP)
	$(BIN)/python -m bench.run $(ARGS)

bench-smoke: $(STAMP)
	$(BIN)/python -m bench.smoke.run $(ARGS)

proto: $(STAMP)
	$(BIN)/python tools/make_proto.py

clean:
	rm -rf .venv .venv-ci build dist .mypy_cache .ruff_cache .pytest_cache
