"""The advice that every screen shows about a cause, and `observe` at its end: the table's, without what cannot be done
to a run that llmlaunch did not submit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .cause import advice

if TYPE_CHECKING:
    from collections.abc import Mapping


_RESUME = re.compile(r"\bresumes?\b")
_KEYS_OF_A_RECIPE = re.compile(r"\b(on_oom|on_bad_loss|preflight)\b")  # that change what llmlaunch does after an end


def advice_to(cause: Mapping[str, Any], *, submitted: bool) -> str:
    """Return what a person can do about a cause; "" where the cause is not known.

    `submitted` is False for a run that llmlaunch did not submit and cannot resume (`observe`): nothing of the text
    proposes `resume` then, or a key of a recipe that has llmlaunch go on by itself.
    """
    if not cause.get("kind"):
        return ""
    text = advice(cause)
    return text if submitted else _without_resume(text)


def _without_resume(text: str) -> str:
    """Return the advice without the clauses that need a run of llmlaunch. Where `resume` follows a colon, it is what
    to do at once, so the person's own script takes its place."""
    sentences = []
    for sentence in re.split(r"(?<=\.) +", text):
        clauses = [_for_own_script(clause) for clause in sentence.rstrip(".").split("; ")]
        kept = "; ".join(clause for clause in clauses if clause)
        sentences += [f"{kept}."] if kept else []
    return " ".join(sentences)


def _for_own_script(clause: str) -> str:
    if _KEYS_OF_A_RECIPE.search(clause):
        return ""
    if not _RESUME.search(clause):
        return clause
    about, colon, act = clause.partition(": ")
    if colon and not _RESUME.search(about) and _RESUME.match(act):
        return f"{about}: submit your script again"
    return ""
