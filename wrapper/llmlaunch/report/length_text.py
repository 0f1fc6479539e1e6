"""How long a job takes, and when it is expected to end, for a person."""

from __future__ import annotations

from textwrap import wrap

from llmlaunch.planner.outlook import ExpectedEnd
from llmlaunch.planner.plan import JobLength, Plan
from llmlaunch.recipe.types import Budget
from llmlaunch.rundir.values import counted
from llmlaunch.units import duration


def length_lines(plan: Plan) -> list[str]:
    """Return the length of the job if nothing happens, and when it is expected to end with saves and stops."""
    return [_length(plan.length) + _allowed(plan.budget), *_expected(plan)]


def _length(length: JobLength) -> str:
    evaluating = f", {duration(length.evaluation_seconds)} of it evaluation" if length.evaluation_seconds else ""
    return (
        f"Job: {counted(length.steps, 'step', ',')}, {_tokens(length.tokens)} tokens: {duration(length.seconds)}, "
        f"{length.gpu_hours:,.{0 if length.gpu_hours >= 100 else 1}f} GPU-hours{evaluating}"
    )


def _tokens(count: int) -> str:
    for times, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= times:
            return f"{count / times:,.4g}{unit}"
    return f"{count:,}"


def _allowed(budget: Budget) -> str:
    days = [] if budget.days is None else [counted(budget.days, "day", ",.10g")]
    hours = [] if budget.gpu_hours is None else [counted(budget.gpu_hours, "GPU-hour", ",.10g")]
    return f" (budget: {', '.join([*days, *hours])})" if days or hours else ""


def _expected(plan: Plan) -> list[str]:
    """When the job is expected to end, how often it stops and saves, and what that rests on."""
    end = plan.expected
    if end is None:
        return []
    if end.p50_seconds is None or end.stops is None:
        saved = "with these saves" if end.save_interval else "without checkpoints (training.save_interval)"
        return [f"  with stops: may never end {saved}: {_stop_rate(end)}"]
    late = "may never end" if end.p95_seconds is None else f"95 % within {duration(end.p95_seconds)}"
    if end.step_time_spread is None:
        late = "if steps take as long as predicted"
    within = "" if end.within_budget is None else f", {end.within_budget:.0%} within the budget's days"
    lines = [
        f"with stops: 50 % within {duration(end.p50_seconds)}, {late}{within}; goodput {end.goodput:.0%}; "
        "the queue is not counted",
        f"{_stop_count(end.stops)} expected, {_stop_rate(end)}, each {duration(end.resume_seconds)} to come back; "
        f"{_saves(end)}; {_step_times(end)}",
    ]
    return [part for line in lines for part in wrap(line, 120, initial_indent="  ", subsequent_indent="    ")]


def _step_times(end: ExpectedEnd) -> str:
    if end.step_time_spread is None:
        return f"how far step times are off is not known ({end.step_time_source})"
    return f"step times are off by {end.step_time_spread:.0%} ({end.step_time_source})"


def _stop_count(stops: float) -> str:
    return f"{stops:.2g} stops" if stops < 10 else f"{stops:,.0f} stops"


def _stop_rate(end: ExpectedEnd) -> str:
    return f"one in {end.device_hours_between_stops:,.0f} GPU-hours ({end.stops_source})"


def _saves(end: ExpectedEnd) -> str:
    if end.save_interval is None or end.save_seconds is None:
        return "no checkpoints, so each begins at step 0"
    why = f" (save_interval: auto, {end.save_interval_reason})" if end.save_interval_reason else ""
    often = end.non_persistent_interval
    newest = "" if often is None else f", and every {counted(often, 'step', ',')} one of which the newest alone stays"
    return f"a save of {duration(end.save_seconds)} every {counted(end.save_interval, 'step', ',')}{why}{newest}"
