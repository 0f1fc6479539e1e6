"""A checkpoint of Megatron's own that a training starts from: whether it is there, and whether it holds the recipe's
model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.findings import Finding, doubtful, first_bytes, folder_entries
from llmlaunch.frameworks.checkpoints import MEGATRON_TRACKER
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.foreign_values import is_whole_number

KEY: KeyPath = ("training", "start_from")
ITERATION = re.compile(r"iter_\d{7}")


def weights_problem(folder: Path) -> str | None:
    """Return why Megatron-LM finds no checkpoint in the folder (read_metadata, training/checkpointing.py, 0.19)."""
    tracker = folder / MEGATRON_TRACKER
    if not tracker.exists():
        if ITERATION.fullmatch(folder.name):
            return f"{folder} is one iteration; name the folder above it, which holds {MEGATRON_TRACKER}"
        if (folder / "config.json").exists():
            return (
                f"{folder} is a Hugging Face checkpoint, and Megatron-LM reads its own; convert it first "
                "(tools/checkpoint of Megatron-LM, or Megatron Bridge)"
            )
        return (
            f"{folder} has no {MEGATRON_TRACKER}, so Megatron-LM would find no checkpoint there; name the folder that "
            "has it"
        )
    text = _text_of(tracker)
    if text != "release" and not is_whole_number(text):
        return f"{tracker} holds {text[:20]!r} instead of an iteration or the word release; write which one to load"
    named = _named_by(tracker)
    if folder_entries(named):
        return None
    others = [entry.name for entry in folder_entries(folder) if ITERATION.fullmatch(entry.name)]
    there = f" (there are {', '.join(others[-3:])})" if others else ""
    return f"{tracker} names {named.name}, which is missing or empty{there}; write one that is whole into it"


def other_model(recipe: Recipe, layout: Layout, folder: Path) -> Iterator[Finding]:
    """Yield that a checkpoint of Megatron's own holds another model, as far as its files say."""
    from llmlaunch.frameworks.megatron.checkpoint_match import differing_sizes, saved_job

    named = _named_by(folder / MEGATRON_TRACKER)
    saved = saved_job(recipe, named, [entry.name for entry in folder_entries(named)])
    differing = "" if saved is None else differing_sizes(recipe, layout, saved.sizes)
    if differing:
        yield doubtful(
            KEY, f"{named} is another model than the recipe's: {differing}; name the checkpoint of this model"
        )


def _named_by(tracker: Path) -> Path:
    """Return the folder of the iteration that a tracker names."""
    text = _text_of(tracker)
    return tracker.parent / ("release" if text == "release" else f"iter_{int(text):07d}")


def _text_of(tracker: Path) -> str:
    return (first_bytes(tracker, 64) or b"").decode("utf-8", "replace").strip()
