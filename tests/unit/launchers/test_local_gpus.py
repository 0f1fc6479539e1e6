"""A run on this machine is refused before anything starts where the machine lacks the GPUs that it was planned for.

Everything is real but the driver, a scripted libnvidia-ml.so.1.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from support.command_line import CommandLine
from support.node_rig import build

ROOT = Path(__file__).resolve().parents[3]
RECIPE = str(ROOT / "recipes" / "llama2-7b-deepspeed.yaml")
CHANGES = ("nodes=1", "cluster={base: a100-80gb-x8, devices_per_node: 2}", "model={base: llama2-7b, num_layers: 4}",
           "layout={zero_stage: 2, micro_batch_size: 1}")  # fmt: skip
SLICES = "gpu mig=1\nslice 0 uuid=MIG-a total=40G\nslice 0 uuid=MIG-b total=40G\n"
TWO = "gpu uuid=GPU-aa name=A100 used=1G\ngpu uuid=GPU-bb name=A100 used=1G\n"
Machine = Callable[[str | None], None]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver") / "library")


@pytest.fixture
def machine(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Be on a machine with these GPUs; None: without a driver. What would train is /bin/true, so that a run that starts
    against expectation trains nothing."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("FAKE_NVML_SCENARIO", str(tmp_path / "scenario"))
    monkeypatch.setenv("LLMLAUNCH_PYTHON", "/bin/true")

    def become(gpus: str | None) -> None:
        folder = tmp_path / "no driver" if gpus is None else library
        (tmp_path / "scenario").write_text(gpus or "")
        for name, value in (("nvmlLib", None), ("_nvmlGetFunctionPointer_cache", {})):
            monkeypatch.setattr(pynvml, name, value)
        monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(folder / name)))

    return become


@pytest.mark.parametrize(
    ("gpus", "shown", "message"),
    [
        (None, None, "the plan is for 2 a100-80gb on one node, and this machine has no GPU; "),
        ("gpu uuid=GPU-aa\n", None, "and this machine has only 1 GPU; "),
        (TWO, "", "has no GPU that CUDA_VISIBLE_DEVICES shows; "),
        (TWO, "0,7", "has only 1 GPU that CUDA_VISIBLE_DEVICES shows; "),
        (SLICES, None, "with 79.1 GiB each, and "),
    ],
)
def test_a_run_that_this_machine_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path,
    machine: Machine,
    llmlaunch: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    gpus: str | None,
    shown: str | None,
    message: str,
) -> None:
    machine(gpus)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    stderr = llmlaunch("submit", RECIPE, *CHANGES, "--local", "-o", tmp_path / "run", code=2).stderr
    assert stderr.count("error: ") == 1, stderr
    assert message in stderr
    assert not (tmp_path / "run").exists()


def test_resume_of_a_rendered_run_looks_at_the_machine_too(
    tmp_path: Path, machine: Machine, llmlaunch: CommandLine
) -> None:
    run = tmp_path / "run"
    machine(None)
    llmlaunch("render", RECIPE, *CHANGES, "-o", run)
    machine("gpu uuid=GPU-aa\n")
    stderr = llmlaunch("resume", run, "--local", code=2).stderr
    assert f"{run}: the plan is for 2 a100-80gb on one node, and this machine has only 1 GPU; " in stderr
    assert not (run / "submission.json").exists()


def test_with_the_gpus_of_the_plan_the_run_starts(tmp_path: Path, machine: Machine, llmlaunch: CommandLine) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    changes = (*CHANGES, f"backend={{name: deepspeed, script: {tmp_path / 'train.py'}}}")
    machine(TWO)
    llmlaunch("submit", RECIPE, *changes, "-o", tmp_path / "run", "--local")
    assert (tmp_path / "run" / "submission.json").exists()
