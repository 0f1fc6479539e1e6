"""A small transformer of bare torch, traced under fake tensors and then run: is what a trace says what torch allocates?

    python benchmarks/gpu/traced_against_run.py --out FOLDER [--stand-in]

The trace is that of `llmlaunch rehearse --on trace` (tracing/live_storages.py, tracing/caching_allocator.py) on a model
of torch's own layers: with autocast and in bf16, with and without recomputation, short and long sequences. Each is run
with and without expandable segments; the peaks of every run are measurement records. Workspaces of cuBLAS, which torch
allocates and no trace sees, are measured apart and taken off. Needs torch alone; about five minutes.

With --stand-in, on a machine without a GPU, the trace takes the place of the run: that tries the program and says
nothing about the trace. It needs a torch without CUDA and a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import small_training
from context_bytes import before
from gpu_records import GRACE_SECONDS, Session, measured_records, options_of, require_cuda, versions

ROOT = Path(__file__).resolve().parents[2]
TRACING = ROOT / "wrapper" / "llmlaunch" / "tracing"
BAR = 0.03  # of what torch allocates
STEPS = 3  # the first makes the optimizer's states, the later ones run beside them
SETTINGS = {"default": "expandable_segments:False", "expandable": "expandable_segments:True"}
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
TRAININGS = {
    "autocast": ["--layers", "12", "--hidden", "2048", "--tokens", "2048", "--batch", "4"],
    "recomputed": ["--layers", "12", "--hidden", "2048", "--tokens", "2048", "--batch", "4", "--checkpointing"],
    "bf16": ["--layers", "24", "--hidden", "2048", "--tokens", "2048", "--batch", "2", "--bf16"],
    "long": ["--layers", "8", "--hidden", "1024", "--tokens", "16384", "--batch", "1", "--bf16", "--checkpointing"],
    "wide": ["--layers", "4", "--hidden", "4096", "--tokens", "1024", "--batch", "8"],
}


def traced(options: argparse.Namespace, without_gpu: bool) -> dict[str, Any]:
    """Return what the steps take by the trace. `without_gpu` registers a fake device, in a torch without CUDA."""
    sys.path.insert(0, str(TRACING))
    if without_gpu:
        import fake_cuda

        fake_cuda.install()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.autograd.set_multithreading_enabled(False)  # a backward thread would start without the tracing modes
    import caching_allocator
    from fake_dispatch import InventedScalars
    from live_storages import STORAGES

    with FakeTensorMode(allow_non_fake_inputs=True), STORAGES, InventedScalars():
        model, optimizer = small_training.build(torch, options, "cuda")
        tokens = torch.zeros((options.batch, options.tokens + 1), dtype=torch.long, device="cuda")
        for _ in range(STEPS):
            small_training.step(torch, model, optimizer, tokens, options)
    reserved = {
        name: caching_allocator.replay(STORAGES.events(), name == "expandable").reserved_bytes for name in SETTINGS
    }
    return {"allocated_bytes": STORAGES.peak_bytes, "reserved_bytes": reserved}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the steps on the first GPU and return torch's peaks, and how full the device was after them."""
    import torch

    workspace_bytes = _workspace_bytes(torch)
    try:
        model, optimizer = small_training.build(torch, options, "cuda")
        tokens = torch.randint(small_training.VOCABULARY, (options.batch, options.tokens + 1), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            small_training.step(torch, model, optimizer, tokens, options).item()
    except torch.OutOfMemoryError:
        return {"ran_out": True}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "used_bytes": total - free,
        "workspace_bytes": workspace_bytes,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }


def _workspace_bytes(torch: Any) -> int:
    """Return what torch holds for cuBLAS after a matrix product forward and backward, which are two threads."""
    matrix = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(matrix, matrix, matrix[0]).sum().backward()
    del matrix
    return int(torch.cuda.memory_allocated())


def child(act: str, name: str, setting: str, stand_in: bool, limit_seconds: float) -> dict[str, Any]:
    """Trace or run one training in a process of its own, with one setting of the allocator."""
    words = [sys.executable, __file__, "--act", act, "--training", name, *(["--stand-in"] if stand_in else [])]
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    environment[VARIABLES[0]] = SETTINGS[setting]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=limit_seconds)
    if done.returncode:
        raise SystemExit(f"traced_against_run.py: {act} of {name} ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compared(name: str, about: dict[str, Any], session: Session, stand_in: bool) -> dict[str, Any]:
    """Trace a training once and run it with each setting; add the runs to the measurement records."""
    trace = child("trace", name, "default", stand_in, session.left_seconds() + GRACE_SECONDS)
    rows: dict[str, dict[str, Any]] = {}
    options = small_training.arguments(TRAININGS[name])
    for setting in SETTINGS:
        full = None if stand_in else before(0)
        if stand_in:
            reserved = trace["reserved_bytes"][setting]
            seen = {"allocated_bytes": trace["allocated_bytes"], "reserved_bytes": reserved, "workspace_bytes": 0}
        else:
            seen = child("run", name, setting, stand_in, session.left_seconds() + GRACE_SECONDS)
        rows[setting] = {**seen, "before_bytes": full}
        described = small_training.described(options, about, setting == "expandable")
        session.add_measurements(measured_records(described, about, peaks_of(rows[setting]), "traced_against_run"))
    off = differences(trace, rows)
    print(f"{name}: {', '.join(f'{kind} {100 * ratio:+.2f} %' for kind, ratio in off.items())}", flush=True)
    return {"trace": trace, "run": rows, "off": off}


def peaks_of(row: dict[str, Any]) -> dict[str, int | None]:
    """Return the peaks of a run by kind, or that it ran out of memory."""
    if row.get("ran_out"):
        return {"oom": None}
    used, full = row.get("used_bytes"), row["before_bytes"]
    device = None if used is None or full is None else used - full
    return {"allocated": row["allocated_bytes"], "reserved": row["reserved_bytes"], "device": device}


def differences(trace: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return how far the trace is from the runs that did not run out of memory, as ratios less 1."""
    off = {}
    for setting, row in rows.items():
        if not row.get("ran_out"):
            off["allocated"] = trace["allocated_bytes"] / (row["allocated_bytes"] - row["workspace_bytes"]) - 1
            off[f"reserved_{setting}"] = trace["reserved_bytes"][setting] / row["reserved_bytes"] - 1
    return off


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--training", action="append", choices=tuple(TRAININGS), help="only this one")
    parser.add_argument("--act", choices=("trace", "run"), help=argparse.SUPPRESS)
    known, _ = parser.parse_known_args(argv)
    if known.act:
        options = small_training.arguments(TRAININGS[known.training[0]])
        print(json.dumps(traced(options, known.stand_in) if known.act == "trace" else run(options)), flush=True)
        return 0
    options = options_of(parser, argv)
    if options.stand_in:
        about: dict[str, Any] = {"gpu": "stand-in", "device_bytes": 2**30}
        about |= dict.fromkeys(("torch", "cuda", "nccl", "driver"))
    else:
        about = versions(require_cuda(Path(__file__).name))
    session = Session("traced_against_run", options.out, options.limit_seconds, about)
    for name in options.training or TRAININGS:
        session.part(name, partial(compared, name, about, session, options.stand_in))
    parts = [part["result"]["off"] for part in session.content["parts"].values()]
    off = [part["allocated"] for part in parts if "allocated" in part]
    print(f"allocated: at most {100 * max(map(abs, off), default=0.0):.2f} % apart; bar: {100 * BAR:g} %")
    return session.finish()


if __name__ == "__main__":
    sys.exit(main())
