"""`llmlaunch doctor` in real environments: `--frameworks` and what a recipe makes of it, `--network` between several
processes of this machine over gloo."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from itertools import chain, combinations
from pathlib import Path

import pytest
from judges import megatron_python

from llmlaunch.cluster.load import load_cluster

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[2]


def llmlaunch(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MEGATRON"))}
    environment |= {"OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", "llmlaunch", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip


def doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return llmlaunch(folder, "doctor", *words)


def test_what_this_environment_holds_is_said_kept_and_used(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--frameworks", sys.executable, "--local", "--json")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    for name in ("torch", "deepspeed", "transformers"):
        assert seen["packages"][name] == importlib.metadata.version(name)
    assert (seen["interpreter"], seen["problem"]) == (sys.executable, "")
    checked = llmlaunch(tmp_path, "check", "-v", str(ROOT / "recipes" / "quickstart.yaml"), f"python={sys.executable}")
    assert f"Assumed: DeepSpeed {seen['packages']['deepspeed']}, as llmlaunch doctor saw" in checked.stdout


def test_the_megatron_core_of_a_checkout_goes_before_an_installed_one(tmp_path: Path) -> None:
    python = str(megatron_python())
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    words = ("doctor", "--frameworks", python, "--local")
    checkout = llmlaunch(tmp_path, *words, MEGATRON_LM_PATH=str(tmp_path))
    assert "megatron-core       0.16.1" in checkout.stdout, checkout.stderr


@pytest.mark.parametrize("players", [2, 3, 4, 5, 8, 17])
def test_in_a_tournament_every_two_meet_once_and_nobody_plays_twice_at_a_time(players: int) -> None:
    from llmlaunch.trainers.network_bandwidth import tournament  # which imports torch

    rounds = list(tournament(players))
    assert sorted(chain(*rounds)) == list(combinations(range(players), 2))
    for pairs in rounds:
        assert len(set(chain(*pairs))) == 2 * len(pairs)
    assert len(rounds) == players - 1 + players % 2


def test_what_is_measured_here_is_saved_to_a_profile_that_loads(tmp_path: Path) -> None:
    done = doctor(
        tmp_path, "--network", "--local", "2", "--message-mib", "1", "--repeats", "3", "--save", "cpu-x1", "--json"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["nodes"] == ["process0", "process1"]
    assert answer["measured"]["backend"] == "gloo"
    assert answer["measured"]["message_bytes"] == 2**20
    matrix = load_cluster("./cpu-x1.yaml", tmp_path).bandwidth
    assert matrix is not None
    assert matrix.nodes == tuple(answer["nodes"])
    speeds = [speed for i, row in enumerate(matrix.bytes_per_second) for j, speed in enumerate(row) if i != j]
    assert min(speeds) > 1e6


def test_outside_an_allocation_it_says_how_to_run_it(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--network", "--save", "cpu-x1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: not inside a SLURM allocation")
    assert "salloc --nodes=N" in done.stderr
    assert "--save cpu-x1" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "messages"),
    [
        ("ModuleNotFoundError: No module named 'torch'", 1, ("{python}: has no torch",)),
        ("NCCL WARN no route", 3, ("failed with exit code 3", "NCCL WARN no route")),
    ],
    ids=["without_torch", "that_fails"],
)
def test_a_python_whose_measurement_ends_early_is_told_with_its_last_words(
    tmp_path: Path, error: str, code: int, messages: tuple[str, ...]
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{error}" >&2\nexit {code}\n')
    python.chmod(0o755)
    done = doctor(tmp_path, "--network", "--local", "2", "--python", str(python), "--save", "cpu-x1")
    assert done.returncode == 2
    for message in messages:
        assert message.format(python=python) in done.stderr
    assert list(tmp_path.iterdir()) == [python]
