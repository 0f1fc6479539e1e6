"""Measures the bandwidth between every two nodes: started by torchrun, one process for each device.

It stands alone: Python >= 3.9 and torch, nothing of llmlaunch. `llmlaunch doctor --network` starts it:

    torchrun --nnodes 4 --nproc_per_node 8 ... network_bandwidth.py

Nodes are paired so that every two meet once and no node is in two pairs at a time (n - 1 rounds, a round-robin
tournament). In each round one node of a pair sends and the other answers with a few bytes, all devices of a node at
once, each with its like; then the other way round. Of the repeats the median counts, of a node's devices the slowest.
Rank 0 prints one line, `{"nodes": [...], "bytes_per_second": [[...]], "backend", "message_bytes", "repeats",
"devices_per_node"}`; row: sender, the diagonal is 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=10)


def tournament(players: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every two of 0 .. players - 1 meet once (circle method: one stays, the others
    move on by one place). With an odd number one rests in each round."""
    circle: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def main() -> None:
    options = arguments()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    devices = 1 if options.each_process_a_node else int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda" if on_gpu else "cpu")
    nodes = names(options, devices)
    dist.all_reduce(
        torch.zeros(1, device=device)
    )  # all of a group must meet once before any two may (batch_isend_irecv)
    table = measured(len(nodes), devices, device, options)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)  # seconds: the slowest device of a pair
    if dist.get_rank() == 0:
        tell(options, nodes, devices, table.tolist())
    dist.barrier()
    dist.destroy_process_group()


def names(options: argparse.Namespace, devices: int) -> list[str]:
    """The nodes by node rank, as SLURM calls them; processes by rank where each stands for a node."""
    own = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    if options.each_process_a_node:
        own = f"process{dist.get_rank()}"
    names_by_rank: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names_by_rank, own)
    return [str(name) for name in names_by_rank[::devices]]


def measured(nodes: int, devices: int, device: torch.device, options: argparse.Namespace) -> torch.Tensor:
    """(nodes, nodes) seconds of one message from row to column, where this rank sent it; 0 elsewhere."""
    rank = dist.get_rank()
    node, like = divmod(rank, devices)
    table = torch.zeros(nodes, nodes, dtype=torch.float64, device=device)
    message = torch.zeros(options.message_bytes, dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    for pairs in tournament(nodes):
        for pair in pairs:
            for sender, receiver in (pair, pair[::-1]):
                if node == sender:
                    seconds = send(message, answer, receiver * devices + like, options.repeats)
                    table[sender, receiver] = seconds
                elif node == receiver:
                    receive(message, answer, sender * devices + like, options.repeats)
        dist.barrier()
    return table


def send(message: torch.Tensor, answer: torch.Tensor, to: int, repeats: int) -> float:
    """Median seconds from the first byte sent to the answer that says the last one came. The first, which makes the
    connection, does not count."""
    seconds = []
    for _ in range(1 + repeats):
        synchronize(message)
        start = time.perf_counter()
        exchange(dist.P2POp(dist.isend, message, to))
        exchange(dist.P2POp(dist.irecv, answer, to))
        synchronize(message)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def receive(message: torch.Tensor, answer: torch.Tensor, sender: int, repeats: int) -> None:
    for _ in range(1 + repeats):
        exchange(dist.P2POp(dist.irecv, message, sender))
        exchange(dist.P2POp(dist.isend, answer, sender))


def exchange(operation: dist.P2POp) -> None:
    """As a batch: alone, NCCL would make a communicator for each pair (ProcessGroupNCCL, torch 2.13)."""
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def tell(options: argparse.Namespace, nodes: list[str], devices: int, seconds: list[list[float]]) -> None:
    answer = {
        "nodes": nodes,
        "bytes_per_second": [[float(f"{options.message_bytes / s:.6g}") if s else 0.0 for s in row] for row in seconds],
        "backend": dist.get_backend(),
        "message_bytes": options.message_bytes,
        "repeats": options.repeats,
        "devices_per_node": devices,
    }
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--message-bytes", type=int, default=64 * 2**20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--each-process-a-node", action="store_true", help="to try it on one machine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
