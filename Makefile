# `make train` is all a newcomer needs; `make help` lists the rest. Works with GNU make 3.81 (macOS) and newer.
# Any Python 3.11 or newer:  make train PYTHON=/path/to/python3     More options:  make train ARGS="--seed 1"

VENV = .venv
RUN = $(VENV)/bin/python -m
# Two workers, each with 8 simulated devices; a test file stays in one worker, so that it compiles once.
WORKERS = 2
PYTEST = $(RUN) pytest -n $(WORKERS) --dist loadscope
TESTS =

.PHONY: help train test test-quick test-parity test-gpu notebooks lab lint format lock venv clean
.DEFAULT_GOAL := help

help:  ## list these targets
	@echo "make TARGET [PYTHON=/path/to/python3] [ARGS=...] [TESTS=tests/...]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1~\2/p' Makefile | awk -F'~' '{ printf "%-14s %s\n", $$1, $$2 }'

train: venv  ## train the tiny preset on 8 simulated devices and write a report to runs/ (about 5 minutes)
	$(VENV)/bin/moe-course train --preset tiny $(ARGS)

test: venv  ## all tests that need neither a GPU nor the parity extra
	$(PYTEST) -m "not parity and not gpu" $(ARGS) $(TESTS)

test-quick: venv  ## the same without slow and thorough tests and notebooks (about 8 minutes on two cores)
	$(PYTEST) -m "not parity and not gpu and not slow and not thorough" --ignore tests/notebooks $(ARGS) $(TESTS)

test-parity:  ## compare with Hugging Face, torchao and gfloat, in .venv-parity (downloads PyTorch)
	@scripts/make-venv .venv-parity data,dev,parity
	.venv-parity/bin/python -m pytest -m parity $(ARGS) $(TESTS)

test-gpu:  ## the tests that need an NVIDIA GPU, in .venv-gpu (downloads CUDA and Transformer Engine)
	@scripts/make-venv .venv-gpu data,dev,gpu
	.venv-gpu/bin/python -m pytest -m gpu $(ARGS) $(TESTS)

notebooks: venv  ## make chapters/ and solutions/*.ipynb from solutions/*.py
	$(VENV)/bin/moe-course notebooks $(ARGS)

lab: venv  ## open the chapters in JupyterLab
	$(RUN) jupyterlab chapters $(ARGS)

lint: venv  ## check format and style
	$(RUN) ruff format --check .
	$(RUN) ruff check .

format: venv  ## fix format and style
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

lock:  ## resolve the pins in constraints/ anew (needs Python 3.11 and a newer one)
	@scripts/lock

venv:  ## make .venv with everything pinned (the targets above do this themselves)
	@scripts/make-venv $(VENV) data,dev dev

clean:  ## delete virtual environments, caches and build outputs; keep runs/
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
