"""Everything beside this that one GPU can tell, in commands of under nine minutes each.

    python benchmarks/gpu/run_all.py --out FOLDER [--only NAME ...] [--list]

Run from the checkout, with the Python that has torch; nothing is installed. Each command is a process of its own, is
ended after nine minutes, and goes on where it stopped when it is started again with the same folder; what failed does
not keep the others from running. FOLDER then holds a JSON file for each, and measurements.jsonl.

Exit code 0: all measured. 2: torch sees no GPU here. 75: some is left for another start. 1: a command failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_records import UNFINISHED, options_of, require_cuda

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BOUND_SECONDS = 540.0


@dataclass(frozen=True)
class Command:
    """A program with its arguments, OUT for the folder of the records, and the minutes it is expected to take."""

    program: str
    arguments: tuple[str, ...]
    minutes: float
    asks: str


OUT = "OUT"
COMMANDS = {
    "context": Command("context_bytes.py", ("--out", OUT), 2, "bytes of context, libraries and communicators"),
    "trace": Command("traced_against_run.py", ("--out", OUT), 5, "traces of a small transformer against runs of it"),
    "allocator": Command("allocator_replay.py", (OUT,), 6, "the model of torch's allocator against torch"),
    "probe": Command("torch_against_nvml.py", (OUT,), 1, "the memory probe against torch, NVML and the driver"),
    "probe-cost": Command("probe_cost.py", (OUT,), 5, "how much longer a step takes with the probe"),
    "deepspeed": Command(
        "framework_steps.py", ("--out", OUT, "--backend", "deepspeed"), 6, "steps of DeepSpeed against predictions"
    ),
    "megatron": Command(
        "framework_steps.py", ("--out", OUT, "--backend", "megatron-lm"), 6, "steps of Megatron-LM against predictions"
    ),
}


def run(command: Command, out: Path) -> int:
    """Return the exit code; UNFINISHED for a command that had to be ended."""
    words = [str(out) if word == OUT else word for word in command.arguments]
    path = os.environ.get("PYTHONPATH")
    search = str(ROOT / "wrapper") + (f":{path}" if path else "")
    try:
        return subprocess.run(
            [sys.executable, str(HERE / command.program), *words],
            env={**os.environ, "PYTHONPATH": search},
            timeout=BOUND_SECONDS,
        ).returncode
    except subprocess.TimeoutExpired:
        return UNFINISHED


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(COMMANDS), help="these alone")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    known, _ = parser.parse_known_args(argv)
    if known.list:
        for name, command in COMMANDS.items():
            print(f"{name:12} {command.minutes:g} min  {command.program:24} {command.asks}")
        return 0
    options = options_of(parser, argv)
    require_cuda(Path(__file__).name)
    codes = {}
    for name in options.only or COMMANDS:
        start = time.monotonic()
        codes[name] = run(COMMANDS[name], options.out)
        print(f"== {name}: exit code {codes[name]} after {(time.monotonic() - start) / 60:.1f} min", flush=True)
    failed = [code for code in codes.values() if code not in (0, UNFINISHED)]
    return 1 if failed else max(codes.values())


if __name__ == "__main__":
    sys.exit(main())
