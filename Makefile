# kvoncall: `make run` starts the app with the embedded engine, `make test` runs every test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PORT ?= 8501

.PHONY: run test lint format bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt "torch" "numpy"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

run: $(STAMP) ## the app on http://localhost:8501 with a live engine
	$(BIN)/streamlit run app --server.port $(PORT)

test: $(STAMP) lint ## every test
	$(BIN)/pytest -n 2 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## speed and memory, as ratios measured in one run
	$(BIN)/kvoncall bench all

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
