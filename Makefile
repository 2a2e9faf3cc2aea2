# Two commands matter: `make demo` and `make test`. Both set up .venv first when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo demo-seeds compare-trainers test test-full bench lint types schemas setup clean

setup: .venv/.ready
.venv/.ready: pyproject.toml .ci/setup .ci/constraints.txt
	PYTHON=$(PYTHON) .ci/setup

demo: .venv/.ready
	$(BIN)/gymdata demo -o runs/demo --overwrite

# The rise must not hang on one seed.
demo-seeds: .venv/.ready
	for seed in 1 2 3; do $(BIN)/gymdata demo -o runs/demo-seed-$$seed --seed $$seed --overwrite || exit 1; done

# What each trainer learns from one saved set of rollouts; prints the table and writes runs/compare-trainers/summary.json.
compare-trainers: .venv/.ready
	$(BIN)/python -m tests.benchmarks.compare_trainers runs/compare-trainers

test: lint types
	$(BIN)/pytest -m "not full"

# The real demo, kills with the engine in process, and the long matrices.
test-full: lint types
	$(BIN)/pytest

bench: .venv/.ready
	$(BIN)/python -m tests.benchmarks -o tests/benchmarks/RESULTS.md

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready
	$(BIN)/mypy

# After a change of gymdata/rollouts/schema.py, gymdata/rollouts/violations.py or gymdata/finetune/settings.py.
schemas: .venv/.ready
	$(BIN)/python -m gymdata.store.json_schema --write schemas
	$(BIN)/python -m gymdata.finetune.json_schema --write schemas
	$(BIN)/python -m gymdata.validate.codes_page --write gymdata/docs

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
