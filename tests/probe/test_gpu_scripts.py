"""The scripts of benchmarks/gpu run through and write their records. On a CPU, with stand-ins for torch's allocator,
libcuda and NVML: what they would find on a GPU is not known from here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.node_rig import build
from support.soak import share

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--steps", "3", "--warm-up", "1", "--layers", "1", "--hidden", "64", "--tokens", "8", "--batch", "1")
GIB, MIB = 2**30, 2**20

pytestmark = pytest.mark.frameworks


def record(script: str, folder: Path, *words: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / script), str(folder), "--stand-in", *words, *TINY]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.json")
    assert str(path) in done.stdout
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["gpu"] == "stand-in"
    return found


def cost_of_the_probe(folder: Path, fake_libcuda: Path) -> None:
    found = record("probe_cost.py", folder, "--pairs", "1")
    assert (found["what"], found["steps"], found["torch"][:2]) == ("probe_cost", 3, "2.")
    assert found["ratio"] == found["with_probe_step_seconds"][0] / found["without_step_seconds"][0]


def torch_against_nvml(folder: Path, fake_libcuda: Path) -> None:
    library = build(folder / "driver")
    uuid = "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0"
    (folder / "scenario").write_text(f"gpu uuid={uuid} used=9G\n")
    driver = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_SCENARIO": str(folder / "scenario")}
    found = record("torch_against_nvml.py", folder / "records", FAKE_LIBCUDA=str(fake_libcuda), **driver)
    assert found["probe"]["allocated_peak_bytes"] == found["trainer"]["allocated_peak_bytes"] == 4 * GIB
    assert found["differences"]["probe_allocated_less_trainer"] == 0
    assert found["differences"]["probe_reserved_less_trainer"] == 0
    assert (found["probe"]["uuid"], found["nvml"]["device_peak_bytes"]) == (uuid, 9 * GIB + GIB // 2)
    assert found["nvml"]["samples"] > 0


def trace_of_a_transformer(folder: Path, fake_libcuda: Path) -> None:
    words = ["--out", str(folder), "--stand-in", "--training", "wide"]
    program = ROOT / "benchmarks" / "gpu" / "traced_against_run.py"
    done = subprocess.run([sys.executable, str(program), *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    trace = json.loads((folder / "traced_against_run.json").read_text())["parts"]["wide"]["result"]["trace"]
    # parameters, gradients and two moments in fp32; at the loss the logits and their gradient, at most three times
    states, logits = 16 * (4 * 12 * 4096**2 + 2 * 32_000 * 4096), 4 * 8 * 1024 * 32_000
    assert states + logits < trace["allocated_bytes"] < 1.6 * states + 6 * logits
    evidence = {json.loads(line)["source"]["evidence"] for line in (folder / "measurements.jsonl").open()}
    assert evidence == {"made up"}


RECORDS = {
    "cost_of_the_probe": cost_of_the_probe,
    "torch_against_nvml": torch_against_nvml,
    "trace_of_a_transformer": trace_of_a_transformer,
}


@pytest.mark.parametrize("what", share(RECORDS, ("torch_against_nvml",)))
def test_a_record_says_what_was_compared(what: str, tmp_path: Path, fake_libcuda: Path) -> None:
    RECORDS[what](tmp_path, fake_libcuda)


def test_the_driver_is_queried_without_any_package(tmp_path: Path) -> None:
    library = build(tmp_path / "driver")
    (tmp_path / "scenario").write_text("gpu uuid=GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0 used=9G\n")
    variables = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_SCENARIO": str(tmp_path / "scenario")}
    program = "from device_memory import Driver; d = Driver(); print(d.version(), *d.uuids(), d.used_bytes(0))"
    folder = ROOT / "benchmarks" / "gpu"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True
    )
    version, uuid, used = done.stdout.split()
    assert version
    assert (uuid, int(used)) == ("GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0", 9 * GIB + GIB // 2)
