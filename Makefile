# Apple ships make 3.81: no .ONESHELL, no grouped targets.
PYTHON := $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
# mlx compiles kernels with the C++ compiler on CPU; tests do without.
export MLX_DISABLE_COMPILE ?= 1

# Test processes side by side; a model on the CPU takes one core each.
JOBS ?= 2

.PHONY: setup demo test check soak bench format lock clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock dev-requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvport needs Python 3.11 or newer"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes -r dev-requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --no-index -e .
	@touch $@

demo: setup
	$(BIN)/kvport demo $(ARGS)

test: setup
	$(BIN)/pytest -m "not soak" -n $(JOBS) $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test
	$(BIN)/python tests/packaging/check_wheel.py

soak: setup
	$(BIN)/pytest -m soak --timeout 7200 -n $(JOBS) $(ARGS)

bench: setup
	$(BIN)/python -m tests.bench $(ARGS)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Hashes for every platform, no index address: see CONTRIBUTING.md.
lock:
	uv pip compile --universal --python-version 3.11 --generate-hashes  \
		--no-header --no-annotate pyproject.toml -o requirements.lock
	uv pip compile --universal --python-version 3.11 --generate-hashes  \
		--no-header --no-annotate --group dev -c requirements.lock pyproject.toml -o dev-requirements.lock

clean:
	rm -rf $(VENV) dist build
