"""What train.sh sees to before the ranks start: open files, threads of host optimizers, a tokenizer's cache."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from run_samples import deepspeed_cpu, outside_slurm, train_alone, train_variables, write_program

from llmlaunch.causes.log_scan import scan
from llmlaunch.recipe.datasets import Data
from llmlaunch.recipe.types import BackendChoice, Recipe
from llmlaunch.rendering.scripts import job_script
from llmlaunch.techniques import Techniques

PYTHON = """\
#!/bin/bash
cache="{folder}/cache"
case "$*" in
  *AutoTokenizer*)
    echo "${{HF_HUB_OFFLINE:-online}}" >>"{folder}/hub_requests"
    if [[ -n ${{HF_HUB_OFFLINE:-}} ]]; then [[ -e $cache ]]; else {fetch}; fi
    ;;
  *torch.distributed.run*)
    printf '%s\\n' "$(ulimit -Sn)" "${{OMP_NUM_THREADS:-}}" "${{HF_HUB_OFFLINE:-}}" >"{folder}/seen"
    ;;
esac
"""
"""Stands for the interpreter: the hub is not asked in earnest, and its torchrun notes what it was given."""


def torchrun_saw(
    folder: Path, of: Recipe, fetch: str = ': >"$cache"', files: tuple[int, int] | None = None, **environment: str
) -> tuple[list[str], str]:
    """Soft limit of open files, OMP_NUM_THREADS and HF_HUB_OFFLINE of torchrun, and the log. `files`: the soft and the
    hard limit that train.sh starts with."""
    folder.mkdir(exist_ok=True)
    python = write_program(folder / "python", PYTHON.format(folder=folder, fetch=fetch))
    variables = outside_slurm("OMP", "HF", **train_variables(folder / "run", python, **environment))
    limit: Callable[[], None] = lambda: files and resource.setrlimit(resource.RLIMIT_NOFILE, files)  # noqa: E731
    _, log = train_alone(folder, of, variables, limit)
    return (folder / "seen").read_text().split("\n")[:3], log


def of_ranks(count: int, **changes: object) -> Recipe:
    of, _, _ = deepspeed_cpu()
    return replace(of, nodes=count // of.cluster.devices_per_node, **changes)  # type: ignore[arg-type]


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    (soft, _, _), log = torchrun_saw(tmp_path, of_ranks(2), files=(256, 2048))
    assert soft == "2048"
    assert "files open" not in log


def test_a_hard_limit_too_low_for_the_ranks_is_said(tmp_path: Path) -> None:
    (soft, _, _), log = torchrun_saw(tmp_path, of_ranks(1024), files=(256, 1024))
    assert soft == "1024"
    assert "may have 1024 files open (ulimit -Hn), and 1024 ranks that meet here may need 2560" in log


def test_job_sbatch_raises_the_limit_that_srun_hands_on(tmp_path: Path) -> None:
    of, plan, _ = deepspeed_cpu()
    script = job_script(of, plan)
    start = script.index("raise_open_files() {")
    body = script[start : script.index("\nraise_open_files\n") + 1]
    limit: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))  # noqa: E731
    done = subprocess.run(
        ["bash", "-uc", f"{body}raise_open_files; ulimit -Sn"], preexec_fn=limit, capture_output=True, text=True
    )
    assert done.stdout == "4096\n", done.stderr


def test_a_host_optimizer_gets_the_cores_of_the_node(tmp_path: Path) -> None:
    offloaded = of_ranks(2, techniques=Techniques(offload_optimizer=1.0))
    (_, threads, _), log = torchrun_saw(tmp_path, offloaded)
    assert threads == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert f"with {threads} thread(s) a rank" in log


def test_a_number_of_threads_that_is_set_stays(tmp_path: Path) -> None:
    offloaded = of_ranks(2, techniques=Techniques(offload_optimizer=1.0))
    assert torchrun_saw(tmp_path / "shell", offloaded, OMP_NUM_THREADS="7")[0][1] == "7"
    assert torchrun_saw(tmp_path / "recipe", replace(offloaded, environment={"OMP_NUM_THREADS": "5"}))[0][1] == "5"


def with_tokenizer(tokenizer: str, **changes: object) -> Recipe:
    return of_ranks(2, data=Data(path="/data/text", tokenizer=tokenizer), **changes)


def test_a_tokenizer_of_the_hub_is_fetched_once_and_loaded_offline(tmp_path: Path) -> None:
    (_, _, offline), log = torchrun_saw(tmp_path, with_tokenizer("org/words"))
    assert offline == "1"
    assert (tmp_path / "hub_requests").read_text().split() == ["1", "online", "1"]
    assert "the ranks load it offline" in log


def test_a_tokenizer_in_the_cache_asks_the_hub_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert torchrun_saw(tmp_path, with_tokenizer("org/words"))[0][2] == "1"
    assert (tmp_path / "hub_requests").read_text().split() == ["1"]


def test_a_tokenizer_that_cannot_be_fetched_is_left_to_the_ranks(tmp_path: Path) -> None:
    fetch = "{ echo Traceback; echo '429 Too Many Requests'; } >&2; false"
    (_, _, offline), log = torchrun_saw(tmp_path, with_tokenizer("org/words"), fetch=fetch)
    assert offline == ""
    assert "is not in this node's cache (429 Too Many Requests); each rank asks the hub for it" in log
    assert scan(log) == []


@pytest.mark.parametrize(
    "of",
    [with_tokenizer("/models/words"), with_tokenizer("org/words", backend=BackendChoice("deepspeed", script="/t.py"))],
)
def test_whoever_asks_no_hub_is_left_alone(tmp_path: Path, of: Recipe) -> None:
    assert torchrun_saw(tmp_path, of)[0][2] == ""
    assert not (tmp_path / "hub_requests").exists()


def test_a_word_of_ones_own_on_the_hub_stays(tmp_path: Path) -> None:
    assert torchrun_saw(tmp_path, with_tokenizer("org/words"), HF_HUB_OFFLINE="0")[0][2] == "0"
    assert not (tmp_path / "hub_requests").exists()
