"""Plain tables for the terminal: aligned columns, no colour, nothing to import."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import repeat

from llmlaunch.rundir.values import printable
from llmlaunch.units import gib

__all__ = ["correction_words", "markdown_table", "one_line", "percent", "print_verdict", "signed_percent", "table"]

VERDICT_COLOURS = {"safe": "green", "tight": "yellow", "unsafe": "red"}


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def signed_percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def correction_words(torch_share: float, outside_bytes: float) -> str:
    """Return what a calibration adds to predictions: torch +3.1 %, outside +0.42 GiB."""
    parts = []
    if torch_share:
        parts.append(f"torch {signed_percent(torch_share)}")
    if outside_bytes:
        sign = "+" if outside_bytes > 0 else "-"
        parts.append(f"outside {sign}{gib(abs(outside_bytes))} GiB")
    return ", ".join(parts) or "none"


def one_line(text: str) -> str:
    """Text from a file or a person as one harmless line (see `printable`); its own line breaks and tabs become "?"."""
    return printable(text).replace("\n", "?").replace("\t", "?")


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ", remarks: Iterable[str] | None = None
) -> str:
    """Text columns: the first to the left, the others to the right. Trailing spaces are cut. `remarks`, one for each
    row, are a last column of prose without a head: to the left, and in full."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    out = []
    for line, remark in zip(lines, repeat("") if remarks is None else ["", *remarks], strict=False):
        cells = [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        out.append((indent + "  ".join([*cells, remark])).rstrip())
    return "\n".join(out)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the rows as a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def print_verdict(text: str, verdict: str, warning: str | None = None) -> None:
    """Write to stdout: the first line, which says the verdict, in its colour; a warning below it in yellow; the other
    lines as they are."""
    headline, _, rest = text.partition("\n")
    caution = [] if warning is None else [f"  {warning}"]
    if not sys.stdout.isatty():
        print("\n".join([headline, *caution, rest]))
        return
    # imported here: a pipe or a script must not wait for it
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(headline, style=f"bold {VERDICT_COLOURS[verdict]}"))
    for line in caution:
        console.print(Text(line, style="yellow"))
    console.print(Text(rest))  # Text: what a person named is never markup
