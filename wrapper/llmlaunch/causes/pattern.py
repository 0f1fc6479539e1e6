"""The form of a row that names a cause: of `patterns.py`, and of each framework's `failures.py`."""

from __future__ import annotations

from typing import NamedTuple


class Pattern(NamedTuple):
    """`expression` found in a line means `cause`, a name in `kinds.KINDS`. Its named groups become facts of the record.

    `source` says where the line comes from: a program's version and file. `sick`: that host is at fault, and the next
    job should avoid it. `consequence`: the line only reports that something else went wrong, often on another node.
    `phase`: it counts only where the line ends a traceback through a frame of that phase. `after`: one of these words
    comes earlier in the line. An expression must cost no more than about its line's length wherever it begins to match,
    since logs may be hostile: repeats have an upper limit.
    """

    cause: str
    expression: str
    source: str
    sick: bool = False
    consequence: bool = False
    phase: str = ""
    after: tuple[str, ...] = ()


class Frame(NamedTuple):
    """A line of a traceback that shows what a framework was doing: `phase` is what. An exception that leaves it, and
    that no pattern names, means `cause`, if any."""

    phase: str
    expression: str
    source: str
    cause: str = ""
