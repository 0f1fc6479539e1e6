"""Paths in `key=value` overrides start in the working directory, where a person types them; those in a recipe start
where it lies. An override is made absolute once, so that what is stored with a run means the same everywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmlaunch.documents.yaml_strict import KeyPath, parse_value
from llmlaunch.errors import UserError
from llmlaunch.recipe.containers import is_path
from llmlaunch.recipe.overrides import parse_override
from llmlaunch.rundir.foreign_values import is_whole_number

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
    "data.cache_path",
    "training.checkpoint_path",
    "training.start_from",
    "training.tensorboard",
    "tracking.tensorboard",
    "tracking.wandb.save_dir",
    "workdir",
)
_FILES = (".json", ".yaml", ".yml")


def from_working_directory(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides with absolute paths. Those that name no relative path, and those that are no overrides, are
    returned as they are."""
    return tuple(map(_absolute_override, overrides))


def in_working_directory(spec: str) -> bool:
    """Return whether a word that may be a name is a file or folder of the working directory."""
    try:
        return os.path.exists(spec)  # noqa: PTH110 (pathlib raises for names that are too long)
    except ValueError:
        return False


def _absolute_override(word: str) -> str:
    try:
        path, parsed = parse_override(word)
    except UserError:  # whoever applies it says so
        return word
    value = absolute_paths(parsed.value, "", tuple(path))
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


def absolute_paths(value: Any, folder: str, path: KeyPath = ()) -> Any:
    """Return a value with every relative path in it made absolute, which starts in `folder`: in the working directory
    where that is empty. `path` holds the keys above the value. Where a folder is given, names of models, clusters and
    images are no paths."""
    if isinstance(value, Mapping):
        return {key: absolute_paths(item, folder, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [absolute_paths(item, folder, (*path, "*")) for item in value]
    names_path = _MAY_BE_PATHS.get(".".join("*" if is_whole_number(str(part)) else str(part) for part in path))
    if not isinstance(value, str) or names_path is None or not value or value.startswith(("/", "~", "-")):
        return value
    if "://" in value:  # an address, which may hold a secret that is looked for in it as it stands
        return value
    there = os.path.join(folder, value)  # noqa: PTH118 (pathlib drops a leading ./)
    if folder and names_path is not _always:
        named = names_path is _is_tokenizer and (value.startswith(("./", "../")) or in_working_directory(there))
    else:
        named = "\0" not in value and names_path(value)
    return os.path.abspath(there) if named else value  # noqa: PTH100 (no `..` left)


def _always(spec: str) -> bool:
    return True


def _is_model(spec: str) -> bool:
    """Return whether the model is named by a path; presets and models of the hub have names."""
    from llmlaunch.families.hub_ids import hub_model, is_hub_id
    from llmlaunch.families.presets import preset_names

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
