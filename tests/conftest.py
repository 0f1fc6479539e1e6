"""What every test shares: a home of its own, repeatable property tests in CI, lanes where several run at once."""

from __future__ import annotations

import gc
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.command_line import CommandLine
from support.soak import SOAK

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", max_examples=2000, deadline=None)
settings.load_profile("soak" if SOAK else "ci")

# Collecting ten thousand tests makes millions of objects that stay: looking for garbage there takes a quarter of it.
gc.disable()

HOMES = count()

FAULT_REPEATS = int(os.environ.get("LLMLAUNCH_FAULT_REPEATS", "1"))

# A shell's background job is started with SIGINT ignored, one under nohup with SIGHUP, and so is all they start: the
# tests about Ctrl-C and closed terminals would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A worker of pytest-xdist gets the terminal's width as COLUMNS; what it starts would fold lines that a pipe has whole.
os.environ.pop("COLUMNS", None)

# SLURM's answer takes long on a loaded machine.
os.environ["LLMLAUNCH_ANSWER_SECONDS"] = "60"

# `make test` runs six tests at once (pytest-xdist): lanes of clusters mostly wait, those of frameworks mostly compute.
# Within a lane one test follows another, in one process: they share its cluster, its traces, or the runs that are
# broken side by side. Every other module is its own lane.
LANES = (
    "slurm", "slurm_lives", "frameworks_judged", "frameworks", "frameworks_megatron", "frameworks_trainers",
    "quickstart", "releases", "faults",
)  # fmt: skip
# Modules of tests/slurm about whole lives of jobs, which wait longest, and some with clusters of their own: half of
# that folder's time.
LIVES = (
    *("test_accounting.py", "test_first_jobs.py", "test_forbidden.py", "test_injection.py", "test_life.py"),
    *("test_power_cut.py", "test_same_allocation.py", "test_what_ended_it.py"),
)
# Modules whose jobs one and the same process judges.
JUDGED = ("test_megatron_oracle.py", "test_megatron_models.py", "test_megatron_layers.py")
# Those whose jobs one process trains, and rehearsals.
TRAINERS = (
    *("test_trainer_", "test_rehearsals", "test_techniques_act"),
    *("test_deepspeed_bytes", "test_deepspeed_rank_alone"),
)


def lane(nodeid: str) -> str:
    """The name of the lane of tests/PART/.../MODULE.py::TEST."""
    part = nodeid.split("/")[1]
    module = nodeid.partition("::")[0].rpartition("/")[2]
    if part == "slurm" and module in LIVES:
        return "slurm_lives"
    if part == "frameworks" and module in JUDGED:
        return "frameworks_judged"
    if part == "frameworks" and module.startswith("test_megatron_"):
        return "frameworks_megatron"
    if part == "frameworks" and module.startswith(TRAINERS):
        return "frameworks_trainers"
    return part if part in LANES else nodeid.partition("::")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long lanes begin first where several tests run at once; the short ones then fill what is left."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LANES.index(lane(item.nodeid)) if lane(item.nodeid) in LANES else len(LANES))


def pytest_collection_finish() -> None:
    """What has been collected is never looked at again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

    config.option.loadscopereorder = False
    return Lanes(config, log)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat what breaks things: LLMLAUNCH_FAULT_REPEATS times, else once. Where chance decides what the fault meets,
    the test takes the number of the `repeat`, which may be its seed."""
    if metafunc.definition.get_closest_marker("faults"):
        if "repeat" not in metafunc.fixturenames:
            metafunc.fixturenames.append("repeat")
        metafunc.parametrize("repeat", range(FAULT_REPEATS), ids=lambda number: f"repeat{number}")


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the store, the cache or the settings of the person who runs it."""
    # `mktemp` looks through all earlier folders for the next number: a millisecond for each of ten thousand tests.
    home = tmp_path_factory.getbasetemp() / "homes" / str(next(HOMES))
    home.mkdir(parents=True)
    for variable, folder in (("XDG_DATA_HOME", "data"), ("XDG_CACHE_HOME", "cache"), ("XDG_CONFIG_HOME", "config")):
        monkeypatch.setenv(variable, str(home / folder))
    for variable in ("STORE", "TEMPLATES", "RUNS", "PROMETHEUS", "MLFLOW", "WANDB"):
        monkeypatch.delenv(f"LLMLAUNCH_{variable}", raising=False)
    return home


@pytest.fixture
def llmlaunch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """`llmlaunch` in this process: `llmlaunch("check", recipe, code=3).stdout`, `llmlaunch.json("runs")`."""
    return CommandLine(capsys, monkeypatch)
