"""What `llmlaunch diff` prints, at most 80 columns wide."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from llmlaunch.report.text import one_line
from llmlaunch.units import GIB, duration, gib

WIDTH = 80
TITLES = {
    "recipe": "Recipe",
    "layout": "Layout",
    "techniques": "Techniques",
    "arguments": "Rendered arguments",
    "environment": "Versions and code",
    "memory_terms": "Memory of the worst pipeline rank, GiB, predicted",
    "time_terms": "Time of a step, seconds, predicted",
    "totals": "Altogether, predicted",
}
LEAST = {"memory_terms": 0.005 * GIB, "time_terms": 5e-4}  # a term that changes by less is not shown

Change = Mapping[str, Any]


def difference_text(result: Mapping[str, Any]) -> str:
    """Return the page for a terminal. `result` is what `diff --json` prints."""
    lines = [f"{side.upper()}: {result[side]['kind']} {result[side]['name']}" for side in ("a", "b")]
    for side in ("a", "b"):
        if result[side]["unplanned"]:
            lines += wrap(f"{side.upper()} has no plan: {result[side]['unplanned']}", WIDTH)
        if result[side]["changed_by_runs"]:
            lines += wrap(f"{side.upper()}: {result[side]['changed_by_runs']}", WIDTH)
    for section, title in TITLES.items():
        changes = result[section]
        if changes:
            rows = [row for row in (_row(section, change) for change in changes) if row is not None]
            lines += ["", title, *_columns(rows)] if rows else []
    if result["measured"]:
        lines += ["", "Measured", *_columns([_figures(change) for change in result["measured"]])]
    if not result["differ"]:
        lines += ["", "No difference."]
    silent = [TITLES[section].partition(",")[0].lower() for section in TITLES if result[section] is None]
    if silent:
        lines += ["", *wrap(f"Not compared, because a side does not tell: {', '.join(silent)}.", WIDTH)]
    return "\n".join(one_line(line) for line in lines)


def _row(section: str, change: Change) -> list[str] | None:
    """Return name, A, B and where these are numbers B less A; None for a term that hardly changes."""
    if section in ("memory_terms", "time_terms"):
        before, after = float(change["a"] or 0.0), float(change["b"] or 0.0)
        if abs(after - before) < LEAST[section]:
            return None
        shown = gib if section == "memory_terms" else _seconds
        sign = "+" if after >= before else "-"
        name = str(change["name"]).replace("_", " ")
        return [name, shown(before), shown(after), f"{sign}{shown(abs(after - before))}"]
    if section == "totals":
        return _figures(change)
    return [str(change["name"]), _value(change["a"]), _value(change["b"])]


def _figures(change: Change) -> list[str]:
    """Return a figure of the whole in its unit, and how much of A the change is."""
    name, before, after = str(change["name"]), change["a"], change["b"]
    label = name.removesuffix("_bytes").replace("_", " ")
    if name == "seconds":
        label, texts = "job", [_or_dash(duration, value) for value in (before, after)]
    elif name.endswith(("_bytes", "_bytes_per_node")):
        label, texts = f"{label}, GiB", [_or_dash(gib, value) for value in (before, after)]
    elif name in ("verdict", "layout"):
        return [label, _value(before), _value(after)]
    else:
        texts = [_or_dash(_seconds, value) for value in (before, after)]
    share = f"{100 * (after / before - 1):+.1f} %" if before and after else ""
    return [label, *texts, share]


def _or_dash(shown: Any, value: Any) -> str:
    return "-" if value is None else str(shown(value))


def _seconds(value: float) -> str:
    return f"{value:,.3f}" if value < 1000 else f"{value:,.0f}"


def _value(value: Any) -> str:
    """Return a value as it is written; "-" where there is none, and "set" for an argument without a value."""
    if value in (None, ""):
        return "-" if value is None else "set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows in columns; one that is too long for them as a name with A and B below it."""
    head = ["", "A", "B", *[""] * max(len(row) - 3 for row in rows)]
    short = [row for row in rows if len("  ".join(row)) + 2 <= WIDTH and len(row[0]) <= WIDTH // 2]
    widths = [max((len(row[place]) for row in (head, *short) if place < len(row)), default=0) for place in range(4)]
    fits = 2 + sum(widths) + 6 <= WIDTH
    yield from _lines(head, widths) if fits and short else ()
    for row in rows:
        if fits and any(row is other for other in short):
            yield from _lines(row, widths)
        else:
            yield f"  {row[0]}"
            for side, text in zip("AB", row[1:3], strict=True):
                yield from wrap(text, WIDTH, initial_indent=f"    {side}: ", subsequent_indent="       ")


def _lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    cells = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=False))]
    yield ("  " + "  ".join(cells)).rstrip()
