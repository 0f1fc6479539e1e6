"""`key=value` words of the command line, applied to a recipe before it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmlaunch.documents.secrets import looks_secret, secret_in
from llmlaunch.documents.yaml_strict import Document, KeyPath, parse_value
from llmlaunch.errors import UserError

__all__ = ["apply_overrides", "parse_override", "shown_word"]

# the key for which a plain word in the place of a mapping stands
SHORTHAND = {"model": "base", "cluster": "base", "accelerator": "base", "backend": "name"}

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
    value = _copy(document.value)
    places, raw = dict(document.places), dict(document.raw)
    for word in overrides:
        path, parsed = parse_override(word)
        real = _set(value, path, parsed.value, parsed.name)
        if real in RIVALS:
            _remove(value, RIVALS[real])
        for table in (places, raw):
            for key in [k for k in table if k[: len(real)] == real]:
                del table[key]
        for length in range(1, len(real)):  # mappings made on the way
            places.setdefault(real[:length], parsed.name)
        places |= {real + key: place for key, place in parsed.places.items()}
        raw |= {real + key: text for key, text in parsed.raw.items()}
    return replace(document, value=value, places=places, raw=raw)


def parse_override(word: str) -> tuple[tuple[str, ...], Document]:
    """The keys of a `dotted.key=value` word, and its value. Raises `UserError` naming the word."""
    key, equals, text = word.partition("=")
    shown = shown_word(word)
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise UserError(f"override {shown}: is not key=value; write for example training.steps=100")
    return path, parse_value(text, f"override {shown}")


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
    """The mapping or list below `key`, made from what stands there."""
    below = node.get(key) if isinstance(node, dict) else node[key]
    if isinstance(below, (dict, list)):
        return below
    node[key] = {SHORTHAND[part]: below} if part in SHORTHAND and isinstance(below, str) else {}
    if part == "code" and below == "snapshot":
        node[key] = {"snapshot": True}
    return node[key]


def _index(part: str, items: list[Any], name: str) -> int:
    if part.isascii() and part.isdigit() and len(part) < 7 and int(part) <= len(items):
        return int(part)
    raise UserError(f"{name}: {part!r} is no place in a list of {len(items)}; count from 0, or give the whole list")


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def shown_word(word: str) -> str:
    """The word for a message; the value of an environment variable, or what looks like a secret, is not repeated."""
    key, _, value = word.partition("=")
    if word.startswith(("environment.", "slurm.export")) or looks_secret(key) or secret_in(value) is not None:
        word = word.partition("=")[0] + "=..."
    text = word if word.isprintable() else ascii(word)
    return text if len(text) <= 80 else text[:77] + "..."
