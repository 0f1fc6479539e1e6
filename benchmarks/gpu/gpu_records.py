"""What the programs beside this write: one JSON file for each, with what it ran on, and measured runs as measurement
records (docs/store.md) in measurements.jsonl, which `llmlaunch measurements import` and `llmlaunch accuracy` read.

Each program is a list of parts. A part that is done is in the file at once, so a program that is started again in the
same folder goes on behind it; no part is begun after the time limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from device_memory import Driver, NoDriver

__all__ = [
    "GIB",
    "GRACE_SECONDS",
    "LIMIT_SECONDS",
    "NO_CUDA",
    "UNFINISHED",
    "Session",
    "measured_records",
    "options_of",
    "require_cuda",
    "versions",
]

GIB = 2**30
LIMIT_SECONDS = 480.0  # what a command may take, with a minute to spare of nine
GRACE_SECONDS = 55.0  # after the limit a part that runs may still end
NO_CUDA, UNFINISHED = 2, 75
MEASUREMENTS = "measurements.jsonl"
OUTCOMES = ("oom", "fits")

Json = dict[str, Any]


def options_of(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Add the arguments all programs have, and parse."""
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder of the records; $OUT")
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_SECONDS, help="no part begins after so long")
    options = parser.parse_args(argv)
    if options.out is None:
        parser.error("name a folder for the records: --out FOLDER, or OUT in the environment")
    return options


def require_cuda(program: str) -> Any:
    """Return torch. Ends the process with NO_CUDA and one message where there is no torch or it sees no GPU."""
    try:
        import torch
    except ImportError:
        print(f"{program}: this Python has no torch: {sys.executable}", file=sys.stderr)
        raise SystemExit(NO_CUDA) from None
    if not torch.cuda.is_available():
        print(f"{program}: torch {torch.__version__} sees no CUDA device here", file=sys.stderr)
        raise SystemExit(NO_CUDA)
    return torch


def versions(torch: Any) -> Json:
    """Return the card and the versions that bytes depend on; null where torch or the driver does not say."""
    properties = torch.cuda.get_device_properties(0)
    try:
        driver: str | None = Driver().version()
    except NoDriver:
        driver = None
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "device_bytes": properties.total_memory,
        "gpus": torch.cuda.device_count(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "python": platform.python_version(),
    }


class Session:
    """One program's file in the folder `out`: parts by name, those of an earlier start on the same card among them."""

    def __init__(self, what: str, out: Path, limit_seconds: float, about: Json) -> None:
        self.path = out / f"{what}.json"
        self.measurements = out / MEASUREMENTS
        self.end = time.monotonic() + limit_seconds
        self.unfinished: list[str] = []
        out.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(self.path.read_text()) if self.path.is_file() else {}
        same = {key: earlier.get(key) for key in about} == about
        date = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
        self.content: Json = {"what": what, "date": date, **about, "parts": earlier.get("parts", {}) if same else {}}

    def part(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure one part and write it, unless it is there or the time is over. What runs into its own time limit
        (subprocess.TimeoutExpired) is left for another start, too."""
        if name in self.content["parts"]:
            print(f"{name}: measured before", flush=True)
        elif time.monotonic() > self.end:
            self.unfinished.append(name)
            print(f"{name}: no time left", flush=True)
        else:
            start = time.monotonic()
            try:
                result = measure()
            except subprocess.TimeoutExpired as error:
                self.unfinished.append(name)
                print(f"{name}: stopped after {error.timeout:.0f} s", flush=True)
                return
            seconds = round(time.monotonic() - start, 1)
            self.content["parts"][name] = {"seconds": seconds, "result": result}
            self._write()
            print(f"{name}: measured in {seconds} s", flush=True)

    def left_seconds(self) -> float:
        return max(self.end - time.monotonic(), 1.0)

    def add_measurements(self, records: list[Json]) -> None:
        """Add measurement records; one with the id of a new one is replaced."""
        lines = self.measurements.read_text().splitlines() if self.measurements.is_file() else []
        kept = {json.loads(line)["id"]: line for line in lines}
        kept |= {record["id"]: json.dumps(record) for record in records}
        _replace(self.measurements, "".join(f"{line}\n" for line in kept.values()))

    def finish(self) -> int:
        """Return the exit code: 0, or UNFINISHED where parts are left for another start."""
        self._write()
        print(self.path)
        if self.unfinished:
            print(f"left for another start: {', '.join(self.unfinished)}", file=sys.stderr)
        return UNFINISHED if self.unfinished else 0

    def _write(self) -> None:
        _replace(self.path, json.dumps(self.content, indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def measured_records(run: Json, about: Json, peaks: dict[str, int | None], program: str) -> list[Json]:
    """Return a measurement record for each kind of peak in `peaks` whose bytes are known, and for each outcome.

    `run` has the sections of the format and what else is known of the training; `about` is what `versions` returns.
    """
    records = []
    for kind, peak in peaks.items():
        if peak is None and kind not in OUTCOMES:
            continue
        record: Json = {
            **run,
            "family": f"llmlaunch-gpu-{program}",
            "split": "validation",
            "peak_kind": kind,
            "peak_bytes": peak,
            "allocator_statistic": f"{kind}_bytes.all.peak" if kind in ("allocated", "reserved") else None,
            "rounding_bytes": None,
            "repeats": None,
            "pipeline_rank": 0,
            "rank_scope": "worst",
            "gpu": about["gpu"],
            "gpu_memory_bytes": -(-about["device_bytes"] // GIB)
            * GIB,  # what torch says is a little less than the card
            "source": {
                "citation": f"benchmarks/gpu/{program}.py",
                "license": "Apache-2.0",
                "evidence": "measured" if about["torch"] else "made up",
                "note": f"torch {about['torch']}, CUDA {about['cuda']}, NCCL {about['nccl']}, driver {about['driver']}",
            },
        }
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        records.append({**record, "id": f"gpu-{digest[:12]}"})
    return records
