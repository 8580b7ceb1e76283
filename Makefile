# `make demo` and `make test` do everything on a fresh clone; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: help install demo test check format clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

install: $(STAMP)  ## a virtual environment with everything in it

demo: $(STAMP)  ## FedAvg and FedLayerWise side by side on a sample of MNIST, in under two minutes
	$(BIN)/fedstrata compare demo --algorithms fedavg,fedlayerwise --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: $(STAMP)  ## all tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and all caches, not the runs
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
