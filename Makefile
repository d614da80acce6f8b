# Everything runs in .venv, which `make setup` makes and every other target asks for.

PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
ENGINE ?= local
PIP := -m pip --disable-pip-version-check install --quiet
TORCH := $(shell grep '^torch==' requirements.txt)
# In two processes, of which one has all tests that need a cluster, in the order of tests/conftest.py. Threads that wait
# for others leave the cores to those that work.
TESTS := OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n 2 --dist loadgroup --no-loadscope-reorder
# A file's tests share an engine. Both processes may have a cluster.
ENGINES := OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n 2 --dist loadfile
# What needs neither a process, a model nor the third-party packages of a backend.
CORE := $(addprefix tests/,mesh data weights roles run report simulation planning testing rollout)
FAST := $(CORE) $(addprefix tests/,cli engines environments evaluation losses objectives rewards tasks watch \
	test_architecture.py test_public_api.py)
# Tests of the same bits, under each of these sets of a processor's instructions. `make test` uses the largest.
CAPABILITIES := default $(shell grep -qs avx512f /proc/cpuinfo && echo avx2)
# Modules that are compiled again in each process cost more than the files.
unexport PYTHONDONTWRITEBYTECODE
# Its theme's makers advertise their next one in each build.
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs
# OpenAI's package for JavaScript, which agents are tested with where there is npm.
NODE := tests/agents/node/node_modules/.package-lock.json
BENCHMARKS := $(filter-out bench/faults.py bench/harness.py, $(wildcard bench/*.py))

.DEFAULT_GOAL := help
.PHONY: help setup quickstart smollm2 test test-fast test-index test-attack test-bits test-lowest test-cluster test-gpu test-contracts test-vllm test-sglang lint docs docs-serve prose check bench peers

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.done  ## make .venv, with pinned versions

quickstart: setup  ## warm up a small model, then improve it by GRPO: about 4 minutes on 2 cores; ENGINE=ray on Ray
	$(BIN)/meshrl run sft/quickstart run.engine=$(ENGINE)
	$(BIN)/meshrl run grpo/quickstart run.engine=$(ENGINE)

smollm2: setup  ## GRPO on SmolLM2-135M-Instruct: about 5 minutes
	$(BIN)/meshrl run grpo/smollm2

test: setup $(if $(shell command -v npm),$(NODE))  ## the tests
	$(TESTS) --ignore tests/attack --ignore tests/cluster --ignore tests/inference --ignore tests/packaging/index --ignore tests/vllm

test-index: setup  ## what pip's index gives today: the wheel on each Python that is here, and packages for each extra
	$(BIN)/pytest -rs tests/packaging/index

test-attack: setup  ## attacks: killed and doubled runs, damaged files, hostile code, calls that hang
	$(TESTS) tests/attack

test-fast: setup  ## the tests that start no process and no model, for the loop of writing code: about a minute
	$(TESTS) -m "not process and not slow" $(FAST)

test-bits: setup  ## the tests of equal bits, for each set of this processor's instructions but the largest, which test uses
	for each in $(CAPABILITIES); do \
		echo "ATEN_CPU_CAPABILITY=$$each" && ATEN_CPU_CAPABILITY=$$each $(TESTS) -m bits tests/algorithms tests/backends tests/environments tests/rollout || exit 1; done

test-lowest: .venv-lowest/.done  ## the tests of the core, with the lowest versions of the packages that it needs
	.venv-lowest/bin/pytest -n 2 --dist loadfile -m "not process and not slow" $(CORE)

test-cluster: setup  ## the tests on several hosts, made of namespaces: as root (docs/hosts.md)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -rs -n 2 --dist loadfile tests/cluster

test-gpu: setup  ## the tests that need a GPU
	$(BIN)/pytest -m gpu tests/gpu

test-contracts: setup  ## what only a GPU runs, against the sources of its packages, which pip brings
	$(BIN)/python -m tests.gpu_contracts.renew --download
	git diff --exit-code tests/gpu_contracts/signatures
	$(BIN)/pytest tests/gpu_contracts

test-vllm: setup .venv-vllm/.done  ## the tests of the vLLM backend, on vLLM for CPUs in a separate environment
	$(ENGINES) -m vllm tests/inference tests/vllm

test-sglang: setup .venv-sglang/.done  ## the tests of the SGLang backend, on SGLang for CPUs in a separate environment
	$(ENGINES) -m sglang tests/inference

lint: setup  ## formatting, lint, both type checkers
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pyright

docs: .venv-docs/.done  ## the site, into site/: no warning, no broken link
	$(MKDOCS) build --strict --quiet

docs-serve: .venv-docs/.done  ## the site on http://127.0.0.1:8000, built again when a page changes
	$(MKDOCS) serve

prose: .venv-docs/.done  ## the English of the pages: proselint, the words of docs/prose.toml, and how readable each page is
	.venv-docs/bin/python docs/prose.py

check: lint prose docs test test-attack test-bits test-lowest test-vllm test-sglang  ## what CI runs: all but test-index, test-cluster, test-contracts, test-gpu

bench: setup peers  ## every benchmark, into bench/results
	@mkdir -p bench/results
	@for file in $(BENCHMARKS); do \
		$(BIN)/python $$file --json bench/results/$$(basename $$file .py).json || exit 1; done

peers: .peers/trl/.done .peers/verl/.done  ## the environments of the projects that benchmarks compare with

.venv/.done: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "meshrl needs Python 3.11 or later: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) --constraint requirements.txt $(TORCH)
	$(BIN)/python $(PIP) --no-deps --requirement requirements.txt
	$(BIN)/python $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

.venv-lowest/.done .venv-docs/.done: .venv-%/.done: requirements-%.txt pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) --no-deps --requirement $<
	$(@D)/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

.venv-vllm/.done .venv-sglang/.done: .venv-%/.done: requirements-%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) --constraint $< $(TORCH)
	$(@D)/bin/python $(PIP) --no-deps --requirement $<
	@touch $@

# Without a network its tests are skipped.
$(NODE): tests/agents/node/package-lock.json
	-npm ci --silent --prefix $(<D)

# torch first and alone, here too: what follows would bring another build of it.
.peers/%/.done: bench/peers/requirements-%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) --constraint $< $$(grep '^torch==' $<)
	$(@D)/bin/python $(PIP) $(ALONE) --requirement $<
	@touch $@

# What verl depends on would bring CUDA: its file is complete.
.peers/verl/.done: ALONE := --no-deps
