"""The folder of checkpoints: what it holds already, what a job would make of that, and the room that is left."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmlaunch.findings import (
    MOST_ENTRIES,
    NOTE,
    Finding,
    doubtful,
    first_bytes,
    folder_entries,
    host_path,
    missing,
    note,
    path_state,
)
from llmlaunch.frameworks.checkpoints import (
    KEY,
    NEW_FOLDER,
    NON_PERSISTENT_FOLDER,
    TRACKERS,
    checkpoint_bytes,
    tracker,
)
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout
from llmlaunch.readiness.written_folders import nearest_folder
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import counted
from llmlaunch.units import gib

STEP = re.compile(r"\d+")
SAVED_FOLDER = re.compile(r"iter_\d{7,}|step-\d+")
MOST_NON_PERSISTENT = 2


@frozen
class LastCheckpoint:
    """The checkpoint that a job goes on from, its step and its folder."""

    step: int
    folder: Path


def checkpoint_findings(recipe: Recipe, layout: Layout, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what the folder's checkpoints mean for the job, and whether there is room for its own."""
    folder = host_path(recipe, str(recipe.training.checkpoint_path))
    if path_state(folder) == "unseen" or not nearest_folder(folder).is_dir():
        return
    last = _last_checkpoint(recipe, folder)
    if last is not None:
        yield from _resumed(recipe, layout, folder, last)
    elif (folder / tracker(recipe)).exists():
        yield doubtful(KEY, f"{folder / tracker(recipe)} names no step; {NEW_FOLDER}, or mend it to go on")
    for name, file in TRACKERS.items():
        if file != tracker(recipe) and (folder / file).exists():
            yield doubtful(
                KEY, f"{folder} holds checkpoints of {name}, which {recipe.backend.name} cannot read; {NEW_FOLDER}"
            )
    yield from _room(recipe, folder, 0 if last is None else last.step)


def mismatches(recipe: Recipe, layout: Layout) -> Iterator[Finding]:
    """Yield why the last checkpoint does not match the job that would go on from it."""
    if recipe.training.checkpoint_path is None:
        return
    folder = host_path(recipe, recipe.training.checkpoint_path)
    last = None if path_state(folder) == "unseen" else _last_checkpoint(recipe, folder)
    if last is not None:
        yield from mismatch_findings(recipe, layout, last.folder)


def _last_checkpoint(recipe: Recipe, folder: Path) -> LastCheckpoint | None:
    """Return the checkpoint that the job goes on from, also a non-persistent one; None where no tracker names one."""
    last = _named_by(folder, tracker(recipe))
    if recipe.training.non_persistent_save_interval is None:
        return last
    newer = _named_by(folder / NON_PERSISTENT_FOLDER, tracker(recipe))
    return max((each for each in (newer, last) if each is not None), key=lambda each: each.step, default=None)


def _named_by(folder: Path, name: str) -> LastCheckpoint | None:
    """Return the checkpoint that the tracker names; None where it names no step."""
    text = (first_bytes(folder / name, 256) or b"").decode("utf-8", "replace").strip()
    numbers = STEP.findall(text)
    if not numbers or "/" in text:
        return None
    return LastCheckpoint(int(numbers[-1]), folder / (f"iter_{int(text):07d}" if is_whole_number(text) else text))


def _resumed(recipe: Recipe, layout: Layout, folder: Path, last: LastCheckpoint) -> Iterator[Finding]:
    steps = recipe.training.steps
    if last.step >= steps:
        yield doubtful(
            KEY,
            f"{folder} holds step {last.step}, and the training has {counted(steps, 'step')}: the job would end at "
            f"once; raise training.steps, or {NEW_FOLDER}",
        )
    else:
        yield note(KEY, f"{folder} holds step {last.step}: the job goes on from there, to step {steps}; {NEW_FOLDER}")
    entries = folder_entries(last.folder)
    if not entries:
        yield doubtful(
            KEY,
            f"{last.folder.parent / tracker(recipe)} names {last.folder.name}, which is missing or empty: the job "
            f"begins with the newest whole checkpoint, if there is one; {NEW_FOLDER}",
        )
        return
    yield from mismatch_findings(recipe, layout, last.folder)


def _room(recipe: Recipe, folder: Path, step: int) -> Iterator[Finding]:
    """Room on the file system. What a quota leaves is not known; a script of one's own may delete old checkpoints."""
    interval, steps = recipe.training.save_interval, recipe.training.steps
    place = nearest_folder(folder)
    if interval is None or step >= steps or not os.access(place, os.X_OK):
        return
    state = os.statvfs(place)
    free, each = state.f_bavail * state.f_frsize, checkpoint_bytes(recipe)
    due = 1 if recipe.backend.script is not None else -(-(steps - step) // interval)
    stay = recipe.training.keep_checkpoints
    needed = due if stay is None else min(due, max(1, stay + 1 - _saved_count(folder)))
    fit = max(0, free // max(each, 1) - _non_persistent_to_come(recipe, folder))
    if fit >= needed:
        return
    room = f"a checkpoint of {recipe.model.name} has about {gib(each)} GiB, and {gib(free)} GiB are free on {place}"
    if fit == 0:
        yield missing(KEY, f"{room}; make room, or name a folder on a larger file system")
    elif stay is None:
        yield doubtful(
            KEY,
            f"{room}: {fit} of the {due} that will be written fit, and none is deleted; set training.keep_checkpoints, "
            "raise training.save_interval or make room",
        )
    else:
        yield doubtful(
            KEY,
            f"{room}: {fit} of the {needed} that will be written before one is removed fit ({stay} and the next one); "
            "lower training.keep_checkpoints or make room",
        )


def _non_persistent_to_come(recipe: Recipe, folder: Path) -> int:
    """How many checkpoints more lie beside those that stay: while one is written, the one before it is there."""
    if recipe.training.non_persistent_save_interval is None:
        return 0
    return max(0, MOST_NON_PERSISTENT - _saved_count(folder / NON_PERSISTENT_FOLDER))


def _saved_count(folder: Path) -> int:
    """How many checkpoints the folder holds already, by the names that the trainers give them."""
    return sum(1 for entry in folder_entries(folder) if SAVED_FOLDER.fullmatch(entry.name))


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
