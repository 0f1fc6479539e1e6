"""What train.sh gives the trainers in a container: the image's own interpreter, and caches that can be written."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from run_samples import deepspeed_cpu

from llmlaunch.recipe.containers import Container
from llmlaunch.rendering.run_directory import render_run

CACHES = (
    "XDG_CACHE_HOME",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "MPLCONFIGDIR",
    "HF_HOME",
)
# Stands for the interpreter: its torchrun writes down what a trainer would see, and tries the caches.
PYTHON = f"""\
#!/bin/bash
[[ $* = *torch.distributed.run* ]] || exit 0
printf '%s' "$0" >trained-by
for name in {" ".join(CACHES)}; do
  printf '%s\\0' "${{!name:-}}" >>caches
  [[ -z ${{!name:-}} ]] || : >"${{!name}}/written" || exit 1
done
"""


def train(folder: Path, container: Container | None = None, **given: str) -> Path:
    """A finished run of train.sh alone, as job.sbatch starts it in the job 1; its run directory."""
    recipe, plan, rendered = deepspeed_cpu()
    run = folder / "run"
    render_run(replace(recipe, container=container), plan, {"recipe": recipe.name}, rendered, run)
    for name in ("python3", "host-python"):
        (folder / name).write_text(PYTHON)
        (folder / name).chmod(0o755)
    (folder / "tmp").mkdir()
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LLMLAUNCH_PYTHON": str(folder / "host-python"),
        "LLMLAUNCH_RUN_DIR": str(run),
        "LLMLAUNCH_ATTEMPT": "1.0",
        "LLMLAUNCH_NODES": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "SLURM_JOB_ID": "1",
        "TMPDIR": str(folder / "tmp"),
        **given,
    }
    done = subprocess.run(["bash", str(run / "train.sh")], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def caches(run: Path) -> dict[str, str]:
    return dict(zip(CACHES, (run / "caches").read_text().split("\0"), strict=False))


@pytest.mark.parametrize(
    ("container", "job", "python"),
    [
        (Container("box.sif", (), "apptainer"), "1", "python3"),
        (Container("box.sqsh"), "1", "python3"),
        (Container("box.sqsh"), "", "host-python"),  # without SLURM it trains outside the container
        (None, "1", "host-python"),
    ],
)
def test_the_login_nodes_interpreter_does_not_enter_a_container(
    tmp_path: Path, container: Container | None, job: str, python: str
) -> None:
    run = train(tmp_path, container, SLURM_JOB_ID=job)
    assert (run / "trained-by").read_text() == str(tmp_path / python)


def test_without_a_home_each_cache_has_a_folder_while_it_trains(tmp_path: Path) -> None:
    run = train(tmp_path, HOME=str(tmp_path / "none"), TMPDIR=str(tmp_path / "missing"))
    places = caches(run)
    assert places.pop("HF_HOME") == f"{run}/cache/huggingface"
    assert all(place.startswith("/tmp/llmlaunch-caches.") for place in places.values())
    assert not any(Path(place).exists() for place in places.values())
    assert (run / "cache" / "huggingface" / "written").exists()


def test_a_persons_own_caches_stay_where_they_can(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    own = {
        "HF_HOME": str(tmp_path / "models"),
        "TRITON_CACHE_DIR": str(tmp_path / "new"),
        "MPLCONFIGDIR": "/proc/no/way",
    }
    places = caches(train(tmp_path, HOME=str(tmp_path / "none"), **own))
    assert {name: places[name] for name in ("HF_HOME", "TRITON_CACHE_DIR")} == {
        name: own[name] for name in ("HF_HOME", "TRITON_CACHE_DIR")
    }
    assert places["MPLCONFIGDIR"].startswith(f"{tmp_path}/tmp/llmlaunch-caches.")


def test_a_home_that_can_be_written_keeps_the_caches(tmp_path: Path) -> None:
    assert set(caches(train(tmp_path, HOME=str(tmp_path))).values()) == {""}
