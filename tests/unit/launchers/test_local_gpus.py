"""A run on this machine is refused before anything starts where the machine lacks the GPUs that it was planned for.

Everything is real but the driver, a scripted libnvidia-ml.so.1.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_line import run_llmlaunch
from support.node_rig import build

ROOT = Path(__file__).resolve().parents[3]
RECIPE = str(ROOT / "recipes" / "llama2-7b-deepspeed.yaml")
CHANGES = ("nodes=1", "cluster={base: a100-80gb-x8, devices_per_node: 2}", "model={base: llama2-7b, num_layers: 4}",
           "layout={zero_stage: 2, micro_batch_size: 1}")  # fmt: skip
SLICES = "gpu mig=1\nslice 0 uuid=MIG-a total=40G\nslice 0 uuid=MIG-b total=40G\n"
TWO = "gpu uuid=GPU-aa name=A100 used=1G\ngpu uuid=GPU-bb name=A100 used=1G\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver") / "library")


def llmlaunch(place: Path, library: Path | None, gpus: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Return the exit code and stderr of a command on a machine with these GPUs; without a library it has no driver.
    What would train is /bin/true, so that a run that starts against expectation trains nothing."""
    (place / "scenario").write_text(gpus)
    environment = {"FAKE_NVML_SCENARIO": str(place / "scenario"), "LLMLAUNCH_PYTHON": "/bin/true", **variables}
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
    process = run_llmlaunch(place, *arguments, **environment)
    return process.returncode, process.stderr


@pytest.fixture(autouse=True)
def every_gpu_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("gpus", "variables", "message"),
    [
        (None, {}, "the plan is for 2 a100-80gb on one node, and this machine has no GPU; "),
        ("gpu uuid=GPU-aa\n", {}, "and this machine has only 1 GPU; "),
        (TWO, {"CUDA_VISIBLE_DEVICES": ""}, "has no GPU that CUDA_VISIBLE_DEVICES shows; "),
        (TWO, {"CUDA_VISIBLE_DEVICES": "0,7"}, "has only 1 GPU that CUDA_VISIBLE_DEVICES shows; "),
        (SLICES, {}, "with 79.1 GiB each, and "),
    ],
)  # fmt: skip
def test_a_run_that_this_machine_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, library: Path, gpus: str | None, variables: dict[str, str], message: str
) -> None:
    driver = None if gpus is None else library
    submit = ("submit", RECIPE, *CHANGES, "--local", "-o", str(tmp_path / "run"))
    code, stderr = llmlaunch(tmp_path, driver, gpus or "", *submit, **variables)
    assert (code, stderr.count("error: ")) == (2, 1), stderr
    assert message in stderr
    assert not (tmp_path / "run").exists()


def test_resume_of_a_rendered_run_looks_at_the_machine_too(tmp_path: Path, library: Path) -> None:
    run = str(tmp_path / "run")
    assert llmlaunch(tmp_path, None, "", "render", RECIPE, *CHANGES, "-o", run)[0] == 0
    code, stderr = llmlaunch(tmp_path, library, "gpu uuid=GPU-aa\n", "resume", run, "--local")
    assert code == 2
    assert f"{run}: the plan is for 2 a100-80gb on one node, and this machine has only 1 GPU; " in stderr
    assert not (tmp_path / "run" / "submission.json").exists()


def test_with_the_gpus_of_the_plan_the_run_starts(tmp_path: Path, library: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    changes = (*CHANGES, f"backend={{name: deepspeed, script: {tmp_path / 'train.py'}}}")
    submit = ("submit", RECIPE, *changes, "-o", str(tmp_path / "run"), "--local")
    code, stderr = llmlaunch(tmp_path, library, TWO, *submit)
    assert code == 0, stderr
    assert (tmp_path / "run" / "submission.json").exists()
