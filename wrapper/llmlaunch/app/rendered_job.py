"""The job of a run directory: the recipe that was rendered, kept to its plan, and the checkpoint it goes on from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import object_in
from llmlaunch.rundir.run import begun_attempts, next_layout
from llmlaunch.rundir.run_file import read_run_file


def rendered_recipe(directory: Path) -> Recipe:
    """Return the recipe of a run directory, for the framework's version it was planned with.

    Raises:
        OSError, ValueError: its run.json cannot be read.
        UserError: its recipe cannot be read, or its run.json is damaged.
    """
    description = object_in(directory / file_names.RUN)
    recipe = load_recipe(directory / file_names.RECIPE, description.get("overrides", ()))
    try:
        version = description["measurement"]["backend_version"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory}: its run.json is damaged ({error})") from None
    return replace(recipe, backend=replace(recipe.backend, found_version=version))


def rendered_job(directory: Path, recipe: Recipe, folder: str = "") -> tuple[Recipe, Layout]:
    """Return the recipe of a run directory kept to what was planned, and the layout. `folder` is that of a fallback.

    Raises:
        OSError, ValueError: the plan cannot be read.
        UserError: the plan is damaged, or is not of this recipe.
    """
    from llmlaunch.layout import Layout
    from llmlaunch.planner.lock import keeping_to, lock_of_run

    plan_path = directory / folder / file_names.PLAN
    planned, description = object_in(plan_path), object_in(directory / folder / file_names.RUN)
    try:
        lock, layout = lock_of_run(recipe, planned, description["nodes"]), Layout.from_json(planned["layout"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{directory}: its plan.json or run.json is damaged ({error})") from None
    return keeping_to(recipe, lock, plan_path), layout


def checkpoint_warnings(directory: Path) -> tuple[str, ...]:
    """Return why the next attempt of a run directory cannot go on from the last checkpoint as it is; empty where the
    files show no reason and where the directory cannot be read."""
    from llmlaunch.readiness.checkpoints import mismatches
    from llmlaunch.readiness.readiness import in_sentences

    folder = next_layout(begun_attempts(directory))
    saved = read_run_file(directory, folder).get("checkpoint")
    if not isinstance(saved, dict) or not (Path(str(saved.get("path"))) / str(saved.get("tracker"))).is_file():
        return ()
    try:
        recipe, layout = rendered_job(directory, rendered_recipe(directory), folder)
    except (UserError, OSError, ValueError):
        return ()
    recipe = replace(recipe, training=replace(recipe.training, checkpoint_path=str(saved["path"])))
    sentences = in_sentences(recipe, mismatches(recipe, layout))
    return (*sentences.missing, *sentences.doubtful)
