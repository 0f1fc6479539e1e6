"""Plans the trainings of framework_steps.py for one GPU and writes framework_runs.json, which is committed: the machine
with the GPU needs nothing of llmlaunch's own requirements then, and what was predicted is written before anything runs.

    .venv/bin/python benchmarks/gpu/plan_framework_runs.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from llmlaunch.app.planned_run import plan
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.rendering.run_json import measurement_template

PLANNED = Path(__file__).with_name("framework_runs.json")
COMMON = """
schema: 1
name: gpu-steps
cluster: {base: h100-80gb-x8, devices_per_node: 1}
nodes: 1
data: {mock: true}
memory: {limit: 0.95}
"""
LLAMA_1B = "model: {base: llama3.2-1b, num_layers: 8}\n"
LLAMA_8B = "model: {base: llama3-8b, num_layers: 4}\n"
BACKENDS = {"deepspeed": "backend: deepspeed\n" + LLAMA_1B, "megatron-lm": "backend: megatron-lm\n" + LLAMA_8B}
TRAINING = "training: {sequence_length: 4096, global_batch_size: 2, steps: 4, precision: bf16"
LAYOUTS = {
    "deepspeed": {
        "ZeRO 0": "layout: {micro_batch_size: 1, zero_stage: 0, recompute: none}",
        "ZeRO 1": "layout: {micro_batch_size: 1, zero_stage: 1, recompute: none}",
        "ZeRO 2, two sequences": "layout: {micro_batch_size: 2, zero_stage: 2, recompute: none}",
        "ZeRO 3": "layout: {micro_batch_size: 1, zero_stage: 3, recompute: none}",
        "ZeRO 3, recomputed": "layout: {micro_batch_size: 2, zero_stage: 3, recompute: full}",
    },
    "megatron-lm": {
        "plain": "layout: {micro_batch_size: 1, recompute: none}",
        "core attention recomputed": "layout: {micro_batch_size: 2, recompute: selective}",
        "recomputed": "layout: {micro_batch_size: 2, recompute: full}",
    },
}


def planned(backend: str, layout: str) -> dict[str, Any]:
    """Plan one training; the trainer's own files are copied from the checkout where it runs."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(f"{COMMON}{BACKENDS[backend]}{TRAINING}}}\n{layout}\n")
        run = plan(recipe)
    worst = run.plan.estimate.worst
    return {
        "program": [_word(word) for word in run.rendered.program],
        "environment": {name: _word(value) for name, value in run.rendered.environment.items()},
        "files": {name: text.decode() for name, text in run.rendered.files.items() if not name.endswith(".py")},
        "predicted_bytes": {kind: getattr(worst, f"{kind}_bytes") for kind in ("allocated", "reserved", "device")},
        "run": measurement_template(run.recipe, run.plan),
    }


def _word(word: str | NodeVariable) -> str:
    """A variable of the run directory as `framework_steps.py` fills it in."""
    return "{" + word.name + "}" + word.suffix if isinstance(word, NodeVariable) else word


def main() -> None:
    runs = {
        backend: {name: planned(backend, layout) for name, layout in layouts.items()}
        for backend, layouts in LAYOUTS.items()
    }
    PLANNED.write_text(json.dumps(runs, indent=1) + "\n")
    print(PLANNED)


if __name__ == "__main__":
    main()
