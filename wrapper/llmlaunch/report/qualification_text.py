"""The page of a qualification: six layouts as predicted and as measured, what that says, and what to do next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmlaunch.planner.plan import risk_words
from llmlaunch.report.text import correction_words, markdown_table, one_line, signed_percent, table
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.units import gib

__all__ = ["planned_text", "qualification_markdown", "qualification_text", "summary_line"]

EXPECTED = {"fits": "fits", "tight": "tight", "dies": "out of memory"}
OUTCOMES = {
    "died": "OUT OF MEMORY",
    "survived": "SURVIVED",
    "failed": "FAILED",
}
HEAD = ["layout", "layers", "tokens", "predicted GiB", "measured GiB", "error", "predicted s", "measured s", "error"]


def qualification_text(result: Mapping[str, Any]) -> str:
    """Return the page for a terminal. `result` is what `qualify --json` prints."""
    rows = [_row(layout) for layout in result["layouts"]]
    remarks = [f"{_expected(layout)}: {_outcome(layout)}" for layout in result["layouts"]]
    lines = [_title(result), "", table(HEAD, rows, remarks=remarks), "", *_sentences(result)]
    return "\n".join(one_line(line) for text in lines for line in text.split("\n"))


def qualification_markdown(result: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    rows = [[*_row(layout), _expected(layout), _outcome(layout)] for layout in result["layouts"]]
    title, _, figures = _title(result).partition(": ")
    head = [*HEAD, "expected", "ended"]
    sentences = "\n".join(f"- {one_line(sentence)}" for sentence in _sentences(result))
    return f"# {title}\n\n{figures}\n\n{markdown_table(head, rows)}\n\n{sentences}\n"


def planned_text(rows: Sequence[Mapping[str, Any]], memory_bytes: int, limit_bytes: int) -> str:
    """Return the six layouts before they run. `rows` are entries of `layouts` in `qualify --dry-run --json`."""
    cells = [
        [
            f"{number}  {row['layout']}",
            str(row["num_layers"]),
            str(row["sequence_length"]),
            gib(row["predicted_bytes"]),
            f"{row['predicted_step_seconds']:.2f}",
        ]
        for number, row in enumerate(rows, start=1)
    ]
    head = [*HEAD[:4], "predicted s"]
    remarks = [_expected(row) for row in rows]
    limits = f"A device has {gib(memory_bytes)} GiB, of which {gib(limit_bytes)} GiB may be used"
    return f"{limits}\n{table(head, cells, remarks=remarks)}"


def summary_line(summary: tuple[float, int, float | None] | None, cluster: str, backend: str) -> str:
    """Return the line of `check`. `summary` is when the cluster was qualified, with how many layouts, and the largest
    error of their memory; None where it was not."""
    where = one_line(f"{cluster} with {backend}")
    if summary is None:
        return f"Not qualified: nothing was measured on {where} (llmlaunch qualify tries six small layouts)"
    changed_at, layouts, error = summary
    figures = "" if error is None else f", worst {_error_words(error)}"
    return f"Qualified on {where} on {_day(changed_at)} ({counted(layouts, 'layout')}{figures})"


def _title(result: Mapping[str, Any]) -> str:
    where = f"{result['cluster']} with {result['backend']}"
    ended = sum(layout["outcome"] not in ("submitted", "pending", "running") for layout in result["layouts"])
    if not result["complete"]:
        return f"Qualifying {where}: {ended} of 6 layouts have ended"
    memory, steps = result["worst_error"], result["worst_step_error"]
    figures = [f"memory {_error_words(memory)} at worst"] if memory is not None else []
    figures += [f"step time {signed_percent(steps)} at worst"] if steps is not None else []
    return f"Qualified {where} on {_day(result['changed_at'])}: {', '.join(figures) or 'no run left a measurement'}"


def _error_words(error: float) -> str:
    return f"{signed_percent(error)} ({'too low' if error < 0 else 'too high'})"


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(at))


def _row(layout: Mapping[str, Any]) -> list[str]:
    peak = layout["peaks"].get(layout["peak_kind"])
    reached = "" if layout["error"] is not None else ">"
    seconds = layout["step_seconds"]
    return [
        f"{layout['number']}  {layout['layout']}",
        layout["num_layers"],
        layout["sequence_length"],
        gib(layout["predicted_bytes"]),
        "-" if peak is None else reached + gib(peak["measured_bytes"]),
        "-" if layout["error"] is None else signed_percent(layout["error"]),
        f"{layout['predicted_step_seconds']:.2f}",
        "-" if seconds is None else f"{seconds:.2f}",
        "-" if layout["step_error"] is None else signed_percent(layout["step_error"]),
    ]


def _expected(layout: Mapping[str, Any]) -> str:
    """Return what a layout is to do, with its stated risk: `fits (risk 0.45 %)`."""
    expected = EXPECTED[str(layout["expectation"])]
    dies = layout["expectation"] == "dies" or layout["peak_kind"] != "device"
    return expected if dies else f"{expected} ({risk_words(layout['stated_risk'])})"


def _outcome(layout: Mapping[str, Any]) -> str:
    outcome = str(layout["outcome"])
    overfull = " (used more than a process may)" if layout["overfull"] else ""
    cause = f" ({layout['cause']})" if outcome == "failed" and layout["cause"] else ""
    return OUTCOMES.get(outcome, outcome) + overfull + cause


def _sentences(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the figures say, and what to do next."""
    layouts = result["layouts"]
    kinds = sorted({layout["peak_kind"] for layout in layouts})
    card = max(layout["memory_bytes"] for layout in layouts)
    limit = max(layout["limit_bytes"] for layout in layouts)
    yield (
        f"Peaks are {' and '.join(kinds)}, of the rank that used most; a device has {gib(card)} GiB, of which "
        f"{gib(limit)} GiB may be used. Errors are predicted against measured: - is too low, or too fast."
    )
    yield from _reserved(layouts)
    if any(layout["overfull"] for layout in layouts):
        yield (
            "Nothing ends a CPU process that uses more than its profile allows, so a resident peak above that counts "
            "as running out of memory."
        )
    for layout in layouts:
        yield from _finding(layout)
    if result["complete"]:
        yield _calibration(result)


