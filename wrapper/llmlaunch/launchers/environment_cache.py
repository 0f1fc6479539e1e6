"""What was learned once about a training environment, kept until the environment changes: its packages, as `llmlaunch
doctor --container` probes them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmlaunch.launchers.run_environment import INTERPRETER_VARIABLE
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.types import Recipe
from llmlaunch.user_data import with_home

MOST_KEPT = 100
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")


def environment_key(container: Container | None, python: str | None) -> str | None:
    """Return a key for one state of a training environment: an image by its digest, or by its path and modification
    time; an interpreter by its path and the time at which a package was last installed. Return None if the recipe names
    neither."""
    if container is not None:
        digest = _DIGEST.search(container.image)
        inside = f" {python}" if python else ""
        return f"image {digest[1] if digest else container.image + _written(Path(container.image))}{inside}"
    if python is None:
        return None
    packages = sorted(Path(python).parent.parent.glob("lib/python3*/site-packages"))
    return f"python {python}" + "".join(_written(folder) for folder in packages[:1])


def _written(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        state = path.stat()
        return f" {state.st_mtime_ns} {state.st_size}"
    return ""


def probed_packages(recipe: Recipe) -> Mapping[str, str] | None:
    """Return the versions of the packages in the recipe's environment, by name, or None if it was not probed."""
    python = recipe.python if recipe.container else recipe.python or os.environ.get(INTERPRETER_VARIABLE)
    key = environment_key(recipe.container, python)
    entry = None if key is None else cached_probe(key)
    return None if entry is None else entry["packages"]


def cached_probe(key: str) -> dict[str, Any] | None:
    """Return what `cache_probe` stored under the key, or None if there is nothing readable."""
    from llmlaunch.rundir.files import read_object

    entry = (read_object(cache_file("frameworks.json")) or {}).get(key)
    if not isinstance(entry, dict) or not isinstance(entry.get("packages"), dict):
        return None
    sound = all(isinstance(version, str) for version in entry["packages"].values())
    return dict(entry) if sound else None


def cache_probe(key: str, record: Mapping[str, Any]) -> None:
    """Store a record under the key. Raises OSError if the cache cannot be written."""
    from llmlaunch.rundir.files import read_object, replace_json

    path = cache_file("frameworks.json")
    entries = {name: value for name, value in (read_object(path) or {}).items() if name != key}
    replace_json(path, dict([*entries.items(), (key, dict(record))][-MOST_KEPT:]), lasting=False)


def cache_file(name: str) -> Path:
    """Return the path of a file in this user's cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or with_home("~/.cache"))
    # without a home directory nothing is kept: nothing can be read or written below a file
    return (folder if folder.is_absolute() else Path(os.devnull)) / "llmlaunch" / name
