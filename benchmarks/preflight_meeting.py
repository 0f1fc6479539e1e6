"""How many connections the job's store gets in a preflight of 2,000 nodes of 8 GPUs, counted in /proc/net/tcp.

A thread stands for the process of a node that speaks with the job's store: the preflight's own code and a real TCPStore
of torch, all in this process. The stores of the nodes, which 2,000 machines would hold, are one here. The other seven
processes of each node meet at its own store (tests/unit/node/test_preflight.py starts such nodes whole).

    python benchmarks/preflight_meeting.py [NODES]
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "wrapper" / "llmlaunch" / "trainers")]

import preflight  # noqa: E402

DEVICES, PORT, PATIENCE_SECONDS = 8, 29777, 300.0
ESTABLISHED = "01"


def main() -> None:
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connect, own = preflight.store_at, preflight.store_at(options(0, nodes), "127.0.0.1", 0, True)
    preflight.store_at = lambda of, address, port, hosts: own if port == 0 else connect(of, address, port, hosts)
    jobs: list[preflight.JobStores] = []
    answers: list[object] = []

    def meet(node: int) -> None:
        jobs.append(preflight.JobStores(options(node, nodes)))
        answers.append(jobs[-1].others())

    began = time.monotonic()
    threading.Thread(target=preflight.collect, args=(options(0, nodes),), daemon=True).start()
    threads = [threading.Thread(target=meet, args=(node,), daemon=True) for node in range(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connections = established(PORT)
    print(
        f"{nodes * DEVICES:,} ranks: {len(answers):,} of {nodes:,} nodes met in {time.monotonic() - began:.0f} s over "
        f"{connections:,} connections, one of them the store's own"
    )
    sys.stdout.flush()
    os._exit(len(answers) != nodes or connections > nodes + 1)


def options(node: int, nodes: int) -> Namespace:
    meeting = {"address": "127.0.0.1", "port": PORT, "patience_seconds": PATIENCE_SECONDS}
    return Namespace(node_rank=node, nodes=nodes, devices=DEVICES, local_rank=0, **meeting)


def established(port: int) -> int:
    """Connections of this machine that end at the port."""
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return sum(int(line[1].rpartition(":")[2], 16) == port and line[3] == ESTABLISHED for line in lines)


if __name__ == "__main__":
    main()
