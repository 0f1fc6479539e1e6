"""The files that trainers' Pythons import first, as node.pyz holds them: `observe` writes them into its directory, and
a node of a job on its own disk, so that it need not ask a shared file system for what it has already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

HOOK_FOLDER = "hook"  # its sitecustomize.py runs first
SOURCES = {f"{HOOK_FOLDER}/sitecustomize.py": "hook.py", f"{HOOK_FOLDER}/llmlaunch_memory_probe.py": "memory_probe.py"}


def write_hook_files(folder: Path, names: Iterable[str]) -> None:
    """Write the files of these names, those of SOURCES, below `folder`. Raises OSError."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(hook_file(name))


def hook_file(name: str) -> bytes:
    """Return the content of one of SOURCES, from node.pyz or from an installed package."""
    path = Path(__file__).parents[1] / "trainers" / SOURCES[name]
    content: bytes = __loader__.get_data(str(path))  # type: ignore[name-defined]
    return content
