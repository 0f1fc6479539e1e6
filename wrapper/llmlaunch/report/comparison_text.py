"""What `llmlaunch compare` prints, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from llmlaunch.planner.plan import verdict_with_risk
from llmlaunch.report.text import one_line, table
from llmlaunch.rundir.values import counted

WIDTH = 80
LONGEST_NAME = 20
HEAD = ["cluster", "nodes", "days", "95 %", "GPU-hours", "USD", "s/step", "MFU"]
NOTE = (
    "days, GPU-hours and USD are those of check: no stops, no queue. 95 %: days within which the job ends in 95 cases "
    "of 100, saves and stops nobody planned included."
)
UNFOLDED = 10_000  # columns: a row is one line, whose layout stands below it
SUPERLATIVES = {"days": "Fastest", "gpu_hours": "Fewest GPU-hours", "usd": "Cheapest"}

Cell = Mapping[str, Any]


def comparison_text(result: Mapping[str, Any]) -> str:
    """Return the page for a terminal. `result` is what `compare --json` prints."""
    cells = result["cells"]
    able = [cell for cell in cells if cell["refused"] is None]
    slow = [cell for cell in cells if cell["refused"] is not None and cell["check"] is not None and _beyond(cell)]
    refused = [cell for cell in cells if cell["refused"] is not None and cell not in slow]
    lines = [f"{result['recipe']}: {counted(len(able), 'choice')} of {len(cells)} may run, by days"]
    lines += _table(able) + _superlatives(result)
    if slow:
        lines += ["", f"Beyond the budget ({_budget(result['budget'])}):", *_table(slow)]
    if refused:
        lines += ["", "May not run:", *(line for cell in refused for line in _refusal(cell))]
    lines += ["", *wrap(NOTE, WIDTH)]
    return "\n".join(one_line(line) for line in lines)


def _beyond(cell: Cell) -> bool:
    return bool((cell["check"]["budget"] or {}).get("beyond"))


def _table(cells: Sequence[Cell]) -> list[str]:
    """Return two lines a cell: its figures, and its layout below them."""
    if not cells:
        return []
    figures = table(HEAD, [_row(cell) for cell in cells], columns=UNFOLDED).split("\n")
    lines = ["", figures[0]]
    for cell, row in zip(cells, figures[1:], strict=True):
        priced = "checked, not rendered: " if cell["check"]["unrendered"] else ""
        text = f"{priced}{_verdict(cell)}: {cell['layout']}"
        lines += [row, *wrap(text, WIDTH, initial_indent="    ", subsequent_indent="      ")]
    return lines


def _verdict(cell: Cell) -> str:
    """Return the verdict with its risk, and that a tight one is accepted."""
    memory = cell["check"]["memory"]
    accepted = "" if cell["verdict"] == "safe" else ", accepted"
    return verdict_with_risk(str(cell["verdict"]), memory["stated_risk"], memory["peak_kind"]) + accepted


def _row(cell: Cell) -> list[str]:
    check = cell["check"]
    price = "-" if cell["usd"] is None else f"{cell['usd']:,.0f}"
    late = _late(cell)
    mfu = "-" if check["mfu"] is None else f"{check['mfu']:.0%}"
    figures = [_days(cell["days"]), late, f"{cell['gpu_hours']:,.0f}", price, f"{check['step_seconds']:.2f}", mfu]
    return [_name(cell), str(cell["nodes"]), *figures]


def _late(cell: Cell) -> str:
    """Return the days within which the job ends almost surely: `-` where nobody knows how far its step time is off."""
    expected = cell["check"]["job"]["expected"]
    if cell["p95_days"] is not None:
        return _days(cell["p95_days"])
    return "-" if expected and expected["step_time_spread"] is None and expected["p50_seconds"] is not None else "never"


def _name(cell: Cell) -> str:
    name = str(cell["cluster"])
    return name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"


def _days(days: float) -> str:
    return f"{days:.2g}" if days < 0.1 else f"{days:.2f}" if days < 10 else f"{days:,.1f}"


def _superlatives(result: Mapping[str, Any]) -> list[str]:
    """Return which choice is best by each figure; nothing where one choice alone may run."""
    if sum(cell["refused"] is None for cell in result["cells"]) < 2:
        return []
    places = ((SUPERLATIVES[figure], place) for figure, place in result["best"].items() if place is not None)
    parts = (f"{word}: {_label(result['cells'][place])}" for word, place in places)
    return ["", *wrap(". ".join(parts) + ".", WIDTH)]


def _label(cell: Cell) -> str:
    return f"{cell['cluster']} x {cell['nodes']}" if cell["nodes"] else str(cell["cluster"])


def _refusal(cell: Cell) -> Iterator[str]:
    text = f"{_label(cell)}: {cell['refused']}"
    yield from wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _budget(budget: Mapping[str, Any]) -> str:
    units = (("days", "day"), ("gpu_hours", "GPU-hour"))
    return ", ".join(counted(budget[key], unit, ",.10g") for key, unit in units if budget[key] is not None)
