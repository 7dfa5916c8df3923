# llmrl. Needs Python 3.11, git and make. `make` says what there is.
# VENV=/path puts the virtual environment elsewhere, PYTHON=/path chooses the Python, ARGS='…' goes to the command.
VENV ?= .venv
ARGS ?=
BIN := $(abspath $(VENV))/bin
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench docs clean

help: ## this list
	@echo "make TARGET, where TARGET is:"
	@sed -n 's/^\([a-z]*\):.* ## \(.*\)/  \1\t\2/p' Makefile | expand -t 10

setup: ## the virtual environment and the embedded model: 2 to 5 minutes, then nothing
	@sh tools/setup.sh "$(VENV)"

demo: setup ## post-train SmolLM2-135M-Instruct with GRPO, generating with vLLM: about 5 minutes on two cores
	@"$(BIN)/python" sota-implementations/grpo/grpo-sync.py $(ARGS)

test: lint ## lint, types, then every test and example: about 10 minutes on two cores
	@"$(BIN)/python" -m pytest $(ARGS)

lint: setup ## ruff and mypy: half a minute
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/mypy"

bench: setup ## benchmarks, each a ratio to a peer in the same run; one: make bench ARGS=import_time
	@"$(BIN)/python" -m benchmarks $(or $(ARGS),all)

docs: setup ## the documentation as a site in build/site: a quarter of a minute
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict --quiet && echo "open build/site/index.html"

clean: ## remove the virtual environment, caches and runs' leftovers of the tools; the converted model stays
	@rm -rf "$(VENV)" build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	@echo "Removed $(VENV) and caches. The converted model is in \$$LLMRL_HOME or ~/.cache/llmrl; runs/ was left alone."
