PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
FLOWER := .venv/.flower

.PHONY: demo federation-demo test test-slow fuzz docs format wheel clean

demo: $(STAMP)
	$(BIN)/bespoke demo

# A server and three clients on this machine, with TLS and keys.
federation-demo: $(FLOWER)
	$(BIN)/bespoke federation demo

# Two workers with one thread each: torch's own threads would only fight over the cores.
test test-slow fuzz: export OMP_NUM_THREADS = 1
test test-slow fuzz: export MKL_NUM_THREADS = 1
# Compiled files are kept, wherever the variable comes from: rewriting the tests' assertions takes as long as importing.
test test-slow fuzz: export PYTHONDONTWRITEBYTECODE =

test: $(FLOWER)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2

test-slow: $(FLOWER)
	$(BIN)/pytest -n 2 -m slow

# 2,500 hostile cases of each of four kinds: experiment files, command lines, imports, run folders; 10,000 uploads.
fuzz: export BESPOKE_FUZZ = 1
fuzz: $(STAMP)
	$(BIN)/pytest -n 2 tests/fuzz

# The site is build/site/index.html. Tables that the code knows are written anew first.
docs: $(STAMP)
	$(BIN)/python docs/generated.py
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky -c docs . build/site

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(STAMP)
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# torch and the build backend come first, at their pinned versions: building the package then downloads nothing.
# The stamp is written last, so that an interrupted installation is taken up again by the next call.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into .venv: once, a few minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch hatchling
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

# What only a federation of machines needs, and the tests of one.
$(FLOWER): $(STAMP)
	@echo "Adding Flower to .venv: once, under a minute."
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev,flower]"
	@touch $@

# Leaves .venv and runs/ alone.
clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +
