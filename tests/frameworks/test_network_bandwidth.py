"""The network measured for real: several processes of this machine with gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain, combinations
from pathlib import Path

import pytest

from llmlaunch.cluster.load import load_cluster

pytestmark = pytest.mark.frameworks


def doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [sys.executable, "-m", "llmlaunch", "doctor", "--network", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("players", [2, 3, 4, 5, 8, 17])
def test_in_a_tournament_every_two_meet_once_and_nobody_plays_twice_at_a_time(players: int) -> None:
    from llmlaunch.trainers.network_bandwidth import tournament

    rounds = list(tournament(players))
    assert sorted(chain(*rounds)) == list(combinations(range(players), 2))
    for pairs in rounds:
        assert len(set(chain(*pairs))) == 2 * len(pairs)
    assert len(rounds) == players - 1 + players % 2


def test_what_is_measured_here_is_saved_to_a_profile_that_loads(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--local", "3", "--message-mib", "1", "--repeats", "3", "--save", "cpu-x1", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["nodes"] == ["process0", "process1", "process2"]
    assert told["measured"]["backend"] == "gloo"
    assert told["measured"]["message_bytes"] == 2**20
    matrix = load_cluster("./cpu-x1.yaml", tmp_path).bandwidth
    assert matrix is not None
    assert matrix.nodes == tuple(told["nodes"])
    speeds = [speed for i, row in enumerate(matrix.bytes_per_second) for j, speed in enumerate(row) if i != j]
    assert min(speeds) > 1e6


def test_outside_an_allocation_it_says_how_to_run_it(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--save", "cpu-x1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: not inside a SLURM allocation")
    assert "salloc --nodes=N" in done.stderr
    assert "--save cpu-x1" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    done = doctor(tmp_path, "--local", "2", "--python", str(bare))
    assert done.returncode == 2
    assert f"{bare}: has no torch" in done.stderr


def test_a_measurement_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'NCCL WARN no route' >&2\nexit 3\n")
    broken.chmod(0o755)
    done = doctor(tmp_path, "--local", "2", "--python", str(broken), "--save", "cpu-x1")
    assert done.returncode == 2
    assert "failed with exit code 3" in done.stderr
    assert "NCCL WARN no route" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python"]
