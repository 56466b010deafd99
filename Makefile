# setup: .venv from the pins    demo: tune a real checkpoint    test: lint and the suite    test-long: the full crossings    wheel: dist/    clean: all of these undone
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := pyproject.toml setup.py constraints.txt requirements/demo.txt requirements/oldest.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUN := HF_HUB_OFFLINE=1 $(BIN)/petune
DEMO := runs/bert_lora

.PHONY: setup demo test test-long lint format wheel clean

setup: $(STAMP)

# torch first and alone: the platform's own build (CPU or CUDA) satisfies the pin, and everything after finds it there.
$(STAMP): $(PINS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch setuptools
	$(PIP) --constraint constraints.txt --no-build-isolation --editable '.[dev,plot]'
	$(PIP) --no-deps --require-hashes --requirement requirements/demo.txt
	$(PIP) --no-deps --upgrade --target $(VENV)/oldest --requirement requirements/oldest.txt
	@touch $@

demo: setup
	$(RUN) train recipes/bert_lora.yaml out=$(DEMO) --overwrite
	$(RUN) eval $(DEMO)
	$(RUN) generate $(DEMO) "Return the sum of the given numbers, or zero when there are none."

# Halves of the list that are stolen from, so that what a file's tests share is made once.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not long"

test-long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: setup
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
