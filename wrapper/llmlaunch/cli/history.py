"""What earlier runs of a recipe really used, beside what is predicted now."""

from __future__ import annotations

import time

from llmlaunch.cli.printed import say
from llmlaunch.errors import UserError
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.units import gib

__all__ = ["last_peaks_text"]


def last_peaks_text(recipe: Recipe, plan: Plan) -> list[str]:
    """The last true peaks of this recipe, or of another version of it (said so); nothing where there are none.

    A store that cannot be read must not keep anybody from checking a recipe: that is one warning.
    """
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.history import last_true_peaks

    try:
        with open_collected(lambda line: say(line, err=True)) as store:
            past = last_true_peaks(store, recipe.digest, recipe.name)
    except UserError as failure:
        say(f"warning: earlier runs are not shown: {failure}", err=True)
        return []
    if past is None:
        return []
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(past.started_at)) if past.started_at else "at an unknown time"
    which = "This recipe" if past.same_recipe else "Another version of this recipe"
    lines = ["", f"{which} ran {day} ({past.state}, {past.run_id}); measured then, predicted then, predicted now:"]
    now = {rank.pipeline_rank: rank.device_bytes for rank in plan.estimate.ranks}
    for peak in past.peaks:
        then = "-" if peak.predicted_bytes is None else gib(peak.predicted_bytes)
        today = now.get(peak.pipeline_rank) if peak.pipeline_rank is not None else None
        today_text = gib(today) if today is not None and peak.peak_kind == plan.estimate.peak_kind else "-"
        rank = "worst rank" if peak.pipeline_rank is None else f"rank {peak.pipeline_rank}"
        rank = "worst node" if peak.peak_kind == "host" else rank
        lines.append(
            f"  {rank} {peak.peak_kind}: {gib(peak.peak_bytes)}, {then}, {today_text} GiB ({peak.peak_source})"
        )
    return lines
