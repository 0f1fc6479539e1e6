"""The weights that a training starts from, `training.start_from`: of a Hugging Face folder, or the framework's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from llmlaunch.findings import (
    Finding,
    file_problem,
    host_path,
    missing,
    path_state,
    read_json,
    unseen,
)
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

KEY = ("training", "start_from")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# What a Hugging Face config.json calls the sizes of a model, and what a model shape does.
SIZES = {"hidden_size": "hidden_size", "num_hidden_layers": "num_layers", "vocab_size": "vocab_size"}


def weight_findings(recipe: Recipe, layout: Layout, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with the folder of `training.start_from`."""
    folder = host_path(recipe, str(recipe.training.start_from))
    state = path_state(folder)
    if state == "absent":
        yield missing(KEY, f"{folder} is not there; name what is, or make it first")
    elif state == "unseen":
        yield unseen(KEY, folder)
    elif not folder.is_dir():
        yield missing(KEY, f"{folder} is a file; name the folder that holds the checkpoint")
    else:
        framework = framework_of(recipe)
        own = framework.has_own_weights(folder)
        problem = framework.own_weights_problem(folder) if own else _hugging_face(recipe, folder)
        if problem is not None:
            yield missing(KEY, problem)
        elif own and recipe.backend.script is None:
            yield from framework.own_weights_findings(recipe, layout, folder)


def _hugging_face(recipe: Recipe, folder: Path) -> str | None:
    """Return what is missing of a Hugging Face checkpoint, or how its model differs from the recipe's."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        adapter = (folder / "adapter_config.json").exists()
        what = "the adapters of a model alone" if adapter else "no config.json that can be read"
        return f"{folder} holds {what}; name a Hugging Face checkpoint folder"
    for theirs, ours in SIZES.items():
        size = getattr(recipe.model, ours)
        if isinstance(config.get(theirs), int) and config[theirs] != size:
            return (
                f"{folder} is another model than the recipe's: {theirs} is {config[theirs]} there and {size} in "
                f"{recipe.model.name}; write model: {folder}, or name the checkpoint of this model"
            )
    files = _weight_files(folder)
    if not files:
        return f"{folder} holds no weights: none of {', '.join((*WEIGHTS, *INDEXES))}; fetch them (hf download)"
    for file in files:
        if not file.exists():
            return f"{folder} lacks {file.name}, which its index names; fetch it again (hf download)"
        problem = file_problem(file)
        if problem is not None:
            return f"{file} {problem}"
    return None


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights, as transformers looks for them; of an index, those it names."""
    for whole, index in zip(WEIGHTS, INDEXES, strict=True):
        if (folder / whole).exists():
            return [folder / whole]
        listed = read_json(folder / index)
        names = listed.get("weight_map") if isinstance(listed, dict) else None
        if isinstance(names, dict):
            return [folder / name for name in sorted({str(name) for name in names.values()})]
    return []
