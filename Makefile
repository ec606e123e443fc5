# Thin by design: every target is one command that can be typed by hand.
SHELL := /bin/bash
PYTHON := .venv/bin/python
CLUSTER_FILE ?= deploy/local-cluster/cluster.yaml
CLUSTER = $(PYTHON) -m local_cluster $(1) --file $(CLUSTER_FILE)
PLAN ?= deploy/examples/gpt2-small-emulated.yaml
.DEFAULT_GOAL := help
FAST = not cluster and not apiserver and not torch_processes and not browser
# Two processes share two cores, so each computes with one thread.
# The local cluster's programs are built with it; go itself tells where a newer one is that it would use.
HAS_GO = $(shell go env GOVERSION 2> /dev/null | awk -F'[go.]+' '$$2 > 1 || ($$2 == 1 && $$3 >= 26) { print "yes" }')
IN_PARALLEL = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal
GANGS = $(shell grep -rl torch_processes tests --include='test_*.py')  # not collected twice: what has no such test
# Tests start hundreds of processes, each of which would compile the packages.
unexport PYTHONDONTWRITEBYTECODE
RELEASES = $(shell $(PYTHON) -c "from trainwright_worker.torch_releases import NEWEST, OLDEST; print(OLDEST.version, NEWEST.version)")
TITAN = torchtitan==0.3.0  # what the exports name
# Gradients of plans against one process, devices and order of collectives of their ranks, checkpoints, profiles, trials, torchrun, all ends of a gang.
SMOKE = $(addprefix tests/worker/test_,torch_releases.py equivalence.py device_placement.py collective_order.py layers_attention.py checkpoint.py checkpoint_conversion.py layer_bench.py gangs.py gang_failures.py)

