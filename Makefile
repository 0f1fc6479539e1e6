# Two commands matter: `make quickstart` and `make test`. Both install into .venv/ first.
PYTHON ?= python3
# torch's default wheel carries gigabytes of CUDA. On a machine without a GPU, a CPU build does:
#   make quickstart TORCH="--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# Real Megatron core and Transformer Engine for `llmlaunch rehearse` and the tests, apart from .venv. It wants a CPU build of torch:
#   make test TRACED_TORCH="--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
TRACED_TORCH ?= $(TORCH)
FRAMEWORKS := .venv-frameworks
TRACING := wrapper/llmlaunch/tracing
FRAMEWORKS_INSTALLED := $(FRAMEWORKS)/.installed

ORACLE_EXAMPLES ?= 3000
# Tests that run at once in `make test` (tests/conftest.py says which); 0: one after another, in the order of their names.
AT_ONCE ?= 6
# Modules about lives of jobs, which `make soak` tells where SLURM knows a job by its cgroups, too.
LIVES := injection.py life.py power_cut.py same_allocation.py what_ended_it.py

# Modules whose questions to real frameworks are recorded.
RECORDED := deepspeed_accepts.py deepspeed_bytes.py deepspeed_traced.py family_bytes.py megatron_core_0_16.py megatron_layers.py megatron_models.py megatron_oracle.py megatron_traced.py rank_environment.py

.PHONY: quickstart test unit soak answers corpus oracle-full lint install install-frameworks benchmark accuracy-table step-time-table coverage-table flags-table docs docs-screens docs-tables clean

quickstart: install  ## plan, train and measure a small model on this machine
	$(RUN) -m llmlaunch submit recipes/quickstart.yaml --local --follow

# Modules are compiled once: some 10,000 processes that the tests start would compile them anew, half a second each.
test: export PYTHONDONTWRITEBYTECODE =
test: install install-frameworks  ## everything but what needs a GPU
	./.ci/prerequisites test
	$(RUN) -m compileall -q wrapper tests
	$(RUN) -m pytest -m "not gpu" --numprocesses $(AT_ONCE) --timeout 1200 --durations 25

unit: install  ## what needs no server, no framework, no SLURM and breaks nothing: minutes
	$(RUN) -m pytest -m "not gpu and not slurm and not releases and not frameworks and not postgres and not browser and not faults"

soak: export LLMLAUNCH_TESTS = all
soak: install install-frameworks  ## long repeats: the whole frozen corpus, property tests with many examples, every question to the frameworks, SLURM's tests under three releases of it, lives of jobs in cgroups, faults twenty times, a simulated week; results in benchmarks/SOAK.md
	$(RUN) -m pytest -m "not gpu and not slurm and not releases and not frameworks and not postgres and not browser and not faults"
	$(RUN) -m pytest -m frameworks --timeout 2400
	$(RUN) -m pytest -m slurm; code=$$?; \
	LLMLAUNCH_SLURM_CGROUPS=1 $(RUN) -m pytest $(addprefix tests/slurm/test_,$(LIVES)) || code=1; \
	for suite in trixie sid; do $(RUN) tests/releases/debian.py $$suite $(RUN) -m pytest -m slurm || code=1; done; exit $$code
	LLMLAUNCH_FAULT_REPEATS=20 $(RUN) -m pytest -m "faults and not gpu" --junitxml=.soak.xml; code=$$?; \
	$(RUN) benchmarks/week --json .week.json || code=1; \
	$(RUN) benchmarks/week --non-persistent-minutes 0 --json .week-durable.json || code=1; \
	PYTHONPATH=tests $(RUN) -m support.corpus compare || code=1; \
	$(RUN) benchmarks/soak.py .soak.xml .week.json .week-durable.json benchmarks/SOAK.md; exit $$code

answers: install install-frameworks  ## what the real frameworks answer to the recorded questions, asked anew: tests/data/answers and noticed_functions.json (CONTRIBUTING.md)
	LLMLAUNCH_TESTS=record $(RUN) -m pytest $(addprefix tests/frameworks/test_,$(RECORDED)) tests/unit/memory/test_every_term_is_checked.py

corpus: install  ## answers every case of the frozen corpus anew, names what changed, and writes it (CONTRIBUTING.md)
	PYTHONPATH=tests $(RUN) -m support.corpus write

