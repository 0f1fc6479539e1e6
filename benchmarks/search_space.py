"""The whole search: points a second on one core, the whole command's time and memory, growth with the cluster.

    python benchmarks/search_space.py [ROUNDS]

A point is one legal layout with one set of words (recompute, offload, gradients), priced exactly: the worst pipeline
rank's device bytes, a node's host bytes and the step time. "The grid" is the part of the search that prices every point
of even stages; the rest solves uneven stages for the few that can still be among the first. Beside them stands
Megatron's own report formula, re-stated in plain Python as Megatron has it (megatron/training/
theoretical_memory_usage.py), which knows the first stage's weights, optimizer and activations and no time. Bars:
1,000,000 points a second; a check of recipes/llama3-70b.yaml in one second and 1 GB, on 16,384 GPUs too; of mixtures
with everything open in 3 seconds and 1 GB; less than linear growth. The whole space is `search(..., whole=True)`, which
prices every legal layout with even stages; a check prices what can be among the first.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llmlaunch.frameworks.framework import backend_for  # noqa: E402
from llmlaunch.planner.search import SearchResult, search  # noqa: E402
from llmlaunch.planner.setting import Setting, setting_of  # noqa: E402
from llmlaunch.recipe.load import load_recipe  # noqa: E402
from llmlaunch.recipe.types import Recipe  # noqa: E402
from validation.anchors import ReferenceJob as Theory  # noqa: E402
from validation.anchors import megatron_theory  # noqa: E402

RECIPES = ("llama3-70b", "llama3-8b", "mixtral-8x7b")
NODES = (1, 4, 16, 64, 256, 1024, 2048)  # of eight devices
SCALAR_LAYOUTS = 20_000
TRILLION = (
    "{base: deepseek-v3, moe: {num_experts: 384, topk: 8, ffn_hidden_size: 2048, shared_expert_ffn_hidden_size: 2048}}"
)
COMMANDS: tuple[tuple[str, Sequence[str], float], ...] = (
    ("llama3-70b, 512 GPUs", ("recipes/llama3-70b.yaml",), 1.0),
    ("llama3-70b, 16,384 GPUs", ("recipes/llama3-70b.yaml", "nodes=2048", "training.global_batch_size=16384"), 1.0),
    ("deepseek-v3, all open", ("recipes/deepseek-v3.yaml", "layout=auto"), 3.0),
    ("a trillion parameters, all open", ("recipes/deepseek-v3.yaml", "layout=auto", f"model={TRILLION}"), 3.0),
    ("llama3-70b, 10,000 layers", ("recipes/llama3-70b.yaml", "model.num_layers=10000"), 3.0),
)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    for name in RECIPES:
        points_per_second(name, rounds)
    beside_the_scalar_formula(rounds)
    for title, arguments, bar_seconds in COMMANDS:
        whole_command(title, arguments, bar_seconds)
    growth(rounds)


def prepared(recipe: Recipe) -> Setting:
    return setting_of(recipe, backend_for(recipe))


def searched(setting: Setting, rounds: int) -> tuple[SearchResult, float]:
    """The result of the whole space and the median of process seconds, the first search left out."""
    found = search(setting, whole=True)
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        found = search(setting, whole=True)
        seconds.append(time.process_time() - start)
    return found, statistics.median(seconds)


def points_per_second(name: str, rounds: int) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    even = searched(prepared(replace(recipe, layers_by_stage=())), rounds)
    whole = searched(prepared(recipe), rounds)
    for part, (found, seconds) in (("the grid", even), ("all", whole)):
        print(
            f"{name}, {part}: {found.searched:,} layouts searched, {len(found.points):,} priced, in {seconds:.3f} "
            f"s: {len(found.points) / seconds:,.0f} priced and {found.searched / seconds:,.0f} searched a second"
        )


def beside_the_scalar_formula(rounds: int) -> None:
    """The same layouts, in turn with the search, so that both meet the same machine."""
    recipe = load_recipe(ROOT / "recipes" / "llama3-70b.yaml")
    setting = prepared(recipe)
    found = search(setting, whole=True)
    length = recipe.workload.sequence_length
    layouts = [found.points.layout(i) for i in range(0, len(found.points), max(len(found.points) // SCALAR_LAYOUTS, 1))]
    theories = [
        Theory(recipe.model, layout, length, layout.num_microbatches(recipe.workload.global_batch_size))
        for layout in layouts
    ]
    ratios = []
    for _ in range(rounds):
        start = time.process_time()
        for theory in theories:
            megatron_theory(theory)
        scalar = (time.process_time() - start) / len(theories)
        _, seconds = searched(setting, 1)
        ratios.append(scalar / (seconds / len(found.points)))
    print(
        f"Megatron's report formula, plain Python: {statistics.median(ratios):.1f} times the seconds of a priced point"
    )


# Linux counts the resident memory of a forked parent as its child's, so what starts a command is a fresh interpreter.
MEASURED = """
import json, os, sys
null = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)]
process = os.posix_spawn(sys.argv[1], sys.argv[1:], dict(os.environ), file_actions=null)
_, status, used = os.wait4(process, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
"""


def whole_command(title: str, arguments: Sequence[str], bar_seconds: float) -> None:
    """A process of its own, imports and all; exit code 3 says that nothing is safe."""
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, "-m", "llmlaunch", "check", *arguments]
        environment = {"XDG_DATA_HOME": empty, "PATH": "/usr/bin:/bin"}
        start = time.perf_counter()
        measured = subprocess.run(
            [sys.executable, "-c", MEASURED, *command], stdout=subprocess.PIPE, cwd=ROOT, env=environment, check=True
        )
        seconds = time.perf_counter() - start
    code, processor, most = json.loads(measured.stdout)
    print(
        f"{title}: {seconds:.2f} s, {processor:.2f} s of the processor and {most / 1e6:.0f} MB, imports included, exit "
        f"code {code}; bar: {bar_seconds:g} s, 1 GB"
    )


def growth(rounds: int) -> None:
    """Llama 3 70B with 16 sequences a step for every device, from one node to 2048."""
    recipe = load_recipe(ROOT / "recipes" / "llama3-70b.yaml")
    first = None
    for nodes in NODES:
        training = replace(recipe.training, global_batch_size=max(16 * nodes, 1024))
        sized = replace(recipe, nodes=nodes, training=training)
        found, seconds = searched(prepared(sized), max(rounds // 2, 1))
        first = first or (nodes, seconds)
        print(
            f"  {8 * nodes:>6,} devices: {found.searched:>9,} searched, {len(found.points):>8,} priced, "
            f"{seconds:.3f} s, {seconds / first[1]:.1f} x the first for {nodes / first[0]:.0f} x the devices"
        )


if __name__ == "__main__":
    main()
