# Every target sets up .venv by itself; `python3 >= 3.10` with the venv module is all that must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup demo test lint types crash equivalence figure clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         train, kill in the middle of a window, resume, compare bit by bit (under 4 minutes)"
	@echo "make test         the test suite"
	@echo "make lint types   ruff, mypy --strict"
	@echo "make crash        the long kill campaign and the corruption tests"
	@echo "make equivalence  the full product of optimizers, precisions, clipping and accumulation"
	@echo "make figure       draw docs/window.png from a real run"
	@echo "make clean        remove .venv, caches and demo runs"

setup: $(READY)

# torch comes first and alone: a range would let the resolver take another build than the one pinned.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=python3.11 ...") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(PYTEST) -m "not long"

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

crash: $(READY)
	$(PYTEST) tests/crash --timeout 3600

equivalence: $(READY)
	$(PYTEST) tests/equivalence --timeout 3600

figure: $(READY)
	$(BIN)/python examples/window_figure.py docs/window.png

clean:
	rm -rf $(VENV) demo-runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