oracle-full: install install-frameworks  ## thousands of random jobs before real Megatron core and DeepSpeed (ORACLE_EXAMPLES=3000)
	LLMLAUNCH_ORACLE_EXAMPLES=$(ORACLE_EXAMPLES) $(RUN) -m pytest $(addprefix tests/frameworks/test_,megatron_oracle.py megatron_bridge.py deepspeed_oracle.py)

lint: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy --strict wrapper validation
	$(RUN) -m mypy --strict --explicit-package-bases wrapper/llmlaunch/trainers/deepspeed/[a-z]*.py
	$(RUN) -m mypy --strict --python-version 3.11 --explicit-package-bases $(TRACING)/[a-z]*.py

benchmark: install  ## ratios for benchmarks/RESULTS.md
	$(RUN) benchmarks/check_startup.py
	$(RUN) benchmarks/memory_formula.py
	$(RUN) benchmarks/search_space.py
	$(RUN) benchmarks/stages.py
	$(RUN) benchmarks/regret.py
	$(RUN) benchmarks/published_layouts.py
	$(RUN) benchmarks/placement.py
	$(RUN) benchmarks/slurm_commands.py
	$(RUN) benchmarks/cli_filter.py
	$(RUN) benchmarks/collect_runs.py
	$(RUN) benchmarks/monitor_cost.py
	$(RUN) benchmarks/watch_refresh.py
	$(RUN) benchmarks/calibrate.py
	$(RUN) benchmarks/last_act.py
	$(RUN) benchmarks/metadata.py
	$(RUN) benchmarks/preflight_meeting.py
	$(RUN) benchmarks/first_line.py

flags-table: install  ## the tables of docs/megatron-flags.md
	PYTHONPATH=tests/frameworks:tests $(RUN) tests/frameworks/flags_table.py

docs-tables: install  ## tables made from the code: keys in docs/recipe-keys.md, commands, the Python interface, rules and facts in docs/megatron*.md and their like
	PYTHONPATH=tests $(RUN) -m support.recipe_keys
	PYTHONPATH=tests $(RUN) -m support.backend_tables
	PYTHONPATH=tests $(RUN) -m support.interface_tables
	PYTHONPATH=tests $(RUN) -m support.cause_table
	PYTHONPATH=tests $(RUN) -m support.coverage_table
	PYTHONPATH=tests $(RUN) -m support.run_files_page

coverage-table: install  ## which jobs of NVIDIA's performance page and of MLPerf can be said, priced, rendered: docs/coverage.md
	PYTHONPATH=tests $(RUN) -m support.coverage_table

docs: install  ## the documentation as a site in build/site; fails on a link that leads nowhere
	$(RUN) -m mkdocs build --strict  # --quiet would keep warnings from --strict, too

docs-screens: install  ## the pictures of the docs: their commands typed in a real terminal; trains a small model
	PYTHONPATH=tests $(RUN) -m support.screens

evidence-table: install  ## the measured runs that decide margins, priced by the formula of today
	PYTHONPATH=tests $(RUN) -m support.evidence_table

step-time-table: install  ## how far measured step times are from those that the formula of today predicts
	PYTHONPATH=tests $(RUN) -m support.step_time_table

accuracy-table: install  ## the tables of docs/accuracy.md, from the measurements that come with the source; prints the README's sentence
	$(RUN) -m validation.accuracy_tables

install: $(INSTALLED)

$(INSTALLED): pyproject.toml tests/constraints.txt .ci/prerequisites
	./.ci/prerequisites
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(RUN) -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt --editable '.[local,dev,docs,postgres]'
	touch $(INSTALLED)

install-frameworks: $(FRAMEWORKS_INSTALLED)  ## what the traced tests run: needs no GPU, and no network afterwards

$(FRAMEWORKS_INSTALLED): $(TRACING)/requirements.txt $(TRACING)/requirements-no-deps.txt \
		tests/frameworks/requirements-megatron-0.16.txt tests/frameworks/requirements-bridge-0.6.txt \
		.ci/prerequisites
	./.ci/prerequisites test
	LLMLAUNCH_TRACED_TORCH="$(TRACED_TORCH)" PYTHONPATH=wrapper \
		$(PYTHON) -m llmlaunch.rehearsal.install --unmarked $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		--target $(FRAMEWORKS)/megatron-0.16 -r tests/frameworks/requirements-megatron-0.16.txt
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		--target $(FRAMEWORKS)/bridge-0.6 -r tests/frameworks/requirements-bridge-0.6.txt
	touch $(FRAMEWORKS_INSTALLED)

clean:
	rm -rf $(VENV) $(FRAMEWORKS) build dist .mypy_cache .ruff_cache .pytest_cache
