"""Lines of styled text as plain values, and columns that fit a width. No terminal, no library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Column", "Line", "cut", "fitting", "plain", "said", "wrapped"]

Line = tuple[tuple[str, str], ...]
"""Pieces of text, each with a style ("" for none, else words as `bold red`)."""

GAP = 2


def said(text: str, style: str = "") -> Line:
    return ((text, style),)


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def cut(line: Line, width: int) -> Line:
    """The line as far as it fits, without spaces at its end."""
    pieces: list[tuple[str, str]] = []
    for text, style in line:
        pieces.append((text[: max(0, width)], style))
        width -= len(text)
    while pieces and not pieces[-1][0].strip():
        pieces.pop()
    return tuple(pieces)


def wrapped(parts: Sequence[str], width: int, between: str = " | ") -> list[str]:
    """Parts in as few lines as hold them; no part is divided."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(between) + len(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines


@dataclass(frozen=True)
class Column:
    """`keep` is how long it stays where room is short: the lowest goes first. `styles` are of the cells."""

    head: str
    cells: Sequence[str]
    keep: int
    left: bool = False
    styles: Sequence[str] = ()

    @property
    def width(self) -> int:
        return max(len(self.head), *(len(cell) for cell in self.cells)) if self.cells else len(self.head)

    def text(self, row: int | None) -> tuple[str, str]:
        """Of one row, or of the head (None)."""
        if row is None:
            return self._aligned(self.head), "dim"
        return self._aligned(self.cells[row]), self.styles[row] if self.styles else ""

    def _aligned(self, text: str) -> str:
        return text.ljust(self.width) if self.left else text.rjust(self.width)


def fitting(columns: Sequence[Column], width: int) -> tuple[list[Line], int]:
    """The columns that fit as lines, the head first, each cell followed by a gap; and how much of `width` is left.

    A column without a single cell that says anything is left out.
    """
    kept = [column for column in columns if any(cell not in ("", "-") for cell in column.cells)]
    while kept and sum(column.width + GAP for column in kept) > width + GAP:
        kept.remove(min(kept, key=lambda column: column.keep))
    rows = len(columns[0].cells)
    lines = [
        tuple(piece for column in kept for piece in (column.text(row), (" " * GAP, ""))) for row in (None, *range(rows))
    ]
    return lines, max(0, width - sum(column.width + GAP for column in kept))