def _reserved(layouts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    errors = [
        peak["predicted_bytes"] / peak["measured_bytes"] - 1
        for layout in layouts
        if layout["error"] is not None and (peak := layout["peaks"].get("reserved")) and peak["predicted_bytes"]
    ]
    if errors:
        yield f"Bytes reserved by torch: {signed_percent(min(errors))} to {signed_percent(max(errors))}."


def _finding(layout: Mapping[str, Any]) -> Iterator[str]:
    number, run = layout["number"], layout["directory"]
    if layout["outcome"] == "died":
        yield (
            f"Run {number} ran out of memory though it was predicted to fit: the prediction of "
            f"{gib(layout['predicted_bytes'])} GiB is too low. Leave more free on this cluster (memory.limit) until "
            "more runs are measured."
        )
    elif layout["outcome"] == "survived":
        peak = layout["peaks"].get(layout["peak_kind"])
        used = "" if peak is None else f" and used {gib(peak['measured_bytes'])} GiB"
        yield (
            f"Run {number} was predicted to run out of memory{used}: the prediction of "
            f"{gib(layout['predicted_bytes'])} GiB is too high."
        )
    elif layout["outcome"] not in ("as predicted", "submitted", "pending", "running", "unknown"):
        yield f"Run {number} ended for another reason ({layout['cause'] or layout['outcome']}): {to_type('logs', run)}"


def _calibration(result: Mapping[str, Any]) -> str:
    about = f"{result['backend']} on {result['accelerator']}"
    answer = result["calibration"]
    if result["layouts"][0]["peak_kind"] == "resident":
        return f"No calibration: resident peaks of {about} say nothing of a GPU."
    if answer is None:
        return f"No calibration: none of these runs of {about} can be priced yet."
    learned = answer["calibration"]
    if learned is None:
        more = answer["runs_needed"]
        return (
            f"No calibration of {about} yet: {answer['why']}. {counted(more, 'more run')} will do: qualify another "
            "model (--model), or train."
        )
    correction, before, after = learned["correction"], learned["errors"]["before"], learned["errors"]["after"]
    change = correction_words(correction["torch_share"], correction["outside_bytes"])
    figures = f"{change}; mean error {100 * before['mape']:.1f} > {100 * after['mape']:.1f} %"
    if answer["did"] == "not taken":
        return f"Proposed calibration of {about}: {figures}. To use it: llmlaunch calibrate"
    return f"Calibration of {about}: {answer['did']}, {answer['why']}."
