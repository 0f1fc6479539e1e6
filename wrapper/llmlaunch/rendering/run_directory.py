"""The run directory: all its files as a value, those of fallback layouts in fallback/K/ and of layouts for fewer nodes
in nodes/N/, and the writing of them, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath, PurePosixPath

from llmlaunch.documents.writing import json_bytes, new_place, text_bytes
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.planner.plan import Fallback, Plan, as_planned
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.arguments_json import arguments_json
from llmlaunch.rendering.launch import CONFIG_FILE, SNAPSHOT_FOLDER, command_text, hook_files, launch_json, wandb_config
from llmlaunch.rendering.node_archive import node_archive
from llmlaunch.rendering.provenance import Provenance, copy_snapshot, gather_provenance
from llmlaunch.rendering.restarts import is_placed
from llmlaunch.rendering.run_json import (
    FALLBACK_FOLDER,
    FEWER_NODES_FOLDER,
    fallback_folder,
    fewer_nodes_folder,
    placement_json,
    run_description,
)
from llmlaunch.rendering.scripts import job_json, job_script
from llmlaunch.rundir import file_names
from llmlaunch.trainers import PREFLIGHT

_EXECUTABLE = frozenset({file_names.JOB_SCRIPT})
_FOLDERS = (file_names.LOGS, file_names.PEAKS, file_names.ATTEMPTS)  # sbatch and srun make no folders
_RESERVED = frozenset({*_FOLDERS, SNAPSHOT_FOLDER, FALLBACK_FOLDER, FEWER_NODES_FOLDER})


def run_files(
    recipe: Recipe,
    plan: Plan,
    plan_json: Mapping[str, object],
    rendered: Rendered,
    provenance: Provenance,
    described: Mapping[str, object] | None = None,
) -> dict[str, bytes]:
    """Every file of the run directory by relative path, except the copied code of a snapshot. `described` is run.json,
    where it is not `run_description`'s.

    Pure: the same inputs give the same bytes (LLMLAUNCH_TEMPLATES is one of them). Raises UserError for a recipe
    value that fits neither a directive nor a shell word.
    """
    code_root = None if provenance.snapshot is None else provenance.snapshot.root
    files = {
        file_names.RECIPE: text_bytes(recipe.text),
        file_names.PLAN: json_bytes(plan_json),
        "arguments.json": json_bytes(arguments_json(recipe, plan, rendered)),
        file_names.JOB_SCRIPT: text_bytes(job_script(recipe, plan)),
        file_names.COMMAND: text_bytes(command_text(recipe, rendered, code_root)),
        file_names.NODE_ARCHIVE: node_archive(),
        "code.json": json_bytes(provenance.code),
    }
    if recipe.preflight:
        files["trainer/preflight.py"] = PREFLIGHT.read_bytes()
    files |= {name: source.read_bytes() for name, source in hook_files(recipe).items()}
    if recipe.tracking.wandb is not None:
        files[CONFIG_FILE] = wandb_config(recipe, plan)
    if is_placed(recipe):
        files[file_names.PLACEMENT] = placement_json(recipe, plan.layout)
    if provenance.diff:
        files["code.diff"] = provenance.diff
    for name, content in rendered.files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or name in files or path.parts[0] in _RESERVED:
            raise ValueError(f"backend {recipe.backend.name} may not write {name!r} into a run directory")
        files[name] = content
    files |= layout_files(recipe, plan, rendered, code_root)
    # what there was, for whoever looks what is left of it
    described = {
        **(described or run_description(recipe, plan, rendered)),
        "job": job_json(recipe, plan, bool(rendered.check or rendered.prepare)),
        "launch": launch_json(recipe, rendered, code_root),
        "files": sorted({*files, file_names.RUN}),
    }
    return {**files, file_names.RUN: json_bytes(described)}


def render_run(
    recipe: Recipe,
    plan: Plan,
    plan_json: Mapping[str, object],
    rendered: Rendered,
    directory: Path,
    described: Mapping[str, object] | None = None,
) -> list[str]:
    """Writes the files of `run_files`, and the copied code, for their owner alone (0700, files 0600).

    Built beside its final place and renamed, so that a run directory is whole or absent. Returns sentences on what was
    left out of it. Raises UserError where
    `directory` holds something already, is a link, cannot be written, or a recipe value does not fit.
    """
    target = new_place(directory)
    _refuse_occupied(target)
    provenance = gather_provenance(recipe)
    files = run_files(recipe, plan, plan_json, rendered, provenance, described)
    building: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        for folder in _FOLDERS:
            (building / folder).mkdir(mode=0o700)
        for name, content in files.items():
            _write(building, PurePosixPath(name), content)
        if provenance.snapshot is not None:
            copy_snapshot(provenance.snapshot, building / SNAPSHOT_FOLDER)
        building.rename(target)
        building = None
    except OSError as error:
        raise UserError(f"{target}: the run directory cannot be written: {error.strerror or error}") from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
    return provenance.notes


def _refuse_occupied(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target}: exists and is no folder; name a new one")
    if target == Path.cwd():
        raise UserError(f"{target}: is the folder you stand in; name a new one below it")
    if any(target.iterdir()):
        raise UserError(f"{target}: holds files already; name a new folder, or remove this one")


def _write(directory: Path, name: PurePosixPath, content: bytes) -> None:
    for folder in reversed(name.parents[:-1]):
        (directory / folder).mkdir(exist_ok=True, mode=0o700)
    mode = 0o700 if name.name in _EXECUTABLE else 0o600
    with os.fdopen(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


RUN_DIR = "LLMLAUNCH_RUN_DIR"


def layout_files(recipe: Recipe, plan: Plan, shared: Rendered, code_root: PurePath | None) -> dict[str, bytes]:
    """The files of all other layouts by relative path; `shared` is what the backend rendered for the planned one.

    Files of the backend that differ from the planned layout's lie with the other one, and its words name them there.
    Raises UserError as the backend's `render` and `launch_json` do.
    """
    files: dict[str, bytes] = {}
    for folder, planned, other in (*_fallbacks(recipe, plan), *_for_fewer_nodes(recipe, plan)):
        rendered = backend_for(recipe).render(planned, other.layout)
        own = {name: content for name, content in rendered.files.items() if shared.files.get(name) != content}
        rendered = _with_own_files(rendered, folder, own)
        described = {
            file_names.PLAN: json_bytes(plan_json(replace(other, fallbacks=None))),
            file_names.RUN: json_bytes(
                {**run_description(planned, other, rendered), "launch": launch_json(planned, rendered, code_root)}
            ),
            file_names.ARGUMENTS: json_bytes(arguments_json(planned, other, rendered)),
            file_names.COMMAND: text_bytes(command_text(planned, rendered, code_root)),
        }
        if recipe.tracking.wandb is not None:
            described[CONFIG_FILE] = wandb_config(planned, other)
        if is_placed(planned):
            described["placement.json"] = placement_json(planned, other.layout)
        files |= {f"{folder}/{name}": content for name, content in (own | described).items()}
    return files


def _fallbacks(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, Recipe, Plan]]:
    """Yield the folder of each fallback, the recipe with its words and checkpoint folder, and its plan."""
    places = [recipe.training.checkpoint_path]
    for number, fallback in enumerate(plan.fallbacks.layouts if plan.fallbacks else (), start=1):
        place = _checkpoint_path(recipe, fallback, places)
        places.append(place)
        planned = as_planned(recipe, fallback.plan.chosen)
        planned = replace(planned, training=replace(planned.training, checkpoint_path=place))
        yield fallback_folder(number), planned, replace(fallback.plan, fallbacks=plan.fallbacks)


def _for_fewer_nodes(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, Recipe, Plan]]:
    for nodes, fewer in () if plan.fewer_nodes is None else plan.fewer_nodes.plans:
        planned = as_planned(replace(recipe, nodes=nodes), fewer.chosen)
        yield fewer_nodes_folder(nodes), planned, fewer


def _checkpoint_path(recipe: Recipe, fallback: Fallback, places: Sequence[str | None]) -> str | None:
    """Where a layout saves; `places` are those of the layouts before it. Where the recipe wants layouts to begin again
    that cannot go on, a folder holds only what all that use it can load; none is emptied."""
    if places[0] is None or recipe.on_oom.after_checkpoint != "restart":
        return places[0]
    barred = {place for place, able in zip(places, fallback.loads, strict=True) if not able}
    shared = [place for place in places if place not in barred]
    return shared[0] if shared else f"{places[0]}-fallback-{len(places)}"


def _with_own_files(rendered: Rendered, folder: str, own: Mapping[str, bytes]) -> Rendered:
    def placed(word: str | NodeVariable) -> str | NodeVariable:
        if isinstance(word, NodeVariable) and word.name == RUN_DIR and word.suffix.lstrip("/") in own:
            return replace(word, suffix=f"/{folder}{word.suffix}")
        return word

    return replace(rendered, program=tuple(placed(word) for word in rendered.program))
