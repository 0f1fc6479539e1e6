"""Whether the checkpoint that a job would go on from matches the job.

Only what the files show is reported. A folder that cannot be read, is very large, or is laid out in an unknown way
yields nothing. A script of the person's own may load what it likes, so only the size of the checkpoint is judged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from llmlaunch.findings import MOST_ENTRIES, NOTE, Finding, doubtful, folder_entries
from llmlaunch.frameworks.checkpoints import KEY, NEW_FOLDER, checkpoint_bytes
from llmlaunch.frameworks.registry import framework_of
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.units import gib

# A checkpoint so many times smaller or larger than the model's is none of it, whatever its number formats.
OTHER_MODEL = 4.0
MOST_WEIGHED_FILES = 5_000


def mismatch_findings(recipe: Recipe, layout: Layout, folder: Path) -> Iterator[Finding]:
    """Yield why a job of this layout cannot load the checkpoint in `folder`, or would load something else with it."""
    names = [entry.name for entry in folder_entries(folder)]
    if not names or len(names) >= MOST_ENTRIES:
        return
    findings: list[Finding] = []
    if recipe.backend.script is None:
        findings = list(framework_of(recipe).checkpoint_findings(recipe, layout, folder, names))
    yield from findings
    if all(finding.kind == NOTE for finding in findings):
        yield from _other_size(recipe, folder)


def _other_size(recipe: Recipe, folder: Path) -> Iterator[Finding]:
    """Yield that a checkpoint is much larger or smaller than the model's. The files of a very large one are not all
    weighed."""
    if recipe.techniques.adapters is not None or recipe.techniques.trained_layers is not None:
        return
    size, count, whole = 0, 0, checkpoint_bytes(recipe)
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                size += (Path(parent) / file).stat().st_size
            except OSError:
                return
        count += len(files)
        if size > OTHER_MODEL * whole:
            break
        if count > MOST_WEIGHED_FILES:
            return
    if not whole / OTHER_MODEL <= size <= OTHER_MODEL * whole:
        more = "more than " if size > OTHER_MODEL * whole else ""
        yield doubtful(
            KEY,
            f"{folder} has {more}{gib(size)} GiB, and a checkpoint of {recipe.model.name} about {gib(whole)}: it may "
            f"be another model's; {NEW_FOLDER}",
        )
