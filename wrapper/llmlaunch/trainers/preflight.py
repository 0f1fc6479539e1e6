"""Tests one device before the training, and its connection to all others. `node.pyz preflight` starts one for each.

It stands alone: Python >= 3.9 and torch, nothing of llmlaunch. One JSON line on stdout for each stage it reached:

    {"stage": "devices"}    the node shows as many devices as were asked for
    {"stage": "matmul", "seconds": 0.0021}    a product came out right, and so long it took
    {"stage": "joined"}     this process met the others
    {"stage": "reduced"}    an all-reduce over all that met came out right

or {"bad": "why"} where this device is at fault. A process that comes no further than a stage prints nothing more.
Processes that do not appear in time are left out, so that one node cannot keep the others from trying.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
import time
from typing import NoReturn

import torch
import torch.distributed as dist

# A row of the left matrix has about 128 entries of 1 or -1: sums stay below 256, which bf16 holds exactly.
ENTRIES_BY_ROW = 128
# A GPU is warmed up until clocks and power have settled, then timed in batches: of one product the launch counts, too.
SIZE_ON_GPU, WARM_UP_SECONDS_ON_GPU, REPEATS_ON_GPU, BATCH_ON_GPU = 8192, 3.0, 9, 50
SIZE_ON_CPU, WARM_UP_SECONDS_ON_CPU, REPEATS_ON_CPU, BATCH_ON_CPU = 512, 0.0, 3, 1
REDUCED_ELEMENTS_ON_GPU, REDUCED_ELEMENTS_ON_CPU = 16 * 2**20, 1024


def main() -> NoReturn:
    options = arguments()
    wrong = None if options.kind == "cpu" else count_problem(options.devices)
    if wrong is not None:
        say(bad=wrong)
        leave()
    say(stage="devices")
    device = torch.device("cuda", options.local_rank) if options.kind == "gpu" else torch.device("cpu")
    if options.kind == "gpu":
        torch.cuda.set_device(device)
    seconds = product_seconds(device)
    if seconds is None:
        say(bad=f"device {options.local_rank} computed a wrong product")
        leave()
    say(stage="matmul", seconds=seconds)
    meet(options, device)
    leave()


def count_problem(expected: int) -> str | None:
    count = torch.cuda.device_count()
    return None if count == expected else f"{count} GPUs are usable here, {expected} were asked for"


def product_seconds(device: torch.device) -> float | None:
    """Seconds of a product on the device, the median of several batches; None where the last one is wrong.

    All numbers are small integers, so right means equal; the product is judged by what it makes of a vector
    (Freivalds 1977), which takes n x n operations instead of n x n x n.
    """
    on_gpu = device.type == "cuda"
    size, repeats, batch, warm_up = (
        (SIZE_ON_GPU, REPEATS_ON_GPU, BATCH_ON_GPU, WARM_UP_SECONDS_ON_GPU)
        if on_gpu
        else (SIZE_ON_CPU, REPEATS_ON_CPU, BATCH_ON_CPU, WARM_UP_SECONDS_ON_CPU)
    )
    random = torch.Generator(device).manual_seed(1)
    left = signs(size, random, device) * (
        torch.rand(size, size, generator=random, device=device) * size < ENTRIES_BY_ROW
    )
    right = signs(size, random, device)
    narrow = torch.bfloat16 if on_gpu else torch.float32
    first, second = left.to(narrow), right.to(narrow)
    warm_until = time.perf_counter() + warm_up
    while True:  # once at least: libraries are loaded
        product = first @ second
        wait(device)
        if time.perf_counter() >= warm_until:
            break
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(batch):
            torch.matmul(first, second, out=product)
        wait(device)
        seconds.append((time.perf_counter() - began) / batch)
    vector = torch.randint(-8, 9, (size, 1), generator=random, device=device).double()
    expected = left.double() @ (right.double() @ vector)
    return statistics.median(seconds) if torch.equal(product.double() @ vector, expected) else None


def signs(size: int, random: torch.Generator, device: torch.device) -> torch.Tensor:
    """A matrix of 1 and -1."""
    return torch.randint(0, 2, (size, size), generator=random, device=device).float() * 2 - 1


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet(options: argparse.Namespace, device: torch.device) -> None:
    """Joins the processes that come in time, and reduces with them. Process 0 keeps the list of those who came."""
    leads = options.rank == 0
    patience = datetime.timedelta(seconds=options.patience_seconds)
    store = dist.TCPStore(options.address, options.port, None, leads, timeout=patience, wait_for_workers=False)
    store.set(f"arrived/{options.rank}", "1")
    store.add("arrived", 1)
    if leads:
        store.set("members", json.dumps(arrivals(store, options.world_size, options.patience_seconds)))
    store.wait(["members"], 2 * patience)  # the list is kept open so long, counted from process 0's own arrival
    members = json.loads(store.get("members"))
    if options.rank not in members:
        return
    say(stage="joined")
    backend = "nccl" if options.kind == "gpu" else "gloo"
    group = dist.PrefixStore("reduce", store)
    rank, size = members.index(options.rank), len(members)
    dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=patience)
    ones = torch.ones(REDUCED_ELEMENTS_ON_GPU if device.type == "cuda" else REDUCED_ELEMENTS_ON_CPU, device=device)
    dist.all_reduce(ones)
    wait(device)
    if bool((ones == size).all()):
        say(stage="reduced")
    store.add("done", 1)
    end = time.monotonic() + options.patience_seconds
    while leads and store.add("done", 0) < size and time.monotonic() < end:  # its store goes when it goes
        time.sleep(0.1)


def arrivals(store: dist.Store, world_size: int, seconds: float) -> list[int]:
    """The processes that came before all had, or before the time was over."""
    end = time.monotonic() + seconds
    while store.add("arrived", 0) < world_size and time.monotonic() < end:
        time.sleep(0.1)
    return [rank for rank in range(world_size) if store.check([f"arrived/{rank}"])]


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def leave() -> NoReturn:
    """Not through the interpreter's own end, which may wait for others."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=["gpu", "cpu"], required=True)
    parser.add_argument("--devices", type=int, required=True, help="of this node")
    parser.add_argument("--local-rank", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--address", required=True, help="where process 0 listens")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--patience-seconds", type=float, default=60.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
