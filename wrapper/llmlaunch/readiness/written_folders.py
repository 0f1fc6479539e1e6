"""The folders a job writes into: whether they are there or can be made, and whether this person may write there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.findings import Finding, doubtful, host_path, missing, path_state, unseen
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

EXPORTED = "trained.json"  # in what the DeepSpeed trainer exports
# Folders below the root, and below /mnt, that are a node's own by convention.
OWN_DISK = re.compile(
    r"/(?:tmp|var/tmp|dev/shm|run|(?:mnt/)?(?:local(?:[-_]?(?:scratch|ssd|nvme|disk|tmp))?|scratch[-_]local|nvme\d*|ssd\d*|raid\d*))"
    r"(?=/|$)"
)


def folder_findings(recipe: Recipe, _: Layout, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what keeps the job from writing where the recipe says."""
    for key, path in written_folders(recipe):
        found = folder_finding(recipe, key, path)
        if found is not None:
            yield found
    yield from _earlier_export(recipe)
    yield from _slurm_output(recipe)
    yield from _index_cache(recipe)
    yield from _own_disks(recipe)


def _own_disks(recipe: Recipe) -> Iterator[Finding]:
    """Yield the folders that all nodes of a job must share and that lie on a node's own disk.

    Every rank writes its part of a checkpoint and reads those of others when it comes back
    (megatron/training/checkpointing.py; deepspeed/runtime/engine.py load_checkpoint), and the indexes of samples are
    built by the first rank for all (core/datasets/gpt_dataset.py, core 0.19).
    """
    if (recipe.nodes or 1) < 2:
        return
    shared: dict[KeyPath, str | None] = {
        ("training", "checkpoint_path"): recipe.training.checkpoint_path,
        ("data", "cache_path"): recipe.data.cache_path,
    }
    for key, path in shared.items():
        place = None if path is None else host_path(recipe, path)
        if place is not None and (folder := _own_disk(place)) is not None:
            yield doubtful(
                key,
                f"{folder} is usually on each node's own disk, where the {recipe.nodes} nodes do not see each other's "
                "files; name a folder on a file system that all nodes share",
            )


def _own_disk(path: Path) -> str | None:
    """Return the folder above `path` that sites commonly have on every node's own disk or in its memory; None where
    there is none."""
    found = OWN_DISK.match(str(path))
    return None if found is None else found[0]


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
        (("training", "export"), None if training.export is None else training.export.path),
    ):
        if path is not None:
            yield key, path


def _packed_rows(recipe: Recipe) -> str | None:
    """Return where Megatron-Bridge writes rows that are packed (GPTSFTDatasetBuilder.default_pack_path,
    data/builders/gpt_sft.py, 0.6); None where it does not, or where some lie already, which may be all it wants."""
    folder = f"{recipe.data.path}/packed"
    packs = recipe.data.packed and recipe.backend.on_megatron_core
    return folder if packs and path_state(host_path(recipe, folder)) != "here" else None


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


def _earlier_export(recipe: Recipe) -> Iterator[Finding]:
    """The trainer replaces what it exported itself, and refuses any other folder (trainers/deepspeed/export.py)."""
    export = recipe.training.export
    if export is None:
        return
    place = host_path(recipe, export.path)
    if path_state(place) == "here" and path_state(place / EXPORTED) != "here":
        yield missing(
            ("training", "export"),
            f"{export.path} is there already, and is no export of an earlier run; name a new folder",
        )


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
