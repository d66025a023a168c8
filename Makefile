# Every target says what it does; `make` alone lists them. PYTHON may be any Python 3.10 or newer.
PYTHON ?= python3
SUITE  ?=
BENCH  ?=
# A person wants the first failure, a CI run all of them.
TEST    = $(PYTHON) .ci/test.py $(if $(CI),--keep-going)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types bench build clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "  make %-8s %s\n", $$1, $$2}'

demo: ## install with [mlx] into a venv of its own and stream an answer from the demo model
	@$(PYTHON) .ci/demo.py

test: ## set up what the suites need and run them all; SUITE="core mlx" chooses
	@$(TEST) $(if $(SUITE),--suite $(SUITE))

lint: ## ruff, mypy and the import contracts
	@$(TEST) --suite lint

format: ## let ruff format and fix what it safely can
	@$(PYTHON) .ci/tool.py lint ruff format .
	@$(PYTHON) .ci/tool.py lint ruff check --fix .

types: ## mypy --strict alone
	@$(PYTHON) .ci/tool.py lint mypy

bench: ## every number of the README, the published package beside ours; BENCH="messages" chooses
	@$(PYTHON) .ci/bench.py $(BENCH)

build: ## sdist and wheel into dist/
	@$(PYTHON) .ci/tool.py core python -m build --no-isolation --outdir dist .

clean: ## remove what building and testing left in the checkout (venvs live in the user's cache)
	rm -rf dist build .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks .ci -name __pycache__ -type d -prune -exec rm -rf {} +
