# Thin by design: every target is one command that can be typed by hand.
SHELL := /bin/bash
PYTHON := .venv/bin/python
CLUSTER_FILE ?= deploy/local-cluster/cluster.yaml
CLUSTER = $(PYTHON) -m local_cluster $(1) --file $(CLUSTER_FILE)
PLAN ?= deploy/examples/gpt2-small-emulated.yaml
.DEFAULT_GOAL := help

.PHONY: help venv demo demo-down test test-fast test-all test-gpu bench bench-trials lint format cluster-up cluster-status load generate

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  \033[1m%-15s\033[0m %s\n", $$1, $$2}'

venv:  ## Make .venv with every dependency (cached by version)
	@deploy/development/venv.sh

demo: venv  ## From nothing to a measured winner, on the local cluster (or CONTEXT=name: on that kube context)
	@$(PYTHON) -m trainwright_demo --plan $(PLAN) $(if $(CONTEXT),--context $(CONTEXT),--cluster-file $(CLUSTER_FILE))

demo-down: venv  ## Remove the local cluster and every trace of it (or, with CONTEXT=name, the demo's plan and operator there)
	@$(if $(CONTEXT),$(PYTHON) -m trainwright_demo --plan $(PLAN) --context $(CONTEXT) --remove,$(call CLUSTER,down))

test: venv lint  ## Every test that fits into CI, those on the real cluster included
	$(PYTHON) -m pytest -m "not gpu and not slow"

test-fast: venv  ## The tests that need no cluster and start no processes
	$(PYTHON) -m pytest -m "not gpu and not slow and not cluster and not apiserver and not torch_processes"

test-all: venv lint  ## Longer runs too
	$(PYTHON) -m pytest -m "not gpu"

test-gpu: venv  ## The worker on real GPUs, as many as there are (skipped with a reason where there are none)
	$(PYTHON) -m pytest tests/gpu

bench-trials: venv  ## Predictions against the clock: plans of every search tried on the local cluster (25 minutes)
	PYTHONPATH=benchmarks:tests/worker/oracles $(PYTHON) benchmarks/trials

bench: venv  ## What searches cost in CPU seconds, beside the papers' plain algorithms (BENCH=amp: only those)
	$(PYTHON) benchmarks $(BENCH)

lint: venv  ## Types, style, direction of the imports
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	PYTHONPATH=planner:operator:profiler-image:deploy/local-cluster $(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

format: venv  ## Format the code
	$(PYTHON) -m ruff check --fix --quiet . ; $(PYTHON) -m ruff format .

generate: venv  ## Write what is generated: the CRD in the chart, the plain manifests
	$(PYTHON) deploy/development/generate.py

cluster-up: venv  ## Bring up the local cluster (safe to run twice)
	@$(call CLUSTER,up)

load: venv  ## Build the images from this checkout and bring them onto the local cluster
	@$(call CLUSTER,load)

cluster-status: venv  ## What the local cluster is made of, and whether it is well
	@$(call CLUSTER,status)
