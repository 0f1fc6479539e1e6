"""Cases for trainer_cases.py, made of our own rendering."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from llmlaunch.assets import asset
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe

PROGRAM = Path(__file__).with_name("trainer_cases.py")
TINY = (
    "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, num_query_groups: 2, "
    "vocab_size: 256}",
    "training.sequence_length=64",
    "training.global_batch_size=8",
    "training.steps=4",
    "training.warmup_steps=0",
    "training.learning_rate=0.01",
)


@dataclass(frozen=True)
class TrainerRun:
    """What became of one case. `norms` are of all gradients, None at ZeRO 0 in fp32; `weights` are bytes rank 0 held in
    each step of a weighed case."""

    codes: list[int]
    losses: list[float]
    norms: list[float | None]
    kept: list[str]
    said: str
    weights: list[dict[str, int]]


def case(
    name: str, layout: Layout, *overrides: str, words: tuple[str, ...] = (), model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A rendered job. `model` is a Hugging Face configuration in place of the rendered one; `words` are added."""
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), (*TINY, *overrides))
    return as_case(name, DeepSpeed().render(recipe, layout), layout.world_size, words, model)


def as_case(
    name: str, rendered: Rendered, ranks: int, words: tuple[str, ...] = (), model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a backend rendered, on so many ranks."""
    said = [f"FOLDER{word.suffix}" if isinstance(word, NodeVariable) else word for word in rendered.program]
    files = {path: content.decode() for path, content in rendered.files.items() if path.endswith(".json")}
    if model is not None:
        files["trainer/model.json"] = json.dumps(model)
    return {"name": name, "ranks": ranks, "files": files, "words": [*said[1:], *words]}


TrainerRuns = dict[str, TrainerRun]
Train = Callable[[list[dict[str, Any]], Path], TrainerRuns]


@contextmanager
def trainer_process(errors: Path) -> Iterator[Train]:
    """The trainer with its libraries imported: runs every case of a list in its own folder below the one given."""
    environment = {
        **os.environ,
        **{"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(errors.with_name("datasets"))},
    }
    with (
        errors.open("w") as file,
        Popen([sys.executable, PROGRAM], stdin=PIPE, stdout=PIPE, stderr=file, text=True, env=environment) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        into, lines = process.stdin, iter(process.stdout)

        def train(cases: list[dict[str, Any]], folder: Path) -> TrainerRuns:
            print(json.dumps({"folder": str(folder), "cases": cases}), file=into, flush=True)
            answer = next((line for line in lines if line.startswith("RESULT ")), None)
            assert answer is not None, errors.read_text()[-3000:]
            return {name: ran(result) for name, result in json.loads(answer.removeprefix("RESULT ")).items()}

        yield train
        into.close()


def ran(result: dict[str, Any]) -> TrainerRun:
    steps = result["steps"]
    weights = [step["weight"] for step in steps if step["weight"]]
    losses, norms = [step["loss"] for step in steps], [step["norm"] for step in steps]
    return TrainerRun(result["codes"], losses, norms, result["kept"], result["said"], weights)
