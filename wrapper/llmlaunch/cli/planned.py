"""What check, plan, render and submit share: the recipe's arguments, and the way from them to a plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.backends.base import Backend, Rendered
from llmlaunch.cli.printed import warn_once
from llmlaunch.errors import UserError
from llmlaunch.planner.plan import Plan, Sizing
from llmlaunch.recipe.types import Recipe

if TYPE_CHECKING:
    from llmlaunch.planner.placement import ExpectedPlacement
    from llmlaunch.planner.setting import Setting
    from llmlaunch.rendering.inputs import Inputs

__all__ = ["Planned", "plan_loaded", "planned", "recipe_arguments"]


@dataclass(frozen=True)
class Planned:
    """A recipe as planned, its number of nodes chosen, with its backend and plan. `json` is the shape `check --json`
    prints. `setting` is of the recipe with that number and as it was given otherwise: it searches the same space
    again."""

    recipe: Recipe
    backend: Backend
    plan: Plan
    json: dict[str, Any]
    setting: Setting
    placement: ExpectedPlacement | None = None  # None: nothing is known of the network

    @property
    def placement_lines(self) -> list[str]:
        """What the order of the nodes is worth, for a person."""
        if self.placement is None:
            return []
        from llmlaunch.report.placement_text import placement_text

        return [placement_text(self.placement)]

    def rendered(self) -> Rendered:
        """What the backend makes of it; its notes go to stderr."""
        rendered = self.backend.render(self.recipe, self.plan.layout)
        for note in rendered.notes:
            click.echo(f"note: {note}", err=True)
        return rendered

    def write_run(self, directory: Path) -> None:
        """Write the run directory; what it leaves out goes to stderr. Raises UserError."""
        from llmlaunch.rendering.run_directory import render_run

        for note in render_run(self.recipe, self.plan, self.json, self.rendered(), directory):
            click.echo(f"note: {note}", err=True)

    def refuse_unrenderable(self) -> None:
        """Raises UserError for what render and submit would refuse of a safe plan; techniques that no backend runs are
        there to be priced."""
        if not self.plan.good or self.recipe.techniques.what_ifs:
            return
        from llmlaunch.rendering.scripts import job_script, train_script

        rendered = self.backend.render(self.recipe, self.plan.layout)
        job_script(self.recipe, self.plan, prepares=bool(rendered.check or rendered.prepare))
        train_script(self.recipe, rendered, None)

    def inputs(self) -> Inputs:
        """What the job reads, looked for on this machine; what cannot be seen from here is a note on stderr."""
        from llmlaunch.rendering.inputs import inputs_of

        inputs = inputs_of(self.recipe, os.environ)
        for sentence in inputs.unseen:
            click.echo(f"note: {sentence}", err=True)
        return inputs

    def warn_of_missing_inputs(self) -> None:
        """For commands that submit nothing: what is missing may come before the job does."""
        warn_once(f"{sentence} (submit refuses without it)" for sentence in self.inputs().missing)

    def refuse_missing_inputs(self) -> None:
        """Raises UserError where the job would wait in the queue to find that an input is missing."""
        missing = self.inputs().missing
        if missing:
            raise UserError("\n".join(missing))

    def say_what_was_rehearsed(self) -> None:
        """Of this very layout, if anybody did."""
        if self.plan.rehearsed is not None:
            click.echo(self.plan.rehearsed.sentence, err=True)

    def warn_of_missing_fallbacks(self) -> None:
        """Where fewer layouts than the recipe asks for would follow one that runs out of memory."""
        if self.plan.fallbacks is not None and self.plan.fallbacks.missing is not None:
            click.echo(f"warning: {self.plan.fallbacks.missing}", err=True)


def recipe_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """RECIPE and any number of KEY=VALUE words."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    return click.argument("recipe", metavar="RECIPE", type=click.Path())(function)


def planned(path: str, overrides: tuple[str, ...]) -> Planned:
    """Load, choose the backend, search. Raises UserError; the plan may be unsafe."""
    from llmlaunch.backends.framework_version import with_framework_version
    from llmlaunch.launchers.probed import probed_packages
    from llmlaunch.recipe.cautions import cautions
    from llmlaunch.recipe.load import load_recipe

    found = with_framework_version(load_recipe(path, overrides), os.environ, probed_packages)
    warn_once((*found.warnings, *cautions(found.recipe)))
    return plan_loaded(found.recipe)


def plan_loaded(recipe: Recipe, baseline_bytes: int | None = None, sizing: Sizing | None = None) -> Planned:
    """Choose the backend, search. `baseline_bytes` as `setting_of` takes it; `sizing` is how an earlier plan chose the
    nodes the recipe now has."""
    from llmlaunch.backends.registry import backend_for
    from llmlaunch.cli.measured import lessons_of
    from llmlaunch.cli.rehearsals import with_rehearsals
    from llmlaunch.planner.plan import as_planned
    from llmlaunch.planner.plan_json import plan_json
    from llmlaunch.planner.setting import setting_of
    from llmlaunch.planner.sizing import make_sized_plan

    backend = backend_for(recipe)
    setting = setting_of(recipe, backend, baseline_bytes, lessons_of(recipe))
    setting, plan = make_sized_plan(with_rehearsals(setting))
    recipe = setting.recipe
    plan = plan if sizing is None else replace(plan, sizing=sizing)
    if recipe.on_oom.layouts and plan.good:
        from llmlaunch.planner.fallbacks import find_fallbacks

        plan = replace(plan, fallbacks=find_fallbacks(setting, plan, recipe.on_oom.layouts))
    recipe = as_planned(recipe, plan.chosen)
    placement = None if recipe.cluster.bandwidth is None else _placement(setting.with_recipe(recipe), plan)
    whole = plan_json(plan) | {"placement": None if placement is None else placement.as_json()}
    return Planned(recipe, backend, plan, whole, setting, placement)


def _placement(setting: Setting, plan: Plan) -> ExpectedPlacement | None:
    from llmlaunch.planner.placement import expected_placement

    return expected_placement(setting, plan.layout)
