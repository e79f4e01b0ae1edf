# Everything here sets itself up on a bare machine: only Python and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile
# Which transformers to install: pinned (as in constraints.txt), lowest or newest that pyproject.toml allows.
TRANSFORMERS ?= pinned

# What docs/benchmarks.md can measure without a GPU and with the boxed pair alone.
BENCHMARKS := build/benchmarks
HELD_OUT := tests/data/held_out.jsonl

# A real chat model, which is downloaded on first use, and its drafter.
SMOLLM2 := build/smollm2
DRAFTER ?= examples/smollm2/drafter

.PHONY: benchmarks chat demo real test test-values test-variants test-slow test-all zoo mutants hostile lint check docs format clean

demo: $(READY)
	$(BIN)/redrafter generate --compare --max-new-tokens 120 --temperature 0.7 --seed 1 \
		"The old man looked at the sea and"

chat: $(READY) $(SMOLLM2)/config.json
	$(BIN)/redrafter chat --model $(SMOLLM2) --drafter $(DRAFTER) --quantization int4 --max-new-tokens 256 --compare

# Minutes to an hour on a CPU: 40 answers of that model by each engine, compared with model.generate.
real: $(READY) $(SMOLLM2)/config.json
	$(BIN)/python examples/smollm2/real.py --model $(SMOLLM2) --drafter $(DRAFTER)

$(SMOLLM2)/config.json: | $(READY)
	$(BIN)/python examples/smollm2/make.py $(SMOLLM2)

# One case of each test that is not slow; with other cases, until each value of a cheap test's parameters was there; other
# cases, until any two values of each test have met; then the rest and what takes long; then all, with coverage.
test: $(READY)
	$(PYTEST) -m "not slow and not variant"

test-values: $(READY)
	$(PYTEST) -m "not pair and not slow"

test-variants: $(READY)
	$(PYTEST) -m "variant and not slow"

test-slow: $(READY)
	$(PYTEST) -m slow

test-all: $(READY)
	$(PYTEST) --cov

benchmarks: $(READY)
	mkdir -p $(BENCHMARKS)
	$(BIN)/redrafter bench --device cpu --prompts $(HELD_OUT) --batch-sizes 1,2,4 \
		--against eager,static,assisted --json $(BENCHMARKS)/bench.jsonl --plot $(BENCHMARKS)/bench.png
	$(BIN)/python benchmarks/standing_batch.py --device cpu --prompts $(HELD_OUT) --batch-sizes 1,2,4 --context 100,900
	$(BIN)/redrafter compare --device cpu --prompts $(HELD_OUT) --num-prompts 32 --repeats 3 \
		--json $(BENCHMARKS)/compare.jsonl
	$(BIN)/redrafter evaluate --device cpu --prompts $(HELD_OUT) --json $(BENCHMARKS)/evaluate.jsonl
	$(BIN)/python examples/tiny_pair/speed.py --prompts $(HELD_OUT) --count 10 --new 96 --threads 2 --repeats 2 \
		--budgets 8 12 16 26 | tee $(BENCHMARKS)/speed.txt

zoo: $(READY)
	PYTHONPATH=tests $(BIN)/python -m zoo

# Faults planted one at a time in the code that decides tokens; MUTANTS has options, such as "--count 50".
mutants: $(READY)
	PYTHONPATH=tests $(BIN)/python -m mutants $(MUTANTS)

hostile: $(READY)
	PYTHONPATH=tests $(BIN)/python tests/serve/fuzz_server.py --requests 8000
	PYTHONPATH=tests $(BIN)/python tests/serve/fuzz_fairness.py $(if $(GOALS),--goals)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .

check: lint test

docs: $(READY)
	$(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch goes first, alone: with its version already there, nothing later pulls in another build of it. Of the thousands of
# files few are imported, and those are compiled then.
# setuptools warns of every editable installation.
$(READY): pyproject.toml constraints.txt
	@echo "making $(VENV), once: pip installs torch and what else is needed, some minutes without a line"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile $$(grep '^torch==' constraints.txt)
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@case $(TRANSFORMERS) in \
		lowest) $(BIN)/python -m pip install --quiet "transformers==$$(sed -n 's/.*"transformers>=\([0-9.]*\).*/\1.*/p' pyproject.toml)";; \
		newest) $(BIN)/python -m pip install --quiet --upgrade "transformers<6";; \
	esac
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
