# `make demo` and `make test` do everything on a fresh clone; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: help install demo demo-flower test test-deployment test-wheel test-lowest faults coverage check page bench bench-quick format clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

install: $(STAMP)  ## a virtual environment with everything in it

demo: $(STAMP)  ## FedAvg and FedLayerWise side by side on a sample of MNIST, in under two minutes
	$(BIN)/fedstrata compare demo --algorithms fedavg,fedlayerwise --out runs/demo-$$(date +%Y%m%d-%H%M%S)

demo-flower: $(STAMP)  ## the demo's recipe in a Flower simulation and on the local engine: the same weights
	$(BIN)/python examples/flower_and_local.py runs/demo-flower-$$(date +%Y%m%d-%H%M%S)

test: $(STAMP)  ## all tests but those of test-deployment
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-deployment: $(STAMP)  ## tests that start Flower's own processes; FLOWER_EXAMPLES=DIR adds Flower's quickstart
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "deployment and not campaign"

test-wheel: $(STAMP)  ## the wheel in an empty environment outside the clone: the demo and the four ways in
	$(BIN)/python scripts/check_wheel.py

LOWEST := .venv-lowest

test-lowest:  ## tests that need no Flower, with the lowest versions that pyproject.toml allows, but of torch
	$(PYTHON) -m venv --clear $(LOWEST)
	$(PYTHON) scripts/lowest.py data notebook plots > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet -c $(LOWEST)/lowest.txt -c constraints.txt -e '.[data,notebook,plots]'
	$(LOWEST)/bin/python -m pip install --quiet -c $(LOWEST)/lowest.txt coverage hypothesis mypy pytest pytest-xdist
	$(LOWEST)/bin/python -m pytest -n 2 tests/core tests/rules tests/recipes tests/runs tests/tasks tests/plots tests/test_ways_in.py --ignore tests/tasks/test_nodes.py

faults: $(STAMP)  ## campaigns: workers and runs killed at any moment, files of runs damaged in every way
	$(BIN)/python tests/faults.py
	$(BIN)/python tests/damage.py
	$(BIN)/python -m pytest -n 2 --dist worksteal -m campaign

coverage: $(STAMP)  ## how much of the package `make test` runs, in processes of all kinds
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 2 --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

check: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

page: $(STAMP)  ## docs/reproductions.md, the pages behind it and their pictures, from what reproductions/ has stored
	$(BIN)/python -m reproductions figures
	$(BIN)/python -m reproductions page

BENCH_BIN := benchmarks/.venv/bin
BENCH_STAMP := benchmarks/.venv/installed
BENCH ?=

$(BENCH_STAMP): pyproject.toml constraints.txt benchmarks/requirements.txt benchmarks/requirements-no-deps.txt
	test -x $(BENCH_BIN)/python || $(PYTHON) -m venv benchmarks/.venv
	$(BENCH_BIN)/python -m pip install --quiet -c constraints.txt -e '.[data]' -r benchmarks/requirements.txt
	-$(BENCH_BIN)/python -m pip install --quiet --no-deps -r benchmarks/requirements-no-deps.txt
	touch $(BENCH_STAMP)

bench: $(BENCH_STAMP)  ## whole runs, rounds, layers, overheads and growth, for hours (BENCH="--data DIR …")
	$(BENCH_BIN)/python -m benchmarks.run $(BENCH)

bench-quick: $(BENCH_STAMP)  ## whole runs and rounds of three workloads, short, in under ten minutes
	$(BENCH_BIN)/python -m benchmarks.run --quick $(BENCH)

format: $(STAMP)  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and all caches, not the runs
	rm -rf $(VENV) $(LOWEST) build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
