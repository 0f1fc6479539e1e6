"""The programs of benchmarks/gpu say what is missing, go on where they stopped, and write records that are priced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.accuracy.scoring import score_all
from llmlaunch.calibration.records import problem, read_records
from llmlaunch.cluster.cards import machines
from validation.scoring import score

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))

import small_training  # noqa: E402
from gpu_records import NO_CUDA, UNFINISHED, Session, measured_records  # noqa: E402

H100 = {"gpu": "NVIDIA H100 80GB HBM3", "device_bytes": 84_929_478_656, "torch": "2.11.0"}
ABOUT: dict[str, Any] = H100 | {"cuda": "13.0", "nccl": "2.28.9", "driver": "580.0"}
PEAKS = {"allocated": 20 * 2**30, "reserved": 21 * 2**30, "device": None}
PROGRAMS = ("context_bytes", "traced_against_run", "allocator_replay", "probe_cost", "framework_steps", "run_all")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_in_one_line_that_there_is_no_torch(program: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")
    place = [str(tmp_path / "out")] if program in ("allocator_replay", "probe_cost") else ["--out", str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(FOLDER / f"{program}.py"), *place]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (NO_CUDA, f"{program}.py: this Python has no torch: {sys.executable}\n")


def parts_of(out: Path, about: dict[str, Any], limit_seconds: float = 60.0) -> tuple[int, list[str]]:
    """Run a session of two parts; return its exit code and the parts that were measured in it."""
    measured: list[str] = []
    session = Session("steps", out, limit_seconds, about)
    for name in ("first", "second"):
        session.part(name, lambda name=name: measured.append(name) or {"bytes": 1})
    return session.finish(), measured


def test_a_session_goes_on_where_it_stopped(tmp_path: Path) -> None:
    assert parts_of(tmp_path, ABOUT, limit_seconds=-1.0) == (UNFINISHED, [])
    assert parts_of(tmp_path, ABOUT) == (0, ["first", "second"])
    assert parts_of(tmp_path, ABOUT) == (0, [])
    assert set(json.loads((tmp_path / "steps.json").read_text())["parts"]) == {"first", "second"}


def test_what_another_card_or_driver_measured_is_measured_again(tmp_path: Path) -> None:
    parts_of(tmp_path, ABOUT)
    assert parts_of(tmp_path, ABOUT | {"driver": "590.0"}) == (0, ["first", "second"])


def test_a_part_that_runs_into_its_time_limit_is_left_for_another_start(tmp_path: Path) -> None:
    def hang() -> None:
        raise subprocess.TimeoutExpired("train", 150.0)

    session = Session("steps", tmp_path, 60.0, ABOUT)
    session.part("first", hang)
    assert session.finish() == UNFINISHED
    assert parts_of(tmp_path, ABOUT) == (0, ["first", "second"])


def test_a_record_is_written_once_and_read_by_accuracy(tmp_path: Path) -> None:
    described = small_training.described(small_training.arguments([]), ABOUT, expandable=False)
    session = Session("steps", tmp_path, 60.0, ABOUT)
    for _ in range(2):
        session.add_measurements(measured_records(described, ABOUT, PEAKS, "traced_against_run"))
    records = read_records(tmp_path / "measurements.jsonl")
    assert [(record["peak_kind"], record["peak_bytes"]) for record in records] == list(PEAKS.items())[:2]
    for record in records:
        reason = score(record, {}).reason
        assert reason is not None
        assert "backend 'torch'" in reason


def planned_runs() -> list[tuple[str, dict[str, Any]]]:
    runs = json.loads((FOLDER / "framework_runs.json").read_text())
    return [(f"{backend}: {name}", run) for backend, named in runs.items() for name, run in named.items()]


@pytest.mark.parametrize(("name", "planned"), planned_runs())
def test_records_of_framework_steps_are_priced(name: str, planned: dict[str, Any]) -> None:
    (oom,) = measured_records(planned["run"], ABOUT, {"oom": None}, "framework_steps")
    assert problem(oom) is None
    allocated, _ = measured_records(planned["run"], ABOUT, PEAKS, "framework_steps")
    [scored] = score_all([allocated], machines())
    assert scored.reason is None, name
    assert oom["gpu_memory_bytes"] == 80 * 2**30
