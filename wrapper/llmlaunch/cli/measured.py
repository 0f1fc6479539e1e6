"""The margin that the store's measured runs give a recipe."""

from __future__ import annotations

import json

import click

from llmlaunch.backends.registry import recorded_name
from llmlaunch.calibration.margins import Margin, no_margin
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe

__all__ = ["stored_margin"]


def stored_margin(recipe: Recipe, risk: float) -> Margin:
    """From all comparable runs in the store; finished runs are collected first. A store that cannot be read must not
    keep anybody from planning: that is one warning, and the rule decides."""
    from llmlaunch.store.location import store_exists

    if not store_exists():
        return no_margin(risk, 0)
    from llmlaunch.calibration.comparable import margin_for
    from llmlaunch.calibration.machines import clusters_by_gpu
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.measurements import contents

    try:
        with open_collected(lambda line: click.echo(line, err=True)) as store:
            texts = contents(store)
    except UserError as failure:
        click.echo(f"warning: measured runs are not used: {failure}", err=True)
        return no_margin(risk, 0)
    records = [json.loads(text) for text in texts]
    name = recipe.cluster.accelerator.name
    return margin_for(records, clusters_by_gpu(), recorded_name(recipe), name, recipe.backend.runs_version, risk)
