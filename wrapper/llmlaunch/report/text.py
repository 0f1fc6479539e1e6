"""Plain tables and verdicts for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import repeat
from textwrap import wrap

import click

from llmlaunch.report.terminal import Surface, shown_on
from llmlaunch.rundir.values import printable
from llmlaunch.units import gib
from llmlaunch.verdicts import COLOURS

FOLD = "    "  # before the columns of a row that go on below it


def paragraph(text: str, most_lines: int | None = None) -> list[str]:
    """Return a text as lines of a screen of 80 columns, set in by two; none where it is empty. Flags, paths and names
    stay whole, so that a person can copy them."""
    return wrap(
        text,
        80,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
        max_lines=most_lines,
        placeholder=" ...",
    )


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
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    indent: str = "  ",
    remarks: Iterable[str] | None = None,
    columns: int | None = None,
) -> str:
    """Text columns: the first to the left, the others to the right. Trailing spaces are cut. `remarks`, one for each
    row, are a last column of prose without a head: to the left, and in full.

    On a screen that is too narrow, stdout's unless `columns` says how wide it is, the last columns of every row go on
    in lines below it, set in: nothing is cut."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    columns = shown_on().width if columns is None else columns
    pieces = _pieces(widths, columns, indent)
    out = []
    for line, remark in zip(lines, repeat("") if remarks is None else ["", *remarks], strict=False):
        for begin, end in pieces:
            cells = [line[i].ljust(widths[i]) if i == begin else line[i].rjust(widths[i]) for i in range(begin, end)]
            out.append(f"{indent}{FOLD if begin else ''}" + "  ".join(cells))
        if columns is not None and remark and len(f"{out[-1]}  {remark}") > columns:
            set_in = f"{indent}{FOLD}"
            out += wrap(remark, columns, initial_indent=set_in, subsequent_indent=set_in, break_long_words=False)
        else:
            out[-1] += f"  {remark}"
    return "\n".join(text.rstrip() for text in out)


def _pieces(widths: Sequence[int], columns: int | None, indent: str) -> list[tuple[int, int]]:
    """Return the first and one past the last column of each line that a row takes."""
    begins, room = [0], sys.maxsize if columns is None else columns - len(indent)
    used = widths[0]
    for i, width in enumerate(widths[1:], 1):
        used += len("  ") + width
        if used > room:
            begins.append(i)
            used = len(FOLD) + width
    return list(zip(begins, [*begins[1:], len(widths)], strict=True))


def print_verdict(text: str, verdict: str) -> None:
    """Write to stdout: the verdict on the first line in its colour, the other lines as they are."""
    headline, _, rest = printable(text).partition("\n")
    click.echo("\n".join([with_coloured_verdict(headline, verdict, shown_on()), rest]))


def with_coloured_verdict(line: str, verdict: str, surface: Surface) -> str:
    """Return the line with its verdict on a ground of its own colour, which light and dark screens show alike."""
    word = next((word for word in COLOURS if f": {word}" in line), None)
    if word is None or not surface.colours:
        return line
    return line.replace(f": {word}", f": {click.style(word, fg='black', bg=COLOURS[verdict])}", 1)
