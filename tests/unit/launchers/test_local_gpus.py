"""A run on this machine is refused before anything starts where the machine lacks the GPUs that it was planned for.

Everything is real but the driver, a scripted libnvidia-ml.so.1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.node_rig import build

ROOT = Path(__file__).resolve().parents[3]
RECIPE = str(ROOT / "recipes" / "llama2-7b-deepspeed.yaml")
WORDS = ("nodes=1", "cluster={base: a100-80gb-x8, devices_per_node: 2}", "model={base: llama2-7b, num_layers: 4}")
SLICES = "gpu mig=1\nslice 0 uuid=MIG-a total=40G\nslice 0 uuid=MIG-b total=40G\n"
TWO = "gpu uuid=GPU-aa name=A100 used=1G\ngpu uuid=GPU-bb name=A100 used=1G\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver") / "library")


def llmlaunch(place: Path, library: Path | None, gpus: str, *words: str, **variables: str) -> tuple[int, str]:
    """Return the exit code and stderr of a command on a machine with these GPUs; without a library it has no driver.
    What would train is /bin/true, so that a run that starts against expectation trains nothing."""
    (place / "scenario").write_text(gpus)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"XDG_DATA_HOME": str(place / "data"), "FAKE_NVML_SCENARIO": str(place / "scenario")}
    environment |= {"LLMLAUNCH_PYTHON": "/bin/true", **variables}
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
    argv = [sys.executable, "-m", "llmlaunch", *words]
    done = subprocess.run(argv, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("gpus", "variables", "message"),
    [
        (None, {}, "the plan is for 2 a100-80gb on one node, and this machine has no GPU; "),
        ("", {}, "and this machine has no GPU; "),
        ("gpu uuid=GPU-aa\n", {}, "and this machine has only 1 GPU; "),
        (TWO, {"CUDA_VISIBLE_DEVICES": "GPU-b"}, "has only 1 GPU that CUDA_VISIBLE_DEVICES shows; "),
        (TWO, {"CUDA_VISIBLE_DEVICES": ""}, "has no GPU that CUDA_VISIBLE_DEVICES shows; "),
        (TWO, {"CUDA_VISIBLE_DEVICES": "0,7"}, "has only 1 GPU that CUDA_VISIBLE_DEVICES shows; "),
        (
            TWO.replace("GPU-bb", "GPU-bb total=40G"), {},
            "with 79.1 GiB each, and A100 (GPU-bb) of this machine has 40.0 GiB; ",
        ),
        (SLICES, {}, "(MIG-a) of this machine has 40.0 GiB"),
    ],
)  # fmt: skip
def test_a_run_that_this_machine_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, library: Path, gpus: str | None, variables: dict[str, str], message: str
) -> None:
    driver = None if gpus is None else library
    words = ("submit", RECIPE, *WORDS, "--local", "-o", str(tmp_path / "run"))
    code, told = llmlaunch(tmp_path, driver, gpus or "", *words, **variables)
    assert (code, told.count("error: ")) == (2, 1), told
    assert message in told
    assert not (tmp_path / "run").exists()


def test_resume_of_a_rendered_run_looks_at_the_machine_too(tmp_path: Path, library: Path) -> None:
    run = str(tmp_path / "run")
    assert llmlaunch(tmp_path, None, "", "render", RECIPE, *WORDS, "-o", run)[0] == 0
    code, told = llmlaunch(tmp_path, library, "gpu uuid=GPU-aa\n", "resume", run, "--local")
    assert code == 2
    assert f"{run}: the plan is for 2 a100-80gb on one node, and this machine has only 1 GPU; " in told
    assert not (tmp_path / "run" / "submission.json").exists()


def test_with_the_gpus_of_the_plan_the_run_starts(tmp_path: Path, library: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    words = (*WORDS, f"backend={{name: deepspeed, script: {tmp_path / 'train.py'}}}", "-o", str(tmp_path / "run"))
    code, told = llmlaunch(tmp_path, library, TWO, "submit", RECIPE, *words, "--local")
    assert code == 0, told
    assert (tmp_path / "run" / "submission.json").exists()
