"""Whether a checkpoint of DeepSpeed matches the job that would go on from it, by the names of its files and the shapes
in it.

Names are those of runtime/engine.py _get_ckpt_name and _get_rank_zero_ckpt_name, runtime/pipe/module.py ckpt_layer_path
and checkpoint/ds_to_universal.py, DeepSpeed 0.19.8. What loads is decided by our script (trainers/deepspeed/
checkpoints.py), which has DeepSpeed convert the states of another number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from llmlaunch.findings import Finding, doubtful, missing, note
from llmlaunch.frameworks.checkpoints import KEY, NEW_FOLDER
from llmlaunch.frameworks.pickle_outline import Outline, first_pickle
from llmlaunch.frameworks.resharding import other_world_refusal
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

SHARDED_STAGE = 3
UNIVERSAL_FOLDER = "zero"
ZERO_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
WHOLE_MODEL = re.compile(r"mp_rank_(\d{1,6})_model_states\.pt")
SHARDED_MODEL = re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
PIPELINE_LAYER = re.compile(r"layer_\d{1,6}-model_\d{1,6}-model_states\.pt")
# Names of Hugging Face's decoders.
LAYER = re.compile(r"(?:model|transformer|gpt_neox)\.(?:layers|h)\.(\d{1,6})\.")
EMBEDDING = re.compile(r"(?:model|transformer|gpt_neox)\.(?:embed_tokens|wte|embed_in)\.weight")
MOST_PARAMETERS = 100_000


def deepspeed_findings(recipe: Recipe, layout: Layout, folder: Path, names: Collection[str]) -> Iterator[Finding]:
    """Yield what the shipped script would make of the checkpoint in `folder`, whose entries are `names`."""
    ranks = _ranks(ZERO_STATES, names)
    models = _ranks(WHOLE_MODEL, names) or _ranks(SHARDED_MODEL, names)
    laid_out = _other_structure(layout, folder, names, bool(ranks))
    if laid_out is not None:
        yield laid_out
        return
    model = _other_shapes(recipe, layout, folder, names)
    if model is not None:
        yield model
        return
    tensor = 1 + max((rank[-1] for rank in ranks or models), default=0)
    saved_by = tensor * (1 + max((rank[0] for rank in ranks), default=0))
    converts = bool(ranks) and saved_by != recipe.world_size and layout.tensor == 1
    if models and tensor != layout.tensor and not converts:
        yield doubtful(
            KEY,
            f"{folder} is cut by tensor {tensor}, and this plan by tensor {layout.tensor}, which loads no other parts; "
            f"pin layout.tensor: {tensor} and keep the number of devices, or {NEW_FOLDER}",
        )
    elif ranks:
        yield from _other_ranks(recipe, layout, folder, saved_by)


def _ranks(pattern: re.Pattern[str], names: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the numbers in the names that match: the data parallel rank, where there is one, and the tensor rank."""
    return [tuple(map(int, match.groups())) for match in map(pattern.fullmatch, names) if match is not None]


def _other_structure(layout: Layout, folder: Path, names: Collection[str], has_states: bool) -> Finding | None:
    """Return that the files of a checkpoint are not those that the job looks for: of a pipeline's layers, converted,
    with or without ZeRO, or of another kind of stage. Stages 1 and 2 load each other's (tried with DeepSpeed 0.19.8).
    """
    if any(PIPELINE_LAYER.fullmatch(name) for name in names):
        return doubtful(
            KEY,
            f"{folder} holds the layers of a pipeline, each in a file, and the shipped script has none; train it with "
            f"the script that saved it (backend.script), or {NEW_FOLDER}",
        )
    if UNIVERSAL_FOLDER in names and not has_states:
        return doubtful(
            KEY,
            f"{folder} is a universal checkpoint (ds_to_universal), and the shipped script converts for itself: write "
            f"into {folder.parent / 'latest'} the name of the checkpoint it was made from, or {NEW_FOLDER}",
        )
    sharded = any(SHARDED_MODEL.fullmatch(name) for name in names)
    whole = any(WHOLE_MODEL.fullmatch(name) for name in names)
    if whole and not sharded and not has_states and layout.zero_stage > 0:
        return doubtful(
            KEY,
            f"{folder} holds no optimizer states of ZeRO, and this plan has stage {layout.zero_stage}, which cannot go "
            f"on without; pin layout.zero_stage: 0, or {NEW_FOLDER}",
        )
    if has_states and not sharded and layout.zero_stage == 0:
        return doubtful(
            KEY,
            f"{folder} holds optimizer states of ZeRO, and this plan is without, which cannot load them; pin "
            f"layout.zero_stage: 1, or {NEW_FOLDER}",
        )
    if sharded == whole or sharded == (layout.zero_stage == SHARDED_STAGE):
        return None
    stage = "stage 3 of ZeRO" if sharded else "a stage of ZeRO below 3"
    pin = "layout.zero_stage: 3" if sharded else "layout.zero_stage: 2"
    return doubtful(
        KEY,
        f"{folder} was saved by {stage}, and this plan has stage {layout.zero_stage}, which looks for other "
        f"files; pin {pin}, or {NEW_FOLDER}",
    )


