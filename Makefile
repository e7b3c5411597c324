# Every target sets up what it needs in .venv first.
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
# What pip installs torch from, e.g. TORCH="torch==2.13.0 --index-url URL" for another build.
TORCH ?= torch==2.13.0

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off
DEV_EXTRAS := dev,fasttext,interop,lowbit,smollm2,tensorboard,reasoning-gym,math,schema,dedup,trees,web,corpus,ray

.PHONY: help run test test-slow lint format bench bench-gpu clean

help:
	@echo "make run        the quickstart: a language model's whole life in about 10 minutes"
	@echo "make test       the quick tests"
	@echo "make test-slow  every test that needs no CUDA card"
	@echo "make lint       ruff and pyright"
	@echo "make format     ruff format"
	@echo "make bench      speed beside other libraries, as ratios"
	@echo "make bench-gpu  speed, memory and the MFU waterfall on a CUDA card, within 8 minutes"
	@echo "make clean      remove .venv and caches (runs/ stays)"

run: .venv/.run
	$(BIN)/stepwell quickstart

test: .venv/.dev
	$(BIN)/pytest

test-slow: .venv/.dev
	$(BIN)/pytest -m "not gpu"

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev
	$(BIN)/python -m benchmarks

bench-gpu: .venv/.dev
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone; the constraint keeps a later install from replacing its build.
.venv/.torch:
	@echo "Making .venv with $(TORCH)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Stepwell needs Python 3.11 or newer: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
		> .venv/constraints.txt
	@touch $@

.venv/.run: pyproject.toml .venv/.torch
	@echo "Installing stepwell"
	$(PIP) --constraint .venv/constraints.txt --editable ".[interop]"
	@touch $@

.venv/.dev: pyproject.toml .venv/.torch
	@echo "Installing stepwell with everything its tests need"
	$(PIP) --constraint .venv/constraints.txt --editable ".[$(DEV_EXTRAS)]"
	@touch $@ .venv/.run
