"""The order of the nodes: seconds between nodes of one step against SLURM's order and against simulated annealing.

Networks are generated: `uneven` has the statistics of Pipette's published measurements (each direction of each link
for itself, 16.2 to 19.8 GB/s), `switches` two levels (8 nodes under a switch at 20 GB/s, 10 between switches, 3 %
noise, the names mixed up). `--matrix PATH` adds a measured one: a file of `llmlaunch doctor --network`, or one of
Pipette's ({"0": {"gpus": [...], "bandwidth": [[MB/s]]}}).

Annealing follows Pipette's schedule: exchanges of two nodes, T0 = 1 (milliseconds), alpha = 0.999 at every step, the
best order ever seen; it stops where ten thousand steps bring nothing, or when it has had as long as asked for.

    python benchmarks/placement.py [--budget SECONDS] [--annealing SECONDS] [--seeds N] [--matrix PATH ...]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.cluster.matrix import read_matrix
from llmlaunch.placement.search import EXACT_NODES, place
from llmlaunch.placement.traffic import Sizes, Volumes, inverse, order_seconds, traffic

DEVICES = 8
Matrix = Sequence[Sequence[float]]

# bytes of one step of a 70B model in bf16, sequences of 8,192 tokens, tensor parallel over the eight devices of a node,
# eight micro-batches for every pipeline stage
PIPELINE_BYTES = 8 * 8192 * 8192 * 2 / DEVICES
STATE_BYTES = 70e9 / DEVICES * 6
PATIENCE = 10_000


@dataclass(frozen=True)
class Outcome:
    before: float
    ours: float
    annealed: float
    our_seconds: float
    annealing_seconds: float
    proved: bool


def main() -> None:
    options = arguments()
    print("| network | nodes | stages | ours / SLURM's | annealing / SLURM's | ours / annealing | ours, s | its s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, make in (("uneven", uneven), ("switches", switches)):
        for nodes, pipeline in ((EXACT_NODES, 4), (16, 4), (64, 8), (128, 16), (256, 16), (512, 16)):
            tell(
                name,
                nodes,
                pipeline,
                [run(make(nodes, seed), pipeline, seed, options) for seed in range(options.seeds)],
            )
    for path in options.matrix:
        for name, speeds in measured(path):
            nodes = len(speeds)
            for pipeline in (n for n in (2, 4, 8) if nodes % n == 0):
                tell(name, nodes, pipeline, [run(speeds, pipeline, seed, options) for seed in range(options.seeds)])


def run(speeds: Matrix, pipeline: int, seed: int, options: argparse.Namespace) -> Outcome:
    cost = inverse(speeds)
    nodes = len(cost)
    sizes = Sizes(tensor=DEVICES, pipeline=pipeline, data=nodes // pipeline)
    volumes = Volumes(PIPELINE_BYTES, (STATE_BYTES / pipeline,) * pipeline)
    terms = traffic(sizes, volumes, DEVICES)
    start = time.perf_counter()
    found = place(terms, cost, options.budget)
    middle = time.perf_counter()
    annealed = anneal(lambda order: order_seconds(terms, order, cost), nodes, seed, options.annealing)
    end = time.perf_counter()
    return Outcome(found.before_seconds, found.seconds, annealed, middle - start, end - middle, found.proved)


def anneal(seconds: Callable[[list[int]], float], nodes: int, seed: int, limit: float) -> float:
    chance = random.Random(seed)
    order = list(range(nodes))
    held = best = seconds(order)
    temperature, idle, end = 1.0, 0, time.perf_counter() + limit
    while idle < PATIENCE and time.perf_counter() < end:
        x, y = chance.sample(range(nodes), 2)
        order[x], order[y] = order[y], order[x]
        new = seconds(order)
        worse = 1e3 * (new - held)
        if worse <= 0 or chance.random() < math.exp(-worse / temperature):
            held = new
        else:
            order[x], order[y] = order[y], order[x]
        idle = 0 if held < best else idle + 1
        best = min(best, held)
        temperature = max(temperature * 0.999, 1e-12)
    return best


def uneven(nodes: int, seed: int) -> Matrix:
    chance = random.Random(seed)
    return [[0.0 if i == j else chance.uniform(16.2e9, 19.8e9) for j in range(nodes)] for i in range(nodes)]


def switches(nodes: int, seed: int) -> Matrix:
    chance = random.Random(seed)
    switch = [node // 8 for node in range(nodes)]
    chance.shuffle(switch)

    def speed(i: int, j: int) -> float:
        return 0.0 if i == j else (20e9 if switch[i] == switch[j] else 10e9) * chance.uniform(0.97, 1.03)

    return [[speed(i, j) for j in range(nodes)] for i in range(nodes)]


def measured(path: Path) -> Iterator[tuple[str, Matrix]]:
    """Every matrix of a file, in bytes per second."""
    whole = json.loads(path.read_text())
    if "schema" in whole:
        yield path.name, read_matrix(path).bytes_per_second
        return
    for key, one in whole.items():
        yield f"{path.name} {key}", [[speed * 1e6 for speed in row] for row in one["bandwidth"]]


def tell(name: str, nodes: int, pipeline: int, outcomes: list[Outcome]) -> None:
    def middle(of: Callable[[Outcome], float]) -> float:
        return statistics.median(of(outcome) for outcome in outcomes)

    ours = f"{middle(lambda o: o.ours / o.before):.3f}{' (proved)' if all(o.proved for o in outcomes) else ''}"
    worst = max(o.ours / o.annealed for o in outcomes)
    print(
        f"| {name} | {nodes} | {pipeline} | {ours} | {middle(lambda o: o.annealed / o.before):.3f} "
        f"| {middle(lambda o: o.ours / o.annealed):.3f} (worst {worst:.3f}) "
        f"| {middle(lambda o: o.our_seconds):.2f} | {middle(lambda o: o.annealing_seconds):.1f} |",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of ours, as at job start")
    parser.add_argument("--annealing", type=float, default=20.0, help="seconds of annealing at most")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--matrix", type=Path, action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
