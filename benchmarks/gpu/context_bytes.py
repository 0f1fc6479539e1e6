"""Bytes that a process holds on a GPU outside torch's allocator: its context, the libraries, the communicators.

    python benchmarks/gpu/context_bytes.py --out FOLDER

Each part is a process of its own that takes one thing after the other and asks how full the device is in between, less
what it was before and less what torch's allocator has reserved. One communicator of one rank, and of every two GPUs and
all of them where there are more. Nobody else may use the GPU meanwhile. Needs torch alone; about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from device_memory import Driver, NoDriver
from gpu_records import Session, options_of, require_cuda, versions

MIB = 2**20
SETTLED_SECONDS = 2.0  # after which the driver has taken back what the process before had


class Marks:
    """How full the device is, beside what torch has reserved, after each step of this process."""

    def __init__(self, torch: Any, before_bytes: int | None) -> None:
        self.torch, self.before_bytes = torch, before_bytes
        self.marks: list[dict[str, Any]] = []

    def add(self, name: str) -> None:
        cuda = self.torch.cuda
        cuda.synchronize()
        free, total = cuda.mem_get_info()
        used, reserved = total - free, cuda.memory_reserved()
        outside = None if self.before_bytes is None else used - self.before_bytes - reserved
        held = {"used_bytes": used, "reserved_bytes": reserved, "allocated_bytes": cuda.memory_allocated()}
        self.marks.append({"after": name, **held, "outside_bytes": outside})


def measured(torch: Any, before_bytes: int | None, rank: int, ranks: int) -> dict[str, Any]:
    """Take what a training takes, in the order in which it does. `ranks` above 0: with a communicator."""
    torch.cuda.set_device(rank)
    torch.cuda.init()
    marks = Marks(torch, before_bytes)
    marks.add("context")
    if ranks:
        torch.distributed.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
        column = torch.ones(64 * MIB, device="cuda")
        marks.add("init_process_group")
        torch.distributed.all_reduce(column)
        marks.add("first all_reduce")
        torch.distributed.all_gather_into_tensor(torch.empty(ranks * MIB, device="cuda"), column[:MIB])
        marks.add("first all_gather")
        group = torch.distributed.new_group(list(range(ranks)))
        torch.distributed.all_reduce(column, group=group)
        marks.add("a second group")
        torch.distributed.destroy_process_group()
    else:
        libraries(torch, marks)
    return {"marks": marks.marks}


def libraries(torch: Any, marks: Marks) -> None:
    """What the kernels of a transformer's step load. Workspaces of cuBLAS are allocated by torch, so they are in
    `allocated_bytes`."""
    functional = torch.nn.functional
    matrix = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    marks.add("a random matrix")
    (matrix @ matrix).sum().backward()
    marks.add("matrix products (cuBLAS)")
    functional.linear(matrix, matrix, matrix[0]).sum().backward()
    marks.add("a linear layer with bias (cuBLASLt)")
    heads = torch.randn(1, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    marks.add("attention, forward and backward")
    parameter = torch.nn.Parameter(torch.zeros(MIB, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()
    functional.cross_entropy(matrix.float(), torch.zeros(1024, dtype=torch.long, device="cuda")).item()
    marks.add("fused AdamW and cross entropy")


def before(index: int) -> int | None:
    """Return how full the GPU is now; None where NVML cannot be asked."""
    try:
        return Driver().used_bytes(index)
    except NoDriver:
        return None


def in_processes(ranks: int, limit_seconds: float) -> list[dict[str, Any]]:
    """Start a process for each rank, one without a communicator for 0, and return what each measured."""
    time.sleep(SETTLED_SECONDS)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    # torch's index is NVML's where all GPUs are visible and in the order of the bus
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    full = [before(rank) for rank in range(max(ranks, 1))]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), "--ranks", str(ranks), "--before", str(used)],
            env={**os.environ, **order, **place},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, used in enumerate(full)
    ]
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=limit_seconds)
            if process.returncode:
                raise SystemExit(f"context_bytes.py: a process with {ranks} ranks ended with {process.returncode}")
            results.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--rank", "--ranks", "--before"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    known, _ = parser.parse_known_args(argv)
    torch = require_cuda(Path(__file__).name)
    if known.rank is not None:
        full = None if known.before == "None" else int(known.before)
        print(json.dumps(measured(torch, full, int(known.rank), int(known.ranks))), flush=True)
        return 0
    options = options_of(parser, argv)
    session = Session("context_bytes", options.out, options.limit_seconds, versions(torch))
    gpus = torch.cuda.device_count()
    for ranks in sorted({0, 1, min(2, gpus), gpus}):
        name = "without a communicator" if not ranks else f"a communicator of {ranks}"
        session.part(name, partial(in_processes, ranks, session.left_seconds()))
    return session.finish()


if __name__ == "__main__":
    sys.exit(main())
