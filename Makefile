# Each target is one command that can be typed by hand; .ci/run is the whole gate.
PYTHON ?= python3

.PHONY: build test test-cuda lint format types wheel bench clean
build: ; TD_NO_EXT=1 $(PYTHON) -m pip install -e '.[dev]'
test: ; $(PYTHON) -m pytest
test-cuda: ; TD_REQUIRE_CUDA=1 $(PYTHON) -m pytest -m cuda
lint: ; $(PYTHON) -m ruff check && $(PYTHON) -m ruff format --check
format: ; $(PYTHON) -m ruff check --fix && $(PYTHON) -m ruff format
types: ; $(PYTHON) -m mypy
wheel: ; TD_NO_EXT=1 $(PYTHON) -m build
bench: ; $(PYTHON) bench/cpu.py
clean: ; rm -rf build dist wheelhouse src/*.egg-info src/tinydecode/*.so