def _other_ranks(recipe: Recipe, layout: Layout, folder: Path, ranks: int) -> Iterator[Finding]:
    """Yield that ZeRO's states are of another number of ranks. DeepSpeed refuses them (_load_zero_checkpoint, runtime/
    engine.py, 0.19.8), so the shipped script has them converted where it can."""
    if ranks == recipe.world_size:
        return
    text = f"{folder} holds the optimizer states of {ranks} ranks, and this job has {recipe.world_size}"
    refusal = other_world_refusal(recipe, layout)
    if refusal:
        yield missing(KEY, f"{text}: {refusal.partition(';')[0]}; keep the number of devices, or {NEW_FOLDER}")
    else:
        yield note(KEY, f"{text}: the job converts them first")


def _other_shapes(recipe: Recipe, layout: Layout, folder: Path, names: Collection[str]) -> Finding | None:
    """Return that a checkpoint holds another model: DeepSpeed loads its weights strictly (load_module_state_dict,
    runtime/engine.py, 0.19.8). Parts of tensors and frozen weights are not judged."""
    techniques = recipe.techniques
    if layout.tensor > 1 or techniques.adapters is not None or techniques.trained_layers is not None:
        return None
    file = next((name for name in sorted(names) if WHOLE_MODEL.fullmatch(name) or SHARDED_MODEL.fullmatch(name)), None)
    saved = first_pickle(folder / file) if file is not None else None
    if not isinstance(saved, dict) or saved.get("mp_world_size", 1) != 1:
        return None
    shapes = _shapes(saved)
    layers = [int(match[1]) for match in map(LAYER.match, shapes) if match is not None]
    tables = [shape for name, shape in shapes.items() if EMBEDDING.fullmatch(name) and len(shape) == 2]
    theirs = {"num_layers": 1 + max(layers)} if layers else {}
    if len(tables) == 1:
        theirs |= {"vocab_size": tables[0][0], "hidden_size": tables[0][1]}
    ours = {name: getattr(recipe.model, name) for name in theirs}
    differing = [f"{name} is {theirs[name]} there and {ours[name]} in the recipe" for name in theirs]
    differing = [text for name, text in zip(theirs, differing, strict=True) if theirs[name] != ours[name]]
    if not differing:
        return None
    return doubtful(KEY, f"{folder} is another model than the recipe's: {'; '.join(differing)}; {NEW_FOLDER}")


def _shapes(saved: dict[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter: as ZeRO lists them, else those of the weights that are there."""
    groups = saved.get("param_shapes")
    shapes: dict[str, tuple[int, ...]] = {}
    for group in groups if isinstance(groups, list) and groups else [saved.get("module")]:
        items = group.items if isinstance(group, Outline) else group
        if not isinstance(items, dict) or len(items) > MOST_PARAMETERS:
            return {}
        for name, value in items.items():
            shape = _shape_of(value)
            if isinstance(name, str) and shape is not None:
                shapes[name] = shape
    return shapes


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the sizes in the outline of a torch.Size or of a tensor, else None."""
    if not isinstance(value, Outline) or not isinstance(value.arguments, tuple):
        return None
    position = {"torch.Size": 0, "torch._utils._rebuild_tensor_v2": 2}.get(value.name)
    if position is None or len(value.arguments) <= position:
        return None
    sizes = value.arguments[position]
    return sizes if isinstance(sizes, tuple) and all(type(size) is int for size in sizes) else None
