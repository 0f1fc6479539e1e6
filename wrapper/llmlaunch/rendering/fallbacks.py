"""fallback/K/: what the K-th fallback layout needs of its own. What it has in common with the planned one it shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from llmlaunch.backends.argument import NodeVariable
from llmlaunch.backends.base import Rendered
from llmlaunch.backends.registry import backend_for
from llmlaunch.documents.writing import json_bytes, text_bytes
from llmlaunch.planner.plan import Fallback, Plan, as_planned
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.arguments_json import arguments_json
from llmlaunch.rendering.recovery_json import fallback_folder
from llmlaunch.rendering.run_json import is_placed, placement_json, run_description
from llmlaunch.rendering.scripts import train_script

__all__ = ["fallback_files"]

RUN_DIR = "LLMLAUNCH_RUN_DIR"


@dataclass(frozen=True)
class _Layout:
    """One fallback as it is rendered: `recipe` with its words, and the checkpoint folder it uses."""

    folder: str
    recipe: Recipe
    plan: Plan


def fallback_files(recipe: Recipe, plan: Plan, shared: Rendered, code_root: PurePath | None) -> dict[str, bytes]:
    """The files of all fallback layouts by relative path; `shared` is what the backend rendered for the planned one.

    Files of the backend that differ from the planned layout's lie with the fallback, and its words name them there.
    Raises UserError as the backend's `render` and `train_script` do.
    """
    files: dict[str, bytes] = {}
    for layout in _layouts(recipe, plan):
        rendered = backend_for(recipe).render(layout.recipe, layout.plan.layout)
        own = {name: content for name, content in rendered.files.items() if shared.files.get(name) != content}
        rendered = _with_own_files(rendered, layout.folder, own)
        files |= {f"{layout.folder}/{name}": content for name, content in own.items()}
        files |= _described(layout, rendered, code_root)
    return files


def _layouts(recipe: Recipe, plan: Plan) -> Iterator[_Layout]:
    places = [recipe.training.checkpoint_path]
    for number, fallback in enumerate(plan.fallbacks.layouts if plan.fallbacks else (), start=1):
        place = _checkpoint_path(recipe, fallback, places)
        places.append(place)
        planned = as_planned(recipe, fallback.plan.chosen)
        planned = replace(planned, training=replace(planned.training, checkpoint_path=place))
        yield _Layout(fallback_folder(number), planned, replace(fallback.plan, fallbacks=plan.fallbacks))


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


def _described(layout: _Layout, rendered: Rendered, code_root: PurePath | None) -> dict[str, bytes]:
    recipe, plan, folder = layout.recipe, layout.plan, layout.folder
    files = {
        f"{folder}/plan.json": json_bytes(plan_json(replace(plan, fallbacks=None))),
        f"{folder}/run.json": json_bytes(run_description(recipe, plan, rendered)),
        f"{folder}/arguments.json": json_bytes(arguments_json(recipe, plan, rendered)),
        f"{folder}/train.sh": text_bytes(train_script(recipe, rendered, code_root)),
    }
    if is_placed(recipe):
        files[f"{folder}/placement.json"] = placement_json(recipe, plan.layout)
    return files
