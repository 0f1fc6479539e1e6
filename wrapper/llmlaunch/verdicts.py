"""The four verdicts on a plan's memory: their names, which of several counts, what they are shown in, and exit codes.

Every module that compares, colours or counts verdicts takes them from here.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmlaunch.errors import NothingSafe, NoVerdict, UserError

SAFE, TIGHT, UNSAFE, UNKNOWN = "safe", "tight", "unsafe", "unknown"

JUDGED = (SAFE, TIGHT, UNSAFE)
"""The verdicts that follow from a number of bytes, the best first."""

VERDICTS = (*JUDGED, UNKNOWN)

COLOURS = {SAFE: "green", TIGHT: "yellow", UNSAFE: "red", UNKNOWN: "magenta"}
"""The ground of each verdict on a terminal, by click's names."""

EXIT_CODES = {SAFE: 0, TIGHT: NothingSafe.exit_code, UNSAFE: NothingSafe.exit_code, UNKNOWN: NoVerdict.exit_code}
"""The exit code of `check` for each verdict that nobody has accepted."""

_ORDER_OF_CODES = (UserError.exit_code, NoVerdict.exit_code, NothingSafe.exit_code)


def worst_verdict(verdicts: Iterable[str]) -> str:
    """Return the worst of several verdicts on one job, each by a number of bytes. Raises ValueError where there is
    none."""
    return max(verdicts, key=JUDGED.index)


def first_exit_code(codes: Iterable[int]) -> int:
    """Return the exit code that counts where several apply: a person's mistake or a launch that cannot work (2) before
    no verdict (5), that before nothing safe (3); 0 where none applies."""
    present = set(codes) - {0}
    return next((code for code in _ORDER_OF_CODES if code in present), min(present, default=0))


def as_verdict(value: object) -> str | None:
    """Return a verdict that was read from a file; None for anything else."""
    return value if isinstance(value, str) and value in VERDICTS else None
