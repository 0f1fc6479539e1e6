"""The files that trainers' Pythons import first, as node.pyz holds them: `observe` writes them into its directory, and
a node of a job on its own disk, so that it need not ask a shared file system for what it has already."""

from __future__ import annotations

import argparse
from pathlib import Path

HOOK_FOLDER = "hook"  # its sitecustomize.py runs first
SOURCES = {f"{HOOK_FOLDER}/sitecustomize.py": "hook.py", f"{HOOK_FOLDER}/llmlaunch_memory_probe.py": "memory_probe.py"}


def main(argv: list[str]) -> int:
    """Write FILES into FOLDER. Returns 0, or 1 where one of them cannot be written."""
    parser = argparse.ArgumentParser(prog="node.pyz unpack")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="on this node's own disk")
    parser.add_argument("files", nargs="+", choices=sorted(SOURCES), metavar="FILE")
    options = parser.parse_args(argv)
    try:
        (options.folder / HOOK_FOLDER).mkdir(exist_ok=True)
        for name in options.files:
            (options.folder / name).write_bytes(hook_file(name))
    except OSError:
        return 1
    return 0


def hook_file(name: str) -> bytes:
    """Return the content of one of SOURCES, from node.pyz or from an installed package."""
    path = Path(__file__).parents[1] / "trainers" / SOURCES[name]
    content: bytes = __loader__.get_data(str(path))  # type: ignore[name-defined]
    return content
