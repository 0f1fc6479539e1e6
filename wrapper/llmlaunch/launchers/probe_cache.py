"""What a probe saw in a training environment, kept until the environment changes (`llmlaunch doctor --container`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.types import Recipe

__all__ = ["cache_probe", "cached_probe", "environment_key", "probed_packages"]

MOST_KEPT = 100
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")


def environment_key(container: Container | None, python: str | None) -> str | None:
    """Names one state of a training environment: an image by its digest, or its path and when it was written; an
    interpreter by its path and when a package was last put beside it. None where a recipe names neither."""
    if container is not None:
        digest = _DIGEST.search(container.image)
        inside = f" {python}" if python else ""
        return f"image {digest[1] if digest else container.image + _written(Path(container.image))}{inside}"
    if python is None:
        return None
    packages = sorted(Path(python).parent.parent.glob("lib/python3*/site-packages"))
    return f"python {python}" + "".join(_written(folder) for folder in packages[:1])


def probed_packages(recipe: Recipe) -> Mapping[str, str] | None:
    """The versions of the packages in the recipe's environment by name, where it was probed."""
    python = recipe.python if recipe.container else recipe.python or os.environ.get("LLMLAUNCH_PYTHON")
    key = environment_key(recipe.container, python)
    entry = None if key is None else cached_probe(key)
    return None if entry is None else entry["packages"]


def cached_probe(key: str) -> dict[str, Any] | None:
    """What `keep_probe` entry under the key; None where there is nothing, or nothing that can be read."""
    entry = _read().get(key)
    if not isinstance(entry, dict) or not isinstance(entry.get("packages"), dict):
        return None
    sound = all(isinstance(version, str) for version in entry["packages"].values())
    return dict(entry) if sound else None


def cache_probe(key: str, record: Mapping[str, Any]) -> None:
    """Raises OSError where the cache cannot be written."""
    entries = {**{name: value for name, value in _read().items() if name != key}, key: dict(record)}
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(dict(list(entries.items())[-MOST_KEPT:]), file)
    Path(file.name).replace(path)


def _path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmlaunch" / "frameworks.json"


def _read() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        entries = json.loads(_path().read_text(encoding="utf-8"))
        return entries if isinstance(entries, dict) else {}
    return {}


def _written(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        state = path.stat()
        return f" {state.st_mtime_ns} {state.st_size}"
    return ""
