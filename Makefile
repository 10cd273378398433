# Everything about this project, on a machine that has Python 3.12 or 3.13, git and make.
#
# The first target that needs it makes .venv and installs the pinned versions of requirements.txt
# into it, by uv (the one on PATH, or one that pip puts into .venv). Later calls do nothing.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# What `make quickstart` runs.
QUICKSTART := $(BIN)/python -m moelib.cli.main quickstart
# What `make bench` runs.
BENCH := $(BIN)/python -m benchmarks step

# The notice is about a later MkDocs; ours is pinned.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all format docs docs-serve bench clean

help:  ## Shows this list.
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## Makes .venv with the pinned versions.

quickstart: $(STAMP)  ## Trains a small Mixture-of-Experts model on text of this machine.
	@$(QUICKSTART)

test: $(STAMP)  ## Runs every check: format, lint, types, import rules, docs, tests.
	@.ci/run

test-all: $(STAMP)  ## The same with the slow tests.
	@.ci/run -m "not gpu and not tpu and not hf"

format: $(STAMP)  ## Formats the code and mends what the linter can.
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

docs: $(STAMP)  ## Builds the documentation into site/.
	@$(BIN)/mkdocs build --strict --quiet --config-file docs/mkdocs.yml

docs-serve: $(STAMP)  ## Serves the documentation, rebuilt at every change.
	@$(BIN)/mkdocs serve --config-file docs/mkdocs.yml

bench: $(STAMP)  ## Measures one training step on this machine.
	@$(BENCH)

clean:  ## Removes what checks and builds left; keeps .venv and runs/.
	@rm -rf build dist site .cache .pytest_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(STAMP): requirements.txt pyproject.toml
	@.ci/install $(VENV)
	@touch $@
