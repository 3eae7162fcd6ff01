# Paths are relative throughout, so a checkout may live below a folder with a space in its name.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# mlx's CPU and CUDA wheels own the same file, so Linux needs one named; macOS brings Metal itself.
ifeq ($(shell uname -s),Linux)
CUDA_MAJOR := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')
# A newer driver runs what was built for an older CUDA.
EXTRA ?= $(if $(filter 12,$(CUDA_MAJOR)),cuda12,$(if $(filter 13 14 15,$(CUDA_MAJOR)),cuda13,cpu))
endif
COMMA := ,
EXTRAS := $(if $(EXTRA),$(EXTRA)$(COMMA)dev,dev)

.PHONY: help demo test check format pair docs bench clean

help:  ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

demo: $(INSTALLED) pair  ## Set up, fetch the default pair, and generate with it
	$(BIN)/python -m mlxgen generate -p "Write two sentences about the sea." \
	  --temp 0.7 --seed 2 -n 64 --accept-rule stochastic --accept-diag

test: $(INSTALLED) pair  ## Run every test
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(INSTALLED)  ## Lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## Format the code and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pair: $(INSTALLED)  ## Fetch the default pair's target, once
	$(BIN)/python scripts/fetch_default_pair.py

docs: $(INSTALLED)  ## Regenerate docs/cli.md and docs/model-families.md from the program
	$(BIN)/python scripts/write_cli_docs.py
	$(BIN)/python scripts/write_family_docs.py

bench: $(INSTALLED) pair  ## Measure rounds against their floor, and commands against mlx-lm
	$(BIN)/python scripts/benchmark_rounds.py
	$(BIN)/python scripts/benchmark_commands.py

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	touch $(INSTALLED)

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
