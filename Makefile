# The front door. `make demo` and `make test` set up what they need on a fresh machine with Python 3.11 or newer.

PYTHON ?= python3
BIN := .venv/bin

# Hundreds of processes import the package: without compiled files each of them would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check faults soak docs clean

demo: .venv/ready
	$(BIN)/cordee demo

# Many tests wait for processes, so that six workers keep two cores busy: make test WORKERS=12
test: .venv/ready check
	$(BIN)/python -m pytest -n $(or $(WORKERS),6) --dist loadfile --no-loadscope-reorder

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Worlds that fail, from a seed: make faults SEED=7; make faults SEEDS=1000; SQL=1 plays on SQLite, STEPS=100 stops there.
faults: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m faults_world --seed $(or $(SEED),0) --seeds $(or $(SEEDS),1) $(if $(STEPS),--steps $(STEPS)) $(if $(SQL),--sql)

# Each test takes CORDEE_SOAK_S seconds (600). One of them, for an hour:
# make soak CORDEE_SOAK_S=3600 SOAK=tests/soak/test_soak_survive.py
soak: .venv/ready
	$(BIN)/python -m pytest -s -m soak --timeout 7200 $(SOAK)

docs: .venv/ready
	$(BIN)/pip install -q -e ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site demo .mypy_cache .ruff_cache .hypothesis

.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Cordee needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@
