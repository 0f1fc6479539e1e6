"""The report of one run in a terminal of 80 columns and 24 lines: how it stands, what was predicted, what it lost."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from llmlaunch.causes.cause import in_words
from llmlaunch.planner.plan import verdict_with_risk
from llmlaunch.report.text import one_line, paragraph, signed_percent, table
from llmlaunch.rundir.values import counted
from llmlaunch.units import duration, gib
from llmlaunch.verdicts import VERDICTS

WIDTH = 80
MOST_STAGES, MOST_CAUSES, MOST_MISSING = 4, 3, 3
MOST_REASON_LINES = 4

Record = Mapping[str, Any]


def run_summary_text(report: Record) -> str:
    """Return what `llmlaunch report RUN` prints: at most 22 lines, none wider than a terminal."""
    run, state, spent = report["run"], report["state"], report["goodput"]
    lines = [f"{run['name']}: {phase_words(state)}", f"  {job_words(run)}"]
    reason = state["cause_sentence"] or state["why"]
    if reason and state["phase"] != "succeeded":
        lines += paragraph(one_line(reason), MOST_REASON_LINES)
    if state["advice"]:
        lines += paragraph(state["advice"])
    lines.append(f"  {_progress(report)}")
    lines.append(f"  {_goodput(report)}" if report["attempts"] else "  no attempt has begun")
    shown = [
        f"    {in_words(stop['cause'])}: {counted(stop['stops'], 'stop')}, {duration(stop['seconds'])}"
        for stop in spent["stops"][:MOST_CAUSES]
    ]
    if spent["share"] is not None:
        shown.insert(0, f"    {_ordinary_losses(spent)}")
    shown += [f"  {text}" for text in report["attempts"][-1]["slow"]] if report["attempts"] else []
    lines += [*shown, *_comparison(report), *_stages(report)]
    lines += [f"Missing: {what}" for what in report["missing"][:MOST_MISSING]]
    return "\n".join(_cut(line) for line in lines)


def _cut(line: str) -> str:
    """Cut a line to the terminal's width, at a word."""
    line = one_line(line) if "\n" not in line else line
    if "\n" in line or len(line) <= WIDTH:
        return line
    indent = len(line) - len(line.lstrip())
    return " " * indent + shorten(line, WIDTH - indent, placeholder=" ...")


def phase_words(state: Record) -> str:
    """Return the phase with the kind of cause, and the exit code where it is no success."""
    words = state["phase"] + (f": {in_words(state['cause'])}" if state["cause"] else "")
    code = state["exit_code"]
    return words if not code or state["phase"] == "succeeded" else f"{words}, exit code {code}"


def job_words(run: Record) -> str:
    """Return what is trained, where, in one line; of what is not known nothing."""
    place = f"{run['nodes']} x {run['devices_per_node']} {run['accelerator'] or ''}".strip()
    known = run["nodes"] and run["devices_per_node"]
    model = run["model"] if run["model"] != "inline" else "a model of its own"
    parts = [model, f"on {place}" if known else None, run["backend"]]
    return ", ".join(part for part in parts if part) or "nothing is known of its job"


def amount(value: float, unit: str) -> str:
    """Return a number as a person reads it; bytes as GiB."""
    if unit == "bytes":
        return gib(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def error_words(error: float) -> str:
    """Return predicted against measured as a signed share."""
    return signed_percent(error)


def planned_verdict(plan: Record) -> str | None:
    """Return the verdict on the plan of a run, with its risk, from `plan` of a report; None where it has none."""
    verdict = plan["verdict"]
    return None if verdict not in VERDICTS else verdict_with_risk(verdict, plan["stated_risk"], plan["peak_kind"])


def _progress(report: Record) -> str:
    run, state, steps = report["run"], report["state"], report["steps"]
    verdict = planned_verdict(report["plan"])
    planned = "" if verdict is None else f"; planned as {verdict}"
    if state["step"] is None:
        return f"no step was seen{planned}"
    of = f" of {run['steps']:,}" if run["steps"] else ""
    loss = "" if steps["last_loss"] is None else f", last loss {steps['last_loss']:.4g}"
    return f"step {state['step']:,}{of}{loss}{planned}"


def _goodput(report: Record) -> str:
    spent = report["goodput"]
    share = "" if spent["share"] is None else f"; goodput {100 * spent['share']:.0f} %"
    queue = f", {duration(spent['queue_seconds'])} between them" if spent["queue_seconds"] else ""
    return f"{counted(len(report['attempts']), 'attempt')} in {duration(spent['allocated_seconds'])}{queue}{share}"


def _ordinary_losses(spent: Record) -> str:
    startup, between, after = (duration(spent[f"{part}_seconds"]) for part in ("startup", "other", "end"))
    return f"start-up {startup}, between steps {between}, after the last {after}"


def _comparison(report: Record) -> list[str]:
    rows = [
        [
            f"{row['name']}, {'GiB' if row['unit'] == 'bytes' else row['unit']}",
            *("-" if row[key] is None else amount(row[key], row["unit"]) for key in ("predicted", "measured")),
            "-" if row["error"] is None else error_words(row["error"]),
        ]
        for row in report["compared"]
    ]
    return table(["", "predicted", "measured", "error"], rows).split("\n") if rows else []


def _stages(report: Record) -> list[str]:
    """Peaks by pipeline rank, those that are fullest first, where there are several."""
    stages = sorted(report["memory"]["stages"], key=lambda stage: -stage["peak_bytes"])
    if len(stages) < 2:
        return []
    shown = ", ".join(f"{_name(stage)}: {gib(stage['peak_bytes'])}" for stage in stages[:MOST_STAGES])
    more = f", {len(stages) - MOST_STAGES} more" if len(stages) > MOST_STAGES else ""
    return [f"  peaks by pipeline rank, GiB: {shown}{more}"]


def _name(stage: Record) -> str:
    return "?" if stage["pipeline_rank"] is None else str(stage["pipeline_rank"])
