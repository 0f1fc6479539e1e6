"""Starting benchmarks/gpu/small_training.py with the memory probe or without, and keeping a record of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device_memory import Driver, NoDriver

from llmlaunch.trainers import HOOK, MEMORY_PROBE

ATTEMPT = "1"
TRAINING = Path(__file__).with_name("small_training.py")


def probe_environment(run: Path, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment in which Python starts with the memory probe, as a rank of the run directory `run` does."""
    hook = run / "hook"
    hook.mkdir(parents=True, exist_ok=True)
    shutil.copy(HOOK, hook / "sitecustomize.py")
    shutil.copy(MEMORY_PROBE, hook / "llmlaunch_memory_probe.py")
    place = {"run": str(run), "attempt": ATTEMPT, "node": os.uname().nodename, "rank": 0, "local_rank": 0}
    path = variables.get("PYTHONPATH")
    search = {"PYTHONPATH": f"{hook}:{path}" if path else str(hook)}
    return {**without_probe(variables), **search, "LLMLAUNCH_PROBE": json.dumps(place)}


def without_probe(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in ("LLMLAUNCH_PROBE", "LLMLAUNCH_STACKS")}


def start(run: Path, probe: bool, words: list[str]) -> subprocess.Popen[str]:
    """A training in a process of its own; its one line of JSON comes on stdout. With `probe` as in a run directory."""
    environment = probe_environment(run) if probe else without_probe()
    return subprocess.Popen([sys.executable, str(TRAINING), *words], env=environment, stdout=subprocess.PIPE, text=True)


def result(training: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = training.communicate()
    if training.returncode != 0:
        sys.exit(f"the training ended with {training.returncode}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def write_record(folder: Path, what: str, record: dict[str, Any]) -> Path:
    """One file, named after what was measured, on what, and when."""
    folder.mkdir(parents=True, exist_ok=True)
    date = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
    gpu = "-".join(str(record["gpu"]).lower().split())
    path = folder / f"{what}-{gpu}-{date}.json"
    path.write_text(json.dumps({"what": what, "date": date, **record}, indent=1) + "\n")
    return path


def driver_version() -> str | None:
    """None where there is no NVML to ask."""
    try:
        return Driver().version()
    except NoDriver:
        return None
