# Two commands matter: `make quickstart` and `make test`. Both install into .venv/ first.
PYTHON ?= python3
# torch's default wheel carries gigabytes of CUDA. On a machine without a GPU, a CPU build does:
#   make quickstart TORCH="--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# Real Megatron core and Transformer Engine for the tests that trace them, apart from .venv. It wants a CPU build of torch:
#   make test TRACED_TORCH="--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
TRACED_TORCH ?= $(TORCH)
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_INSTALLED := $(FRAMEWORKS)/.installed

ORACLE_EXAMPLES ?= 3000

.PHONY: quickstart test unit soak oracle-full lint install install-frameworks benchmark accuracy-table flags-table clean

quickstart: install  ## plan, train and measure a small model on this machine
	$(RUN) -m llmlaunch submit recipes/quickstart.yaml --local --follow

test: install install-frameworks  ## everything but what needs a GPU
	./.ci/prerequisites test
	$(RUN) -m pytest -m "not gpu"

unit: install  ## what needs no server, no framework and no SLURM: seconds
	$(RUN) -m pytest -m "not gpu and not slurm and not frameworks and not postgres and not browser"

soak: install  ## long repeats: property tests with many examples
	HYPOTHESIS_PROFILE=soak $(RUN) -m pytest -m "not gpu and not slurm and not frameworks and not postgres and not browser"

oracle-full: install install-frameworks  ## thousands of random jobs before real Megatron core and DeepSpeed (ORACLE_EXAMPLES=3000)
	LLMLAUNCH_ORACLE_EXAMPLES=$(ORACLE_EXAMPLES) $(RUN) -m pytest tests/frameworks/test_megatron_oracle.py tests/frameworks/test_deepspeed_oracle.py

lint: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy --strict wrapper
	$(RUN) -m mypy --strict -m train

benchmark: install  ## ratios for benchmarks/RESULTS.md
	$(RUN) benchmarks/check_startup.py
	$(RUN) benchmarks/memory_formula.py
	$(RUN) benchmarks/search_space.py
	$(RUN) benchmarks/stages.py
	$(RUN) benchmarks/regret.py
	$(RUN) benchmarks/placement.py
	$(RUN) benchmarks/slurm_commands.py

flags-table: install  ## the tables of docs/megatron-flags.md
	PYTHONPATH=tests/frameworks $(RUN) tests/frameworks/flags_table.py

accuracy-table: install  ## the tables of README.md, from the measurements that come with the source
	$(RUN) -m llmlaunch accuracy tests/data/measurements/fit.jsonl tests/data/measurements/outcomes.jsonl \
		--markdown README.md

install: $(INSTALLED)

$(INSTALLED): pyproject.toml tests/constraints.txt .ci/prerequisites
	./.ci/prerequisites
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(RUN) -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt --editable '.[local,dev,postgres]'
	touch $(INSTALLED)

install-frameworks: $(FRAMEWORKS_INSTALLED)  ## what the traced tests run: needs no GPU, and no network afterwards

$(FRAMEWORKS_INSTALLED): tests/frameworks/requirements.txt tests/frameworks/requirements-no-deps.txt \
		tests/frameworks/requirements-megatron-0.16.txt .ci/prerequisites
	./.ci/prerequisites test
	$(PYTHON) -m venv --clear $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check $(TRACED_TORCH) -r tests/frameworks/requirements.txt
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -r tests/frameworks/requirements-no-deps.txt
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		--target $(FRAMEWORKS)/megatron-0.16 -r tests/frameworks/requirements-megatron-0.16.txt
	$(FRAMEWORKS)/bin/python tests/frameworks/traced/fake_cuda.py
	touch $(FRAMEWORKS_INSTALLED)

clean:
	rm -rf $(VENV) $(FRAMEWORKS) build dist .mypy_cache .ruff_cache .pytest_cache
