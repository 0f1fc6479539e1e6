"""Plain tables for the terminal: aligned columns, no colour, nothing to import."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmlaunch.rundir.identifiers import printable

__all__ = ["one_line", "percent", "table"]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def one_line(text: str) -> str:
    """Text from a file or a person as one harmless line (see `printable`); its own line breaks and tabs become "?"."""
    return printable(text).replace("\n", "?").replace("\t", "?")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Text columns: the first to the left, the others to the right. Trailing spaces are cut."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    out = []
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        out.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(out)
