"""`key=a,b,c` words: one recipe, several values; every combination of them is a variant.

A word is split at its commas only where that cannot be anything else: its value is plain (no bracket, brace or quote
at its start), the recipe takes no text with commas at that key (a number, a yes or no, one of a few words), and it
takes every part. Everywhere else a comma is part of the value; `grid` words are split whatever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from llmlaunch.documents.validate import validate
from llmlaunch.documents.yaml_strict import Document, read_document
from llmlaunch.errors import UserError
from llmlaunch.recipe.load import HINTS
from llmlaunch.recipe.overrides import apply_overrides, shown_word
from llmlaunch.recipe.types import recipe_form
from llmlaunch.rundir.messages import counted

__all__ = ["variants"]

MOST = 1000


def variants(path: str, words: Sequence[str], grid: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The override words of each variant, the last key's values changing fastest; one where nothing is split.

    Raises UserError for a recipe that cannot be read, a grid word without several values, a key given twice where one
    is split, and more than 1000 variants.
    """
    written = read_document(Path(path))
    choices = [_split_anyway(word) for word in grid]
    listed = [word for word in words if "," in word.partition("=")[2]]
    single = [word for word in words if word not in listed]
    split = set()
    for word in listed:
        parts = _parts(word)
        if parts and not _taken(written, [*single, word]) and all(_taken(written, [*single, part]) for part in parts):
            choices.append(parts)
            split.add(word)
        else:
            single.append(word)
    single = [word for word in words if word not in split]  # as they were given: the last word on a key wins
    _refuse_twice(choices, single)
    count = 1
    for parts in choices:
        count *= len(parts)
    if count > MOST:
        raise UserError(f"{path}: {counted(count, 'combination')}; {MOST} is the most that is submitted at once")
    # Words that stay single come first: a key they set may hold one of the others.
    return [(*single, *combination) for combination in product(*choices)]


def _split_anyway(word: str) -> list[str]:
    parts = _parts(word)
    if len(parts) < 2:
        raise UserError(f"--grid {shown_word(word)}: does not name several values; write for example --grid model=a,b")
    return parts


def _parts(word: str) -> list[str]:
    """`key=a,b` as `key=a` and `key=b`; nothing where it cannot be split."""
    key, equals, text = word.partition("=")
    values = [value.strip() for value in text.split(",")]
    if not equals or not all(values) or text.strip()[:1] in ("[", "{", '"', "'"):
        return []
    return [f"{key}={value}" for value in values]


def _taken(written: Document, words: Sequence[str]) -> bool:
    """Whether the recipe's schema takes these words; whether they go together is for later to say."""
    try:
        validate(recipe_form(), apply_overrides(written, words), HINTS)
    except UserError:
        return False
    return True


def _refuse_twice(choices: Sequence[Sequence[str]], single: Sequence[str]) -> None:
    keys = [parts[0].partition("=")[0].strip() for parts in choices]
    others = [word.partition("=")[0].strip() for word in single]
    for parts in choices:
        if len(set(parts)) < len(parts):
            raise UserError(f"{shown_word(parts[0])}: a value is named twice; two runs would be the same")
    for key in keys:
        if keys.count(key) > 1 or key in others:
            raise UserError(f"{key}: is given twice, and once with several values; leave one out")
