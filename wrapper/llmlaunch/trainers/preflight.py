"""Tests one device before the training, and its connection to all others. `node.pyz preflight` starts one for each.

It stands alone: Python >= 3.9 and torch, nothing of llmlaunch. One JSON line on stdout for each stage it reached:

    {"stage": "devices"}    the node shows as many devices as were asked for
    {"stage": "matmul", "seconds": 0.0021}    a product came out right, and so long it took
    {"stage": "together"}   an all-reduce over the devices of this node came out right
    {"stage": "joined"}     this node met the others
    {"stage": "reduced"}    an all-reduce over the devices of this local rank on all nodes that met came out right

or {"bad": "why"} where this device is at fault. A process that comes no further than a stage prints nothing more.
Nodes that do not appear in time are left out, so that one cannot keep the others from trying.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import socket
import statistics
import sys
import threading
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
    """Reduces with the devices of this node, and with those of the same local rank on all nodes.

    The processes of a node meet at a store of their own, and one of them alone speaks with the job's: 2,000 nodes of 8
    GPUs are 2,000 connections, not 16,000. The stores of the local ranks lie on as many nodes as there are; so does
    rank 0 of each group, to which NCCL's bootstrap makes each of the others connect once. No process gets more
    connections than there are nodes.
    """
    patience = datetime.timedelta(seconds=options.patience_seconds)
    leads = options.local_rank == 0
    if leads and options.node_rank == 0:
        threading.Thread(target=collect, args=(options,), daemon=True).start()
    node = store_at(options, "127.0.0.1", options.node_port, leads)
    if not reduces(options, device, dist.PrefixStore("node", node), options.local_rank, options.devices):
        return
    say(stage="together")
    node.add("together", 1)
    job = JobStores(options) if leads else None
    if job is not None:
        node.set("others", json.dumps(job.others()))
    node.wait(["others"], 3 * patience)
    others = json.loads(node.get("others"))
    if options.node_rank not in others["nodes"]:
        return
    size = len(others["nodes"])
    address, port = others["stores"][options.local_rank % size]
    store = store_at(options, address, port, False)
    say(stage="joined")
    rank = (others["nodes"].index(options.node_rank) - options.local_rank) % size
    if not reduces(options, device, dist.PrefixStore(f"local rank {options.local_rank}", store), rank, size):
        return
    say(stage="reduced")
    with contextlib.suppress(RuntimeError):  # others need the stores and the memory of those who are done
        if node.add("reduced", 1) == options.devices:
            node.set("all reduced", "1")
        if job is not None:
            node.wait(["all reduced"], patience)
            job.wait_for_all(size)
            node.set("end", "1")
        node.wait(["end"], 2 * patience)


def collect(options: argparse.Namespace) -> None:
    """Keeps the job's store, and the list of the nodes that came before all had, or before the time was over."""
    store = store_at(options, options.address, options.port, True)
    end = time.monotonic() + options.patience_seconds
    while store.add("arrived", 0) < options.nodes and time.monotonic() < end:
        time.sleep(0.1)
    nodes = [node for node in range(options.nodes) if store.check([f"arrived/{node}"])]
    stores = [json.loads(store.get(f"arrived/{node}")) for node in nodes[: options.devices]]
    store.set("others", json.dumps({"nodes": nodes, "stores": stores}))
    threading.Event().wait()  # as long as this process


class JobStores:
    """A node's connection to the job's store, and a store at which one local rank of all nodes may meet."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._patience = datetime.timedelta(seconds=options.patience_seconds)
        self._job = store_at(options, options.address, options.port, False)
        self._own = store_at(options, "127.0.0.1", 0, True)

    def others(self) -> object:
        """Says that this node came; returns the `nodes` that did, and the `stores` of local ranks 0, 1, ... in turn."""
        node = self._options.node_rank
        address = self._options.address if node == 0 else own_address(self._options.address, self._options.port)
        self._job.set(f"arrived/{node}", json.dumps([address, self._own.port]))
        self._job.add("arrived", 1)
        self._job.wait(["others"], 2 * self._patience)  # the list is kept open so long
        return json.loads(self._job.get("others"))

    def wait_for_all(self, nodes: int) -> None:
        if self._job.add("reduced", 1) == nodes:
            self._job.set("all reduced", "1")
        self._job.wait(["all reduced"], self._patience)


def store_at(options: argparse.Namespace, address: str, port: int, hosts: bool) -> dist.TCPStore:
    patience = datetime.timedelta(seconds=options.patience_seconds)
    return dist.TCPStore(address, port, None, hosts, timeout=patience, wait_for_workers=False)


def own_address(other: str, port: int) -> str:
    """The address of this node by which it reaches another; nothing is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(other, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def reduces(options: argparse.Namespace, device: torch.device, store: dist.Store, rank: int, size: int) -> bool:
    """Whether an all-reduce over `size` processes that meet at the store comes out right. Each returns once all have
    finished it, and then it may end."""
    patience = datetime.timedelta(seconds=options.patience_seconds)
    backend = "nccl" if options.kind == "gpu" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    ones = torch.ones(REDUCED_ELEMENTS_ON_GPU if device.type == "cuda" else REDUCED_ELEMENTS_ON_CPU, device=device)
    dist.all_reduce(ones)
    wait(device)
    right = bool((ones == size).all())
    if store.add("finished", 1) == size:
        store.set("all finished", "1")
    store.wait(["all finished"], patience)
    dist.destroy_process_group()
    return right


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
    parser.add_argument("--node-port", type=int, required=True, help="where local rank 0 listens")
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True, help="that are tried together")
    parser.add_argument("--address", required=True, help="of node rank 0, where its local rank 0 listens")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--patience-seconds", type=float, default=60.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
