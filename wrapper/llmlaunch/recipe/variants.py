"""The variants of a recipe: an override with several values, or a grid of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path

from llmlaunch.documents.validate import validate
from llmlaunch.documents.yaml_strict import Document, read_document
from llmlaunch.errors import UserError
from llmlaunch.recipe.overrides import apply_overrides, shown_word
from llmlaunch.recipe.types import VOCABULARY, recipe_form
from llmlaunch.rundir.values import counted

MOST = 1000


def variants(path: str, overrides: Sequence[str], grid: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Return the overrides of each variant of a recipe, the last key's values changing fastest.

    An override `key=a,b,c` gives several variants only if its comma cannot be part of a value: the value is plain (no
    bracket, brace or quote at its start), the recipe accepts no text with commas at that key, and it accepts every
    part. Overrides in `grid` are always split. Without several values there is one variant.

    Raises UserError for a recipe that cannot be read, a grid override without several values, a key given twice if one
    of the two is split, and more than 1000 variants.
    """
    written = read_document(Path(path))
    choices = [_split_anyway(word) for word in grid]
    listed = [word for word in overrides if "," in word.partition("=")[2]]
    single = [word for word in overrides if word not in listed]
    split = set()
    for word in listed:
        parts = _parts(word)
        whole = not parts or _accepted(written, [*single, word])
        if not whole and all(_accepted(written, [*single, part]) for part in parts):
            choices.append(parts)
            split.add(word)
        else:
            single.append(word)
    single = [word for word in overrides if word not in split]  # as they were given: the last word on a key wins
    _refuse_twice(choices, single)
    count = prod(len(parts) for parts in choices)
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
    """Return `key=a,b` as `key=a` and `key=b`; empty if it cannot be split."""
    key, equals, text = word.partition("=")
    values = [value.strip() for value in text.split(",")]
    if not equals or not all(values) or text.strip()[:1] in ("[", "{", '"', "'"):
        return []
    return [f"{key}={value}" for value in values]


def _accepted(written: Document, overrides: Sequence[str]) -> bool:
    """Whether the keys and types of the recipe allow these overrides. Contradictions between keys are found later."""
    try:
        validate(recipe_form(), apply_overrides(written, overrides), VOCABULARY)
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
