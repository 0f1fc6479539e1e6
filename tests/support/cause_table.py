"""The table of causes in docs/causes.md, made from `llmlaunch.causes.kinds`. `make docs-tables` writes it; a test keeps
it equal to the code."""

from __future__ import annotations

from pathlib import Path

from llmlaunch.causes.cause_kind import ENOUGH_SIGNS, ONE_SIGN, CauseKind
from llmlaunch.causes.kinds import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "causes.md"
BEGIN, END = "<!-- the table of causes, made by make docs-tables -->\n", "<!-- end of the table -->\n"
SIGNS = {ENOUGH_SIGNS: "enough", ONE_SIGN: "one"}


def cause_page(page: str) -> str:
    """Return the page with its table as the code has it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    head = "| kind | in words | recognised by | fault | started again by itself | signs against the node |\n"
    head += "|---|---|---|---|---|---|\n"
    return before + BEGIN + head + "".join(map(_row, KINDS.values())) + END + after


def _row(kind: CauseKind) -> str:
    cells = (f"`{kind.name}`", kind.words, kind.recognised_by, kind.fault, kind.retry, SIGNS.get(kind.signs, "none"))
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(cause_page(PAGE.read_text("utf-8")), encoding="utf-8")
