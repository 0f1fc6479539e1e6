"""`key=value` overrides of the command line: how they change a recipe, the paths in them, which start in the working
directory, and the variants that several values make."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from llmlaunch.documents.secrets import looks_secret, secret_in
from llmlaunch.documents.validate import validate
from llmlaunch.documents.yaml_strict import Document, KeyPath, parse_value, read_document
from llmlaunch.errors import UserError
from llmlaunch.recipe.containers import is_path
from llmlaunch.recipe.datasets import may_be_of_the_hub
from llmlaunch.recipe.types import VOCABULARY, recipe_form
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import counted, shortened

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


# keys that hold a path; * is a place in a list
PATHS = (
    "backend.path",
    "backend.script",
    "cluster.links.matrix",
    "code.path",
    "data.path",
    "data.blend.*.path",
    "data.validation",
    "data.validation.*.path",
    "data.chat_template",
    "data.cache_path",
    "training.checkpoint_path",
    "training.start_from",
    "training.export",
    "training.export.path",
    "training.tensorboard",
    "tracking.tensorboard",
    "tracking.wandb.save_dir",
    "workdir",
)
_FILES = (".json", ".yaml", ".yml")


def from_working_directory(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides with absolute paths. Those that name no relative path, and those that are no overrides, are
    returned as they are."""
    rows = any(word.startswith("data.format=") for word in overrides)
    return tuple(_absolute_override(word, rows) for word in overrides)


def in_working_directory(spec: str) -> bool:
    """Return whether a word that may be a name is a file or folder of the working directory."""
    try:
        return os.path.exists(spec)  # noqa: PTH110 (pathlib raises for names that are too long)
    except ValueError:
        return False


def _absolute_override(word: str, rows: bool) -> str:
    try:
        path, parsed = parse_override(word)
    except UserError:  # whoever applies it says so
        return word
    value = absolute_paths(parsed.value, "", tuple(path), rows)
    if value == parsed.value:
        return word
    key = word.partition("=")[0]
    plain = isinstance(value, str) and _reads_as(value)
    return f"{key}={value if plain else json.dumps(value)}"


def _reads_as(text: str) -> bool:
    """Return whether YAML reads the text as itself."""
    try:
        return bool(parse_value(text, "").value == text)
    except UserError:
        return False


def absolute_paths(value: Any, folder: str, path: KeyPath = (), rows: bool = False) -> Any:
    """Return a value with every relative path in it made absolute, which starts in `folder`: in the working directory
    where that is empty. `path` holds the keys above the value. Where a folder is given, names of models, clusters and
    images are no paths. Datasets of `rows` may have names of the Hugging Face hub."""
    if isinstance(value, Mapping):
        rows = rows or (tuple(path) == ("data",) and value.get("format") is not None)
        return {key: absolute_paths(item, folder, (*path, key), rows) for key, item in value.items()}
    if isinstance(value, list):
        return [absolute_paths(item, folder, (*path, "*"), rows) for item in value]
    names_path = _MAY_BE_PATHS.get(".".join("*" if is_whole_number(str(part)) else str(part) for part in path))
    if not isinstance(value, str) or names_path is None or not value or value.startswith(("/", "~", "-")):
        return value
    if "://" in value:  # an address, which may hold a secret that is looked for in it as it stands
        return value
    there = os.path.join(folder, value)  # noqa: PTH118 (pathlib drops a leading ./)
    if rows and path[0] == "data" and may_be_of_the_hub(value) and not in_working_directory(there):
        return value
    if folder and names_path is not _always:
        named = names_path is _is_tokenizer and (value.startswith(("./", "../")) or in_working_directory(there))
    else:
        named = "\0" not in value and names_path(value)
    return os.path.abspath(there) if named else value  # noqa: PTH100 (no `..` left)


def _always(spec: str) -> bool:
    return True


def _is_model(spec: str) -> bool:
    """Return whether the model is named by a path; presets and models of the hub have names."""
    from llmlaunch.families.hub_ids import hub_model, is_hub_id, preset_names

    if spec in preset_names():
        return False
    if spec.startswith("./") or spec in (".", "..") or in_working_directory(spec):
        return True
    return ("/" in spec and not is_hub_id(spec)) or (spec.endswith(_FILES) and hub_model(spec) is None)


def is_cluster_path(spec: str) -> bool:
    """Return whether the cluster is named by the path of its profile; others have names."""
    return "/" in spec or spec.endswith(_FILES)


def _is_tokenizer(spec: str) -> bool:
    """Return whether the tokenizer is named by a path; that of the hub has a name."""
    return spec.startswith(("./", "../")) or in_working_directory(spec)


_MAY_BE_PATHS: Mapping[str, Callable[[str], bool]] = {
    **dict.fromkeys(PATHS, _always),
    "model": _is_model,
    "model.base": _is_model,
    "cluster": is_cluster_path,
    "cluster.base": is_cluster_path,
    "container.image": is_path,
    "data.tokenizer": _is_tokenizer,
}
