"""`key=value` overrides of the command line, and how they change a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from llmlaunch.documents.secrets import looks_secret, secret_in
from llmlaunch.documents.yaml_strict import Document, KeyPath, parse_value
from llmlaunch.errors import UserError
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import shortened

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