.PHONY: help try venv demo demo-down programs api-server test test-fast test-mcp test-api-server test-cluster test-nightly test-releases test-gpu bench bench-trainers bench-trials soak lint lines format cluster-up cluster-status load generate docs release

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  \033[1m%-15s\033[0m %s\n", $$1, $$2}'

try:  ## From a fresh checkout to a measured winner on this machine, without Kubernetes (PLAN=FILE: another plan)
	@deploy/development/try.sh $(if $(filter command line environment,$(origin PLAN)),$(PLAN))

venv:  ## Make .venv with every dependency (cached by version)
	@deploy/development/venv.sh

demo: venv  ## From nothing to a measured winner, on the local cluster (or CONTEXT=name: on that kube context)
	@$(PYTHON) -m trainwright_demo --plan $(PLAN) $(if $(CONTEXT),--context $(CONTEXT),--cluster-file $(CLUSTER_FILE))

demo-down: venv  ## Remove the local cluster and every trace of it (or, with CONTEXT=name, the demo's plan and operator there)
	@$(if $(CONTEXT),$(PYTHON) -m trainwright_demo --plan $(PLAN) --context $(CONTEXT) --remove,$(call CLUSTER,down))

programs: venv  ## Build the programs of the local cluster that are missing (15 minutes when all are)
	@$(call CLUSTER,build)

api-server: venv  ## Build those of them that an API server without nodes needs
	@$(call CLUSTER,build --api-server)

test: venv lint docs $(if $(HAS_GO),api-server)  ## Lint, docs, and every test that needs no cluster: a quarter of an hour on two cores
	@$(MAKE) --no-print-directory --jobs 2 test-fast $(if $(HAS_GO),test-api-server)
	@$(MAKE) --no-print-directory test-mcp
	$(IN_PARALLEL) --dist loadfile -m "torch_processes and not timed and not slow" $(GANGS)
	$(PYTHON) -m pytest -m "torch_processes and timed and not slow" $(GANGS)  # alone on the machine
	@command -v promtool > /dev/null || echo "promtool is not installed: the numbers of panels and alerts were not tested"
	@$(if $(HAS_GO),true,echo "Go 1.26 or later is not installed: the tests on a real API server were left out")

test-api-server: api-server  ## The tests on a real API server, shown once they have ended; they wait for much of their time
	@shown=$$(mktemp); GOGC=400 $(PYTHON) -m pytest -m "not slow" tests/apiserver > $$shown 2>&1; code=$$?; cat $$shown; rm $$shown; exit $$code

test-cluster: venv programs  ## A plan's whole way and a crash, on the local cluster, and the page of an answer in a browser
	@command -v chromium > /dev/null || { apt-get update -qq && apt-get install --yes -qq --no-install-recommends chromium; }
	$(PYTHON) -m pytest -m "not slow" tests/cluster tests/planner/report/test_page_in_browser.py tests/operator/kubectl/test_pages_in_browser.py

test-fast: venv  ## The tests that need no cluster and start no processes
	$(IN_PARALLEL) -m "$(FAST) and not slow"

test-mcp: venv  ## The server for language models, with the client of the protocol's SDK
	PYTHONPATH=planner:operator $$(deploy/development/mcp_venv.sh) -m pytest tests/planner/cli/test_mcp.py

test-nightly: venv lint docs programs test-releases  ## Every test with all of its cases and examples
	@$(call CLUSTER,build --kueue --kueue-release 0.18)
	@$(call CLUSTER,build --kueue --kueue-release 0.19)
	$(IN_PARALLEL) --hypothesis-profile nightly --timeout 600 -m "$(FAST)"
	$(PYTHON) -m pytest --hypothesis-profile nightly --timeout 600 -m "not ($(FAST))"

test-releases: venv  ## The worker on the oldest and the newest release of torch (the first time installs 5 GB each)
	for release in $(RELEASES); do \
	  TORCH=$$release deploy/development/venv.sh && .venv-$$release/bin/python -m pytest -m "not slow" $(SMOKE) || exit 1; \
	done

test-gpu: venv  ## The worker on the GPUs at hand, in 25 minutes (WRITE=FILE.md: write the table; OPTIONS=--help: others; skipped where there are none)
	PYTHONPATH=planner:operator:profiler-image:benchmarks:tests/worker/oracles$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON) benchmarks/gpu_checks $(if $(WRITE),--write $(WRITE)) $(OPTIONS)

bench-trials: venv  ## Predictions against the clock: plans of every search tried on the local cluster (25 minutes)
	PYTHONPATH=benchmarks:tests/worker/oracles $(PYTHON) benchmarks/trials

bench-trainers: venv  ## The executor beside torch's own parts and torchtitan's on the same plans: losses and seconds, on the CPU (WRITE=1: write the table)
	PYTHONPATH=benchmarks $(PYTHON) benchmarks/trainers $(if $(WRITE),--write)
	if read -r _ titan < <(deploy/development/trainer_venvs.sh $(TITAN)); then \
	  PYTHONPATH=benchmarks:planner:profiler-image $$titan benchmarks/trainers --trainer torchtitan $(if $(WRITE),--write); \
	fi

bench: venv  ## What searches cost in CPU seconds, beside the papers' plain algorithms (BENCH=amp: only those)
	$(PYTHON) benchmarks $(BENCH)

soak: venv programs  ## What the operator costs with 1,000 plans, 5,000 nodes and random changes, on a real API server (40 minutes)
	PYTHONPATH=tests/support:tests/operator/simulation $(PYTHON) benchmarks/soak $(if $(WRITE),--write)

release: venv  ## Write VERSION=0.3.0 wherever a version stands, and the changelog from changes/
	@deploy/development/release.sh $(VERSION)

lint: venv  ## Types, style, direction of the imports, commit subjects
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy --cache-dir $${XDG_CACHE_HOME:-$$HOME/.cache}/trainwright/mypy  # all checkouts share one: what they differ in is checked
	PYTHONPATH=planner:operator:profiler-image:benchmarks:deploy/local-cluster $(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"
	$(PYTHON) deploy/development/check_commits.py

lines: venv  ## Files and non-blank lines of the packages
	@$(PYTHON) tests/house/source_files.py

format: venv  ## Format the code
	$(PYTHON) -m ruff check --fix --quiet . ; $(PYTHON) -m ruff format .

docs:  ## Build the documentation into build/site; a broken link is an error
	@deploy/development/docs.sh

generate: venv  ## Write what is generated: the CRD in the chart, the plain manifests, docs/reference
	$(PYTHON) deploy/development/generate.py

cluster-up: venv  ## Bring up the local cluster (safe to run twice)
	@$(call CLUSTER,up)

load: venv  ## Build the images from this checkout and bring them onto the local cluster
	@$(call CLUSTER,load)

cluster-status: venv  ## What the local cluster is made of, and whether it is well
	@$(call CLUSTER,status)
