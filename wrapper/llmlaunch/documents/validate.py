"""A document judged by the form of its keys. What is wrong in it `problems.py` says, which no other run needs."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmlaunch.documents.keys import WrittenKeys, dotted, keys_in, narrowed
from llmlaunch.documents.yaml_strict import Document, KeyPath
from llmlaunch.errors import UserError

_NARROW_FORMS = 3  # of each form; a process that reads more kinds of documents builds the validator of all keys, once


class BadKey(UserError):
    """A wrong value at `key` of a mapping; the caller knows which file the mapping stands in."""

    def __init__(self, key: KeyPath, problem: str) -> None:
        super().__init__(f"{dotted(key)}: {problem}" if key else problem)
        self.key, self.problem = key, problem


def validate(form: Any, document: Document, vocabulary: Path | None = None) -> dict[str, Any]:
    """Return what `document` says of the keys of `form` (`documents/keys.py`), without defaults.

    `vocabulary` is a file of the words that people write for these keys and values (`documents/likely_meaning.py`).
    Raises `UserError` with one line for each of the first few problems.
    """
    validator = _validator(form, keys_in(document.value))
    try:
        values: dict[str, Any] = validator.validate_python(document.value)
        return values
    except ValidationError as error:
        from llmlaunch.documents.problems import problem_of, report, with_exponents

        value = with_exponents(document, error)
    try:
        values = validator.validate_python(value)
    except ValidationError as error:
        # A key that is missing is often the same mistake as one that is unknown: that one stands first.
        errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] == "missing")
        raise report(document, [problem_of(form, document, dict(e), vocabulary) for e in errors]) from None
    return values


def _validator(form: Any, written: WrittenKeys) -> TypeAdapter[Any]:
    """Return what judges a document with these keys: of them alone, which is built soonest, or of all keys."""
    narrow = _narrow_forms[form]
    if len(narrow) < _NARROW_FORMS:
        narrow.add(written)
    return _adapter(narrowed(form, written) if written in narrow else form)


_narrow_forms: defaultdict[Any, set[WrittenKeys]] = defaultdict(set)


@cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)
