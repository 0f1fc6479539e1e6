"""What a job costs that goes on with fewer nodes, for a person."""

from __future__ import annotations

from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.report.text import table
from llmlaunch.rundir.values import counted
from llmlaunch.units import duration


def fewer_nodes_table(recipe: Recipe, plan: Plan) -> list[str]:
    """Return the layouts with which the job goes on where nodes are lost, each with what a step and the whole job would
    take; nothing where the recipe does not ask."""
    if plan.fewer_nodes is None:
        return []
    rows = []
    for nodes, fewer in plan.fewer_nodes.plans:
        figures = [f"{fewer.chosen.step_seconds:.2f}", _slower(plan, fewer), duration(fewer.length.seconds)]
        rows.append([str(nodes), *figures, _cost(recipe, fewer)])
    remarks = [fewer.chosen.describe() for _, fewer in plan.fewer_nodes.plans]
    lines = table(["nodes", "s/step", "", "whole job", "cost"], rows, remarks=remarks)
    without = [f"{nodes}: {why}" for nodes, why in sorted(plan.fewer_nodes.without.items(), reverse=True)]
    title = f"If nodes are lost and none is spare, the same job continues (nodes.at_least: {recipe.at_least_nodes})"
    return ["", title, lines, *(["Without a layout: " + "; ".join(without)] if without else [])]


def fewer_nodes_sentences(recipe: Recipe, plan: Plan) -> list[str]:
    """Return the same, a clause for each number of nodes."""
    return [
        f"{counted(nodes, 'node')}: {fewer.chosen.step_seconds:,.2f} s a step ({_slower(plan, fewer)}), the whole job "
        f"{duration(fewer.length.seconds)}, {_cost(recipe, fewer)}"
        for nodes, fewer in (() if plan.fewer_nodes is None else plan.fewer_nodes.plans)
    ]


def faster_on_fewer_sentence(recipe: Recipe, plan: Plan) -> str:
    """Return on how many fewer nodes a step is shorter, and why; nothing where it is not."""
    fewer = plan.faster_on_fewer
    if fewer is None:
        return ""
    return (
        f"on {counted(fewer.nodes, 'node')}: {fewer.step_seconds:,.2f} s a step in place of "
        f"{plan.chosen.step_seconds:,.2f} on {recipe.nodes}, with {fewer.layout.describe()}, because "
        f"{fewer.network_share:.0%} of a step waits for the network; write nodes: {fewer.nodes}"
    )


def _slower(plan: Plan, fewer: Plan) -> str:
    return f"{fewer.chosen.step_seconds / plan.chosen.step_seconds - 1.0:+.0%}"


def _cost(recipe: Recipe, fewer: Plan) -> str:
    hours, price = fewer.length.gpu_hours, recipe.cluster.site.usd_per_gpu_hour
    return f"{hours:,.0f} GPU-hours" if price is None else f"${hours * price:,.0f}"
