"""The arguments and messages that commands which plan a recipe share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from llmlaunch.app.planned_run import PlannedRun
from llmlaunch.cli.output import notify

__all__ = ["placement_lines", "recipe_arguments", "warn_of_inputs"]


def recipe_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add RECIPE and any number of KEY=VALUE overrides."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    return click.argument("recipe", metavar="RECIPE", type=click.Path())(function)


def placement_lines(run: PlannedRun) -> list[str]:
    """Return what the order of the nodes is worth, where the network is known."""
    if run.placement is None:
        return []
    from llmlaunch.report.plan_text import placement_text

    return [placement_text(run.placement)]


def warn_of_inputs(run: PlannedRun) -> None:
    """Warn of inputs that are missing or cannot be seen from here: they may come before the job does."""
    inputs = run.inputs()
    for sentence in inputs.unseen:
        notify(f"note: {sentence}")
    for sentence in inputs.missing:
        notify(f"warning: {sentence} (submit refuses without it)")
