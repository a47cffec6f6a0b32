PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PREDICTED := cuda cuda-reorder small-cpu paper-cpu

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
	$(BIN)/torch-echo bench --predict $(PREDICTED:%=--from docs/results-predicted/%.json) --measured docs/results/bench.json \
		--measured docs/results-paper/bench.json --page docs/results-predicted.md

clean:
	rm -rf $(VENV) build dist
