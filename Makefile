# llmrl. Needs Python 3.11 or 3.12, git and make. `make` says what there is.
# VENV=/path puts the virtual environment elsewhere, PYTHON=/path chooses the Python, ARGS='…' goes to the command.
# WORKERS=n says how many processes the tests run in: one more than the cores, since some wait, with 24 GB of memory.
VENV ?= .venv
ARGS ?=
WORKERS ?= 3
BIN := $(abspath $(VENV))/bin
export PYTHON
# Where the environment asks for no bytecode, each process of hundreds would compile again what it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test tests test-fast lint fix lock bench recipes docs dist clean

help: ## this list
	@echo "make TARGET, where TARGET is:"
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/  \1\t\2/p' Makefile | expand -t 13

setup: ## the virtual environment and the embedded model: 2 to 4 minutes, then nothing
	@sh tools/setup.sh "$(VENV)"

demo: setup ## post-train SmolLM2-135M-Instruct with GRPO, generating with vLLM: about 5 minutes on two cores
	@"$(BIN)/python" sota-implementations/grpo/grpo-sync.py $(ARGS)

# Tests that share an engine or a cluster run in one process, and what takes longest comes first (test/conftest.py).
PYTEST := "$(BIN)/python" -m pytest --numprocesses=$(WORKERS) --dist=loadscope --no-loadscope-reorder

test: lint tests ## lint, types, then every test and example: 13 to 18 minutes on two cores

tests: setup
	@$(PYTEST) $(ARGS)

test-fast: setup ## the tests that start neither vLLM nor Ray nor other programs and are quick: 75 s on two cores
	@$(PYTEST) -m "not engine and not ray and not slow" $(ARGS)

lint: setup ## ruff, spelling and mypy: half a minute
	@"$(BIN)/ruff" check .
	@"$(BIN)/codespell" llmrl docs sota-implementations examples benchmarks tools *.md
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/mypy"

fix: setup ## ruff repairs what it can, and formats
	@"$(BIN)/ruff" check --fix .
	@"$(BIN)/ruff" format .

lock: setup ## write what is installed to constraints.txt, which the set-up then installs again
	@"$(BIN)/python" -m pip freeze --exclude-editable | sed 's/+.*//' > constraints.txt

bench: setup ## benchmarks, each a ratio to a peer in the same run; one: make bench ARGS=import_time
	@"$(BIN)/python" -m benchmarks $(or $(ARGS),all)

recipes: setup ## the demo's recipe again, inside its band, and planted defects outside: a quarter of an hour on two cores
	@"$(BIN)/llmrl" recipe verify one-digit-sums
	@for script in test/recipes/defects/*.py; do echo "$$script must be outside:"; \
	"$(BIN)/llmrl" recipe verify one-digit-sums train.num_steps=6 --script $$script; [ $$? -eq 1 ] || exit 1; done

docs: setup ## the documentation as a site in build/site: a quarter of a minute
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict --quiet && echo "open build/site/index.html"

# Built from a copy, since setuptools leaves folders beside what it builds.
dist: ## wheel and sdist in dist/, checked by twine; needs the packages build and twine
	@rm -rf dist build/source && mkdir -p build && git clone -q . build/source
	@cd build/source && $(or $(PYTHON),python) -m build -q --outdir "$(abspath dist)" .
	@$(or $(PYTHON),python) -m twine check --strict dist/* && rm -rf build/source

clean: ## remove the virtual environment, caches and runs' leftovers of the tools; the converted model stays
	@rm -rf "$(VENV)" build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	@echo "Removed $(VENV) and caches. The converted model is in \$$LLMRL_HOME or ~/.cache/llmrl; runs/ was left alone."
