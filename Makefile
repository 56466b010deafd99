# setup: .venv from the pins    demo: tune a real checkpoint    wheel: dist/    clean: all of these undone
# quick: the tests in one process, for the hand    test: lint and the suite, what CI runs    test-long: the full crossings
# test-anywhere: the suite as other processors round    test-system: what needs a browser (chromium) or others' programs
# test-gpu: kernels, compiled, on a GPU    docs: the site, site/index.html
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := pyproject.toml setup.py constraints.txt requirements/demo.txt requirements/oldest.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUN := HF_HUB_OFFLINE=1 $(BIN)/petune
DEMO := runs/bert_lora

.PHONY: setup demo docs quick test suite test-anywhere test-gpu test-long test-system lint style types format wheel clean

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
	@printf 'the whole run as one page, with these scores: '; $(RUN) report $(DEMO)

SITE := $(VENV)/.installed-docs
$(SITE): requirements/docs.txt $(STAMP)
	$(PIP) --constraint constraints.txt --requirement requirements/docs.txt
	@touch $@

docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

# Halves of the list that are stolen from, so that what a file's tests share is made once. Tests are compiled once, too.
# glibc asks for huge pages: a rank is a fork, and to copy the tables of a gigabyte of small pages takes 0.1 s of each.
SUITE := PYTHONDONTWRITEBYTECODE= GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m pytest --dist worksteal

# No process is started, no kernel interpreted, no whole run trained: a minute and a half on 2 cores.
quick: setup
	OMP_NUM_THREADS=1 $(SUITE) -n 2 -q -m "not long and not slow and not forks and not interpret and not system"

# Types are checked on one processor, so beside the tests.
test: style
	$(MAKE) --jobs 2 types suite

# One worker more than cores, as tests of ranks and of kills wait for others. GPUs are hidden: a process that has used one
# cannot fork ranks.
suite: setup
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(SUITE) -n 3 -m "not long and not system"

# What runs on a GPU where there is one: kernels as they are compiled, graphs, streams, and ranks of two GPUs.
test-gpu: setup
	OMP_NUM_THREADS=1 $(SUITE) -n 4 -m "not long and not system and not forks" tests/kernels tests/rng
	OMP_NUM_THREADS=1 $(SUITE) -n 0 -m "gpu and forks" tests/parallel

# Settings under which torch and MKL round as they do on other processors. avx512 is asked for only where there is one.
ROUNDINGS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE
ROUNDINGS += $(shell grep -qsw avx512f /proc/cpuinfo && echo ATEN_CPU_CAPABILITY=avx512)

test-anywhere: setup
	@failed=; for rounding in $(ROUNDINGS); do for threads in 1 2; do \
	  setting="$$rounding OMP_NUM_THREADS=$$threads"; echo "== $$setting"; \
	  env $$setting $(SUITE) -n $$((2 / threads)) -m "not long and not system" || failed="$$failed\n  $$setting"; \
	done; done; \
	test -z "$$failed" || { printf "the suite failed under:$$failed\n"; exit 1; }

test-long: setup
	OMP_NUM_THREADS=1 $(SUITE) -n 2 -m long
	OMP_NUM_THREADS=1 $(SUITE) -n 2 -m "not long and not system" --hypothesis-profile=fresh $$(grep -rlw hypothesis tests --include="test_*.py")

test-system: setup
	$(PIP) --constraint constraints.txt --requirement requirements/programs.txt
	OMP_NUM_THREADS=1 $(SUITE) -n 1 -m system

lint: style types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: setup
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
