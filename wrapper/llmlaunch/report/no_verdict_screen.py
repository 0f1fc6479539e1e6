"""The screen of `llmlaunch check` for a job without a plan, because what decides its memory was not read."""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.planner.plan import Plan
from llmlaunch.report.terminal import Surface, filled
from llmlaunch.report.text import table, with_coloured_verdict
from llmlaunch.rundir.values import printable
from llmlaunch.units import gib
from llmlaunch.verdicts import UNKNOWN


def no_verdict_screen(name: str, reason: str, surface: Surface, assumed: Sequence[tuple[str, Plan]] = ()) -> str:
    """Return the reason, and below it the memory of the job under each assumption, with the verdict it would have."""
    first, *others = filled(printable(f"{name}: {UNKNOWN}: {reason}"), surface.width, "", "  ")
    lines = [with_coloured_verdict(first, UNKNOWN, surface), *others]
    if assumed:
        rows = [[words, gib(plan.device_bytes), gib(plan.limit.limit_bytes), plan.verdict] for words, plan in assumed]
        lines += ["", table(["it would be with", "GiB", "of", "verdict"], rows, columns=surface.width)]
    return "\n".join(lines)
