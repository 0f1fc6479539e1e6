"""`key=value` overrides of the command line: how they change a recipe, how one with several values makes variants, and
where in its file or in which override a recipe has a value."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from llmlaunch.documents.secrets import looks_secret, secret_in
from llmlaunch.documents.validate import validate
from llmlaunch.documents.yaml_strict import Document, KeyPath, parse_document, parse_value, read_document
from llmlaunch.errors import UserError
from llmlaunch.frozen import frozen
from llmlaunch.recipe.types import VOCABULARY, Recipe, recipe_form
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import counted, shortened

__all__ = [
    "WrittenPin",
    "apply_overrides",
    "is_written",
    "parse_override",
    "place_of",
    "shown_word",
    "variants",
    "written_document",
    "written_pin",
]

# the key for which a plain word in the place of a mapping stands
SHORTHAND = {"model": "base", "cluster": "base", "accelerator": "base", "backend": "name", "nodes": "count"}

# two keys for the same thing: an override of one replaces the other of the file
RIVALS: dict[KeyPath, KeyPath] = {
    ("training", "steps"): ("training", "tokens"),
    ("training", "tokens"): ("training", "steps"),
}


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """The document with each `dotted.key=value` set; values are YAML, read as strictly as the file.

    What is not there is created; a word where a mapping is wanted becomes the mapping it stands for
    (`cluster: h100-80gb-x8` and `cluster.devices_per_node=4`). A number in a key is a place in a list. What says the
    same as the key in another way (`training.steps` and `training.tokens`) is taken out. Raises `UserError` naming the
    word.
    """
    if not overrides:
        return document
    value = deepcopy(document.value)
    places, raw = dict(document.places), dict(document.raw)
    for word in overrides:
        path, parsed = parse_override(word)
        real = _set(value, path, parsed.value, parsed.name)
        if real in RIVALS:
            _remove(value, RIVALS[real])
        for table in (places, raw):
            for key in [k for k in table if k[: len(real)] == real]:
                del table[key]
        for length in range(1, len(real) + 1):  # mappings made on the way, and a value that is empty
            places.setdefault(real[:length], parsed.name)
        places |= {real + key: place for key, place in parsed.places.items()}
        raw |= {real + key: text for key, text in parsed.raw.items()}
    return replace(document, value=value, places=places, raw=raw)


def parse_override(word: str) -> tuple[tuple[str, ...], Document]:
    """Return the keys of a `dotted.key=value` override, and its value. Raises `UserError` naming the override."""
    key, equals, text = word.partition("=")
    shown = shown_word(word)
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise UserError(f"override {shown}: is not key=value; {_as_override(word)}")
    if not text.strip():
        raise UserError(
            f"override {shown}: has no value; write one behind the =, leave the override out, or take the key out of "
            f"the recipe with {shown.strip()}null"
        )
    return path, parse_value(text, f"override {shown}")


def _as_override(word: str) -> str:
    """Return how a word that is no override is written as one."""
    if word.endswith((".yaml", ".yml")):
        return "a command takes one recipe, and overrides behind it such as training.steps=100"
    key, colon, value = word.partition(":")
    if re.fullmatch(r"[a-z_]\w*(\.\w+)*", word):
        return f"write {word}=VALUE, without spaces around the ="
    if colon and value.strip() and all(key.strip().split(".")) and "/" not in key:
        return f"did you mean {shown_word(f'{key.strip()}={value.strip()}')}?"
    return "write for example training.steps=100"


def _set(tree: Any, path: tuple[str, ...], value: Any, name: str) -> KeyPath:
    """Set `value` at `path` and return the real path, with places in lists as numbers."""
    real: list[str | int] = []
    node = tree
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            index = _index(part, node, name)
            real.append(index)
            if last:
                node[index : index + 1] = [value]
            else:
                node = _enter(node, index, part)
            continue
        real.append(part)
        if last:
            node[part] = value
        else:
            node = _enter(node, part, part)
    return tuple(real)


def _remove(tree: Any, path: KeyPath) -> None:
    for part in path[:-1]:
        tree = tree[part]
    tree.pop(path[-1], None)


def _enter(node: Any, key: Any, part: str) -> Any:
    """Return the mapping or list below `key`, created from the value that is there."""
    below = node.get(key) if isinstance(node, dict) else node[key]
    if isinstance(below, (dict, list)):
        return below
    node[key] = {SHORTHAND[part]: below} if part in SHORTHAND and isinstance(below, (str, int)) else {}
    if part == "code" and below == "snapshot":
        node[key] = {"snapshot": True}
    return node[key]


def _index(part: str, items: list[Any], name: str) -> int:
    if is_whole_number(part) and len(part) < 7 and int(part) <= len(items):
        return int(part)
    raise UserError(f"{name}: {part!r} is no place in a list of {len(items)}; count from 0, or give the whole list")


def shown_word(word: str) -> str:
    """Return an override as messages show it: without the value of an environment variable or of what looks like a
    secret.
    """
    key, _, value = word.partition("=")
    if word.startswith(("environment.", "slurm.export")) or looks_secret(key) or secret_in(value) is not None:
        word = word.partition("=")[0] + "=..."
    text = word if word.isprintable() else ascii(word)
    return shortened(text, 80)


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


@frozen
class WrittenPin:
    """A pin as the recipe writes it: its dotted key, its place ("recipe.yaml:12"), and how a value is written."""

    key: str
    place: str
    value: Callable[[object], object]


def place_of(recipe: Recipe, path: KeyPath) -> str:
    """Return the place of the value at `path`, or of the nearest enclosing value that exists."""
    document = written_document(recipe)
    return recipe.path if document is None else document.where(path)


def is_written(recipe: Recipe, path: KeyPath) -> bool:
    """Return whether the recipe, or an override, gives the key at `path` a value; true for a recipe without a text."""
    document = written_document(recipe)
    value = None if document is None else document.value
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return document is None or value is not None


def written_pin(recipe: Recipe, name: str) -> WrittenPin:
    """Return how the recipe writes the pin `name`; it may write `zero_stage` 0 or 1 as `distributed_optimizer`."""
    document = written_document(recipe)
    layout = document.value.get("layout") if document is not None else None
    if name == "zero_stage" and isinstance(layout, dict) and layout.get("distributed_optimizer") is not None:
        return WrittenPin("layout.distributed_optimizer", place_of(recipe, ("layout", "distributed_optimizer")), bool)
    return WrittenPin(f"layout.{name}", place_of(recipe, ("layout", name)), lambda value: value)


def written_document(recipe: Recipe) -> Document | None:
    """Return the recipe as it was written, with the overrides of the command line, or None for one without a text."""
    if recipe.document is not None or not recipe.text:
        return recipe.document
    return apply_overrides(parse_document(recipe.text, recipe.path), recipe.overrides)
