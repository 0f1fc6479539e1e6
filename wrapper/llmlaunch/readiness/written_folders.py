"""The folders a job writes into: whether they are there or can be made, and whether this person may write there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.layout import Layout
from llmlaunch.readiness.findings import Finding, doubtful, host_path, missing, path_state, unseen
from llmlaunch.recipe.types import Recipe

__all__ = ["folder_finding", "folder_findings", "nearest_folder", "written_folders"]


def folder_findings(recipe: Recipe, _: Layout, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what keeps the job from writing where the recipe says."""
    for key, path in written_folders(recipe):
        found = folder_finding(recipe, key, path)
        if found is not None:
            yield found
    yield from _slurm_output(recipe)
    yield from _index_cache(recipe)


def written_folders(recipe: Recipe) -> Iterator[tuple[KeyPath, str]]:
    """Yield the folders the job makes where they are not there, by the keys that name them."""
    training, tracking = recipe.training, recipe.tracking
    for key, path in (
        (("training", "checkpoint_path"), training.checkpoint_path),
        (("training", "tensorboard"), training.tensorboard),
        (("tracking", "tensorboard"), tracking.tensorboard),
        (("tracking", "wandb", "save_dir"), None if tracking.wandb is None else tracking.wandb.save_dir),
        (("data", "cache_path"), recipe.data.cache_path),
        (("data", "packed"), _packed_rows(recipe)),
    ):
        if path is not None:
            yield key, path


def _packed_rows(recipe: Recipe) -> str | None:
    """Return where Megatron-Bridge writes rows that are packed (GPTSFTDatasetBuilder.default_pack_path,
    data/builders/gpt_sft.py, 0.6); None where it does not, or where some lie already, which may be all it wants."""
    folder = f"{recipe.data.path}/packed"
    return folder if recipe.data.packed and path_state(host_path(recipe, folder)) != "here" else None


def folder_finding(recipe: Recipe, key: KeyPath, path: str) -> Finding | None:
    """Return why the job cannot write below `path`; None where it can."""
    place = host_path(recipe, path)
    if path_state(place) == "unseen":
        return unseen(key, path)
    nearest = nearest_folder(place)
    if not nearest.is_dir():
        return missing(key, f"{nearest} is a file, so no folder can be there; name another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        what = "you may not write into it" if nearest == place else f"you may not make it in {nearest}"
        return missing(key, f"{path}: {what}; name a folder of yours, or ask for permission")
    return None


def nearest_folder(path: Path) -> Path:
    """Return the path itself where it is there, else the nearest above it that is."""
    while path_state(path) != "here" and path != path.parent:
        path = path.parent
    return path


def _slurm_output(recipe: Recipe) -> Iterator[Finding]:
    """SLURM makes no folder for a job's output, and a job whose output cannot be opened dies without a word."""
    for option in ("output", "error"):
        name = recipe.slurm.get(option)
        folder = Path(name).parent if isinstance(name, str) else Path()
        if folder.is_absolute() and "%" not in str(folder) and path_state(folder) == "absent":
            yield missing(
                ("slurm", option),
                f"the folder {folder} is not there, and SLURM makes none: the job would end without a word; make it "
                f"(mkdir -p), or remove slurm.{option}: the run directory has the job's log",
            )


def _index_cache(recipe: Recipe) -> Iterator[Finding]:
    """Megatron-LM writes its indexes of samples below the dataset, unless it is told where
    (_build_document_sample_shuffle_indices, core/datasets/gpt_dataset.py, core 0.19)."""
    data = recipe.data
    if not recipe.backend.on_megatron_core or recipe.backend.script is not None or data.cache_path is not None:
        return
    for path in data.datasets:
        nearest = nearest_folder(host_path(recipe, f"{path}/cache"))
        if path_state(host_path(recipe, f"{path}.idx")) == "here" and not os.access(nearest, os.W_OK):
            yield doubtful(
                ("data",),
                f"Megatron-LM writes the indexes of its samples into {path}/cache, and you may not write there; name a "
                "folder of yours in data.cache_path",
            )
            return
