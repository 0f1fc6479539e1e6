"""What train.sh gives the trainers in a container: the image's own interpreter, and caches that can be written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from run_samples import deepspeed_cpu, train_alone, train_variables, write_program

from llmlaunch.recipe.containers import Container

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


def train(folder: Path, container: Container | None = None, **more: str) -> Path:
    """A finished run of train.sh alone, as job.sbatch starts it in the job 1; its run directory."""
    for name in ("python3", "host-python"):
        write_program(folder / name, PYTHON)
    (folder / "tmp").mkdir()
    outside = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder / "tmp"), "SLURM_JOB_ID": "1"}
    variables = train_variables(folder / "run", folder / "host-python", **{**outside, **more})
    return train_alone(folder, replace(deepspeed_cpu()[0], container=container), variables)[0]


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
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert places[name] == own[name]
    assert places["MPLCONFIGDIR"].startswith(f"{tmp_path}/tmp/llmlaunch-caches.")


def test_a_home_that_can_be_written_keeps_the_caches(tmp_path: Path) -> None:
    assert set(caches(train(tmp_path, HOME=str(tmp_path))).values()) == {""}
