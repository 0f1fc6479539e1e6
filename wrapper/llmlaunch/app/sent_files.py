"""Which files `--on HOST` sends: the recipe, its lock, and what it names by relative paths: the model's config.json,
cluster profiles, and the code. They lie below the folder that the person is in, and come to the same places below the
folder on the host, so every relative path means the same there."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlaunch.app.messages import Notify
from llmlaunch.app.planned_run import lock_path
from llmlaunch.app.variants import Variant
from llmlaunch.documents.secrets import holds_secret, refuse_secrets
from llmlaunch.documents.yaml_strict import KeyPath, read_document
from llmlaunch.errors import UserError
from llmlaunch.recipe.load import refuse_written_secrets
from llmlaunch.recipe.overrides import is_cluster_path, parse_override
from llmlaunch.rendering.git import listed
from llmlaunch.rendering.provenance import LIMIT_BYTES, snapshot_of

_MODEL, _CLUSTER = ("model", "model.base"), ("cluster", "cluster.base")
_MATRIX, _SCRIPT, _TREES = "cluster.links.matrix", "backend.script", ("backend.path", "code.path")
_SENT = (*_MODEL, *_CLUSTER, _MATRIX, _SCRIPT, *_TREES)

Named = tuple[str, Path]
"""A key, and the file or folder of this machine that its value names."""


@dataclass
class SentFiles:
    """`files` by their places below the folder, and the places where none may be left: of locks that are not here."""

    files: dict[str, Path] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)


def sent_files(variants: Iterable[Variant], notify: Notify) -> SentFiles:
    """Return what the recipes of these runs need on the host. `notify` is told what stays here.

    Raises UserError where a file lies outside of the working directory or holds a secret, and where all of them are too
    large.
    """
    sent = SentFiles()
    for variant in variants:
        _add_recipe(sent, variant, notify)
    total = sum(path.lstat().st_size for path in sent.files.values())
    if total > LIMIT_BYTES:
        raise UserError(
            f"--on: what the recipe names is {total / 2**20:.0f} MiB, and no more than {LIMIT_BYTES // 2**20} MiB is "
            "sent; copy the code there once, and name it by its absolute path there"
        )
    return sent


def place_of_file(path: str | Path) -> str:
    """Return the path of a file from the working directory, which it has on the host, too. Raises UserError for a file
    that lies elsewhere."""
    name = os.path.relpath(path)
    if name == ".." or name.startswith("../"):
        raise UserError(
            f"{path}: lies outside of {Path.cwd()}; --on sends what lies in the folder you are in, so change to the "
            "one that holds the recipe and what it names"
        )
    return name


def _add_recipe(sent: SentFiles, variant: Variant, notify: Notify) -> None:
    recipe, lock = Path(variant.recipe), lock_path(variant.recipe)
    document = read_document(recipe)
    not_secrets = document.value.get("not_secrets")
    refuse_written_secrets(document, variant.overrides, not_secrets)
    _add(sent, recipe)
    if lock.is_file():
        _add(sent, lock)
    else:
        sent.absent.append(place_of_file(lock))
    named = list(_named(document.value, recipe.parent))
    for word in variant.overrides:
        keys, parsed = parse_override(word)
        named += _named(parsed.value, Path(), keys)
    for key, path in named:
        if key in _CLUSTER:
            _add_profile(sent, path)
        elif key in _MODEL and path.is_dir():
            _add(sent, path / "config.json")
        elif key not in _TREES:
            _add(sent, path)
    for root in _trees(named):
        _add_tree(sent, root, not_secrets if isinstance(not_secrets, list) else (), notify)


def _named(value: Any, folder: Path, path: KeyPath = ()) -> Iterator[Named]:
    """Yield what the keys of a value name by relative paths that lead somewhere on this machine; others mean the
    host's."""
    key = ".".join(map(str, path))
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _named(item, folder, (*path, name))
    elif isinstance(value, str) and key in _SENT and not value.startswith(("/", "~")):
        yield from [(key, folder / value)] if _is_here(key, folder, value) else []


def _is_here(key: str, folder: Path, value: str) -> bool:
    return os.path.exists(folder / value) and (key not in _CLUSTER or is_cluster_path(value))  # noqa: PTH110 (no OSError)


def _trees(named: Collection[Named]) -> list[Path]:
    """Return the folders of code; of a script that lies in none of them its own."""
    trees = [path for key, path in named if key in _TREES]
    scripts = [path for key, path in named if key == _SCRIPT]
    return [*trees, *(script.parent for script in scripts if not any(map(script.is_relative_to, trees)))]


def _add(sent: SentFiles, path: Path) -> None:
    """Add a file, or what a link names."""
    if holds_secret(path.resolve()):
        raise UserError(f"{path}: holds what looks like a secret, so nothing was sent; take it out")
    sent.files[place_of_file(path)] = path.resolve()


def _add_profile(sent: SentFiles, path: Path) -> None:
    """Add a cluster profile, its matrix, and the profiles it starts from."""
    if place_of_file(path) in sent.files:
        return
    document = read_document(path)
    refuse_secrets(document, document.value.get("not_secrets"))
    _add(sent, path)
    for key, beside in _named(document.value, path.parent, ("cluster",)):
        if key in _CLUSTER:
            _add_profile(sent, beside)
        elif key == _MATRIX:
            _add(sent, beside)


def _add_tree(sent: SentFiles, root: Path, not_secrets: Collection[str], notify: Notify) -> None:
    """Add what git tracks in a folder, as it lies in the working tree, or without git all of it."""
    snapshot = snapshot_of(root, not_secrets, "--on")
    if snapshot.left_out:
        notify(f"warning: these files look as if they held secrets, and stay here: {listed(snapshot.left_out)}")
    for name in snapshot.files:
        sent.files.setdefault(place_of_file(root / name), root / name)
