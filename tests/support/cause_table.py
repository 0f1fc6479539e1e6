"""The tables of causes in docs/causes.md and of their advice in docs/my-run-failed.md, made from
`llmlaunch.causes.kinds`. `make docs-tables` writes them; a test keeps them equal to the code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from llmlaunch.causes.cause import advice
from llmlaunch.causes.cause_kind import ENOUGH_SIGNS, ONE_SIGN, CauseKind
from llmlaunch.causes.kinds import KINDS

DOCS = Path(__file__).parents[2] / "docs"
END = "<!-- end of the table -->\n"
SIGNS = {ENOUGH_SIGNS: "enough", ONE_SIGN: "one"}


def cause_page(page: str) -> str:
    """Return docs/causes.md with its table as the code has it."""
    head = ("kind", "in words", "recognised by", "fault", "started again by itself", "signs against the node")
    return _with_table(page, "causes", head, map(_cause, KINDS.values()))


def advice_page(page: str) -> str:
    """Return docs/my-run-failed.md with its table as the code has it: what is advised where a log says no more."""
    causes: dict[str, list[str]] = {}
    for kind in KINDS.values():
        causes.setdefault(advice({"kind": kind.name}), []).append(kind.words)
    return _with_table(
        page, "advice", ("cause", "what to do"), ((", ".join(words), text) for text, words in causes.items())
    )


PAGES = {DOCS / "causes.md": cause_page, DOCS / "my-run-failed.md": advice_page}


def _with_table(page: str, name: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    begin = f"<!-- the table of {name}, made by make docs-tables -->\n"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    lines = (f"| {' | '.join(cells)} |\n" for cells in (head, *rows))
    table = "".join(lines).replace("\n", f"\n|{'---|' * len(head)}\n", 1)
    return before + begin + table + END + after


def _cause(kind: CauseKind) -> Sequence[str]:
    signs = SIGNS.get(kind.signs, "none")
    return f"`{kind.name}`", kind.words, kind.recognised_by, kind.fault, kind.retry, signs


if __name__ == "__main__":
    for path, made in PAGES.items():
        path.write_text(made(path.read_text("utf-8")), encoding="utf-8")
