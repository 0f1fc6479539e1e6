"""A stored case answered anew, and what changed."""

from __future__ import annotations

import traceback
from typing import Any

from support.corpus.difference import differences
from support.corpus.program import answer_of

Row = dict[str, Any]


def changed_rows(row: Row) -> tuple[Row, Any, list[str]]:
    """Return the row, today's answer, and what of it is not equal to the stored one; a traceback is an answer, too."""
    try:
        answer = answer_of(row)
    except Exception:
        answer = {"traceback": traceback.format_exc().splitlines()[-1]}
    return row, answer, list(differences(row["answer"], answer))


def answered(case: Row) -> Row:
    """Return a case with its answer of today."""
    return case | {"answer": answer_of(case)}
