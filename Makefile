# All commands of the project, for a machine with Python 3.12 or 3.13, git and make.
#
# The first target that needs it creates .venv and installs the pinned versions of requirements.txt
# with uv (the one on PATH, or one that pip installs into .venv). Later calls install nothing.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

QUICKSTART := $(BIN)/python -m moelib quickstart
BENCH := $(BIN)/python -m benchmarks step

# Silences a notice about a later MkDocs; ours is pinned.
export NO_MKDOCS_2_WARNING := 1

# Large pages on Linux: a step on CPUs allocates its memory anew, a fault for each page.
quickstart bench: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-fast test-all format docs docs-serve bench clean

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## Create .venv with the pinned versions.

quickstart: $(STAMP)  ## Train a small Mixture-of-Experts model on text of this machine.
	@$(QUICKSTART)

test: $(STAMP)  ## Run every check: format, lint, types, import rules, docs, tests.
	@.ci/run

test-fast: $(STAMP)  ## Run the checks that take seconds: no docs, no test that compiles a program.
	@.ci/run --fast

test-all: $(STAMP)  ## Run every check, slow tests included.
	@.ci/run -m "not gpu and not tpu and not hf" -o faulthandler_timeout=3600 --run_seconds=36000

format: $(STAMP)  ## Format the code, apply the linter's fixes, and rewrite what docs quote.
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .
	@$(BIN)/python -m docs.generate

docs: $(STAMP)  ## Build the documentation into site/.
	@$(BIN)/mkdocs build --strict --config-file docs/mkdocs.yml

docs-serve: $(STAMP)  ## Serve the documentation, rebuilt at every change.
	@$(BIN)/mkdocs serve --config-file docs/mkdocs.yml

bench: $(STAMP)  ## Measure one training step on this machine.
	@$(BENCH)

clean:  ## Remove the files of checks and builds; keep .venv and runs/.
	@rm -rf build dist site .cache .pytest_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(STAMP): requirements.txt pyproject.toml
	@.ci/install $(VENV)
	@touch $@
