"""`llmlaunch check`: validate, plan, show; submit nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.cli.arguments import placement_lines, recipe_arguments, warn_of_inputs
from llmlaunch.cli.output import notify, print_json

if TYPE_CHECKING:
    from llmlaunch.store.history import PastRun

__all__ = ["command"]


@click.command("check")
@recipe_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Validate and plan RECIPE; show memory by pipeline rank and term, the margin and the step time.

    Exit code 0: safe. 2: the recipe is invalid. 3: no layout is safe, or none within the budget.
    """
    run = plan(recipe, overrides, notify)
    run.refuse_unrenderable()
    if as_json:
        print_json(run.json)
    else:
        from llmlaunch.app.evidence import last_true_peaks
        from llmlaunch.report.plan_text import check_text
        from llmlaunch.report.text import print_verdict

        print_verdict(check_text(run.recipe, run.plan), run.plan.good)
        past = last_true_peaks(run.recipe, notify)
        for line in (*placement_lines(run), *([] if past is None else _past_lines(past, run))):
            click.echo(line)
    warn_of_inputs(run)
    run.refuse_unsafe()
    return 0


def _past_lines(past: PastRun, run: PlannedRun) -> list[str]:
    """Return the last true peaks of this recipe, or of another version of it, beside the predictions."""
    from llmlaunch.units import gib

    estimate = run.plan.estimate
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(past.started_at)) if past.started_at else "at an unknown time"
    which = "This recipe" if past.same_recipe else "Another version of this recipe"
    lines = ["", f"{which} ran {day} ({past.state}, {past.run_id}); measured then, predicted then, predicted now:"]
    predicted_now = {rank.pipeline_rank: rank.device_bytes for rank in estimate.ranks}
    for peak in past.peaks:
        then = "-" if peak.predicted_bytes is None else gib(peak.predicted_bytes)
        now_bytes = None if peak.pipeline_rank is None else predicted_now.get(peak.pipeline_rank)
        now = gib(now_bytes) if now_bytes is not None and peak.peak_kind == estimate.peak_kind else "-"
        rank = "worst rank" if peak.pipeline_rank is None else f"rank {peak.pipeline_rank}"
        rank = "worst node" if peak.peak_kind == "host" else rank
        lines.append(f"  {rank} {peak.peak_kind}: {gib(peak.peak_bytes)}, {then}, {now} GiB ({peak.peak_source})")
    return lines
