"""Steps of DeepSpeed and of Megatron-LM on the first GPU, as llmlaunch renders them, with what was predicted before.

    python benchmarks/gpu/framework_steps.py --out FOLDER [--backend deepspeed|megatron-lm]

The trainings are in framework_runs.json (plan_framework_runs.py). The memory probe writes down torch's peaks, as in any
run; each peak becomes a measurement record that `llmlaunch accuracy` prices. A framework that is not here is said to be
missing, and the rest is measured: DeepSpeed needs deepspeed and transformers, Megatron-LM its checkout, which the
variable MEGATRON_LM_PATH names, with what that needs. About eight minutes for each.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from context_bytes import before
from gpu_records import GIB, GRACE_SECONDS, Session, measured_records, options_of, require_cuda, versions
from probed import ATTEMPT, probe_environment

from llmlaunch.rundir.file_names import PROBES, attempt_folder
from llmlaunch.rundir.probe_files import TorchPeaks, fullest_devices, largest_peaks, read_probe_file
from llmlaunch.trainers import MEMORY_PROBE

PLANNED = Path(__file__).with_name("framework_runs.json")
RUN_VARIABLE, MEGATRON_VARIABLE = "LLMLAUNCH_RUN_DIR", "MEGATRON_LM_PATH"
TRAINER = MEMORY_PROBE.parent / "deepspeed"
PACKAGES = {"deepspeed": ("deepspeed", "transformers"), "megatron-lm": ("megatron.core",)}
TIMEOUT_SECONDS = 150.0
KINDS = ("allocated", "reserved")


def missing(backend: str) -> str:
    """Return what keeps the steps of a backend from being measured here; nothing where they can be."""
    for package in PACKAGES[backend]:
        try:
            present = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # the package around it
            present = False
        if not present:
            return f"not measured: no {package.partition('.')[0]} here"
    checkout = os.environ.get(MEGATRON_VARIABLE)
    if backend == "megatron-lm" and not (checkout and (Path(checkout) / "pretrain_gpt.py").is_file()):
        return f"not measured: no Megatron-LM checkout here; name it in {MEGATRON_VARIABLE}"
    return ""


def version_of(backend: str) -> str | None:
    try:
        return importlib.metadata.version("deepspeed" if backend == "deepspeed" else "megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def steps(planned: dict[str, Any], folder: Path, limit_seconds: float) -> tuple[int, str]:
    """Train in the run directory `folder` with the memory probe; return the exit code and the end of what it printed.
    Raises subprocess.TimeoutExpired."""
    for name, text in planned["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if planned["files"]:  # of DeepSpeed: Megatron's program is its own
        shutil.copytree(TRAINER, folder / "trainer", dirs_exist_ok=True)
    places = {RUN_VARIABLE: str(folder), MEGATRON_VARIABLE: os.environ.get(MEGATRON_VARIABLE, "")}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment = {**probe_environment(folder), **planned["environment"], **rank}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [
        sys.executable,
        *(word.format(**places) if word.startswith("{") else word for word in planned["program"]),
    ]
    with (folder / "log").open("w") as log:
        code = subprocess.run(
            command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT, timeout=limit_seconds
        ).returncode
    return code, (folder / "log").read_text(errors="replace")[-2000:]


def peaks_in(folder: Path) -> TorchPeaks | None:
    """Return what the probe wrote of the one rank; None where it wrote nothing."""
    files = map(read_probe_file, (attempt_folder(folder, ATTEMPT) / PROBES).glob("*.jsonl"))
    return fullest_devices(largest_peaks([file for file in files if file is not None])).get(0)


def measured(backend: str, planned: dict[str, Any], about: dict[str, Any], session: Session) -> dict[str, Any]:
    """Train once; add measurement records, of an out-of-memory error too. Return peaks beside predictions."""
    full = before(0)
    with tempfile.TemporaryDirectory() as name:
        code, printed = steps(planned, Path(name), min(TIMEOUT_SECONDS, session.left_seconds() + GRACE_SECONDS))
        peaks = peaks_in(Path(name))
    seen: dict[str, int | None] = {kind: getattr(peaks, f"{kind}_peak_bytes", None) for kind in KINDS}
    used = None if peaks is None else peaks.device_used_bytes
    seen["device"] = None if used is None or full is None else used - full
    ran_out = code != 0 and "out of memory" in printed.lower()
    if code == 0 or ran_out:
        run = planned["run"] | {"backend_version": version_of(backend)}
        records = measured_records(run, about, {"oom": None} if ran_out else seen, "framework_steps")
        session.add_measurements(records)
    result = {"exit_code": code, "predicted_bytes": planned["predicted_bytes"], "measured_bytes": seen}
    shown = {kind: f"{_gib(seen[kind])} ({_gib(planned['predicted_bytes'][kind])})" for kind in seen}
    print(f"{backend}, exit code {code}, GiB measured (predicted): {shown}", flush=True)
    return result if code == 0 else {**result, "ran_out": ran_out, "printed": printed}


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.2f}"


def main(argv: list[str] | None = None) -> int:
    runs = json.loads(PLANNED.read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=tuple(runs), help="only this one")
    options = options_of(parser, argv)
    about = versions(require_cuda(Path(__file__).name))
    session = Session("framework_steps", options.out, options.limit_seconds, about)
    session.content["missing"] = {}
    for backend in options.backend or runs:
        reason = missing(backend)
        if reason:
            session.content["missing"][backend] = reason
            print(f"{backend}: {reason}")
            continue
        for name, planned in runs[backend].items():
            session.part(f"{backend}: {name}", partial(measured, backend, planned, about, session))
    return session.finish()


if __name__ == "__main__":
    sys.exit(main())
