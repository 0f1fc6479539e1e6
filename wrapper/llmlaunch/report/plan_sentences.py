"""What every account of a plan says alike: the job, the verdict, head-room, and a neighbour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmlaunch.planner.plan import FullerLayout, Plan, risk_words
from llmlaunch.recipe.types import Recipe
from llmlaunch.report.text import signed_percent
from llmlaunch.rundir.values import counted
from llmlaunch.units import gib

if TYPE_CHECKING:
    from llmlaunch.planner.neighbours import Neighbour


def job_text(recipe: Recipe) -> str:
    """Return what is trained, on what, and in which number formats, in one line."""
    cluster, work = recipe.cluster, recipe.workload
    return (
        f"{recipe.model.name} on {recipe.nodes} x {cluster.devices_per_node} {cluster.accelerator.name}, "
        f"{counted(work.global_batch_size, 'sequence')} of {counted(work.sequence_length, 'token')} a step, "
        f"{recipe.training.numbers.beside(work.precision)}, {recipe.backend.name}"
    )


def verdict_words(plan: Plan) -> str:
    """Return the verdict and its risk, with what the recipe, a lock or a budget says of it."""
    accepted = ", accepted by the recipe" if plan.accepted else ""
    locked = f", kept by {plan.locked_by}" if plan.locked_by else ""
    return f"{plan.verdict_with_risk}{accepted}{locked}{', beyond the budget' if plan.beyond_budget else ''}"


def headroom_sentence(fuller: FullerLayout, layout: str) -> str:
    """Return that a plan was chosen for its head-room, and what was given for it. `layout` names the fuller layout."""
    gain = f"{abs(fuller.gain):.1%}"
    pace = "as fast" if gain == "0.0%" else f"{gain} {'faster' if fuller.gain > 0 else 'slower'}"
    joint = "but" if fuller.gain > 0 and pace != "as fast" else "and"
    return f"Chosen for headroom: {layout} is {pace} {joint} has a stated {risk_words(fuller.stated_risk, 'risk of')}"


def neighbour_row(plan: Plan, neighbour: Neighbour) -> tuple[list[str], str]:
    verdict = neighbour.verdict
    change = f"{neighbour.name.replace('_', ' ')} {_setting_text(neighbour.before)} -> {_setting_text(neighbour.after)}"
    for name, value in neighbour.along.items():
        change += f", {name.replace('_', ' ')} {_setting_text(value)}"
    remark = "" if verdict.refusal is None else f"refused: {verdict.refusal.reason}"
    if verdict.step_seconds is None or verdict.device_bytes is None:
        return [change, "", ""], remark
    time = signed_percent(verdict.step_seconds / plan.chosen.step_seconds - 1)
    return [change, time, gib(plan.limit.limit_bytes - verdict.device_bytes)], remark


def _setting_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
