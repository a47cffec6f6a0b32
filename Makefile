PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-long lint bench results clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $(STAMP)

demo: install
	$(BIN)/python examples/nmt/demo.py

test: install lint
	$(BIN)/python -m pytest -n 2

test-long: install lint
	$(BIN)/python -m pytest -n 2 -m "long or not long"

lint: install
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

bench: install
	$(BIN)/torch-echo bench --out docs/results --page docs/results.md

results: install
	$(BIN)/torch-echo bench --from docs/results/bench.json --out docs/results --page docs/results.md
	$(BIN)/torch-echo bench --from docs/results-paper/bench.json --out docs/results-paper --page docs/results-paper.md

clean:
	rm -rf $(VENV) build dist
