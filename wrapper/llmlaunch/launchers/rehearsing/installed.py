"""Where the frameworks lie that trace a rank, and whether all of them are there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.user_data import user_data

__all__ = ["MARK", "TRACED", "is_installed", "python_of", "user_folder", "versions_in"]

MARK = ".installed"  # the last file an installation writes
TRACED = ("torch", "megatron-core", "transformer_engine")  # what a trace runs, as their packages are called


def user_folder(environment: Mapping[str, str] | None = None) -> Path:
    """`$XDG_DATA_HOME/llmlaunch/frameworks`, else `~/.local/share/llmlaunch/frameworks`: for people without a checkout.

    Raises UserError where there is no home directory.
    """
    data = user_data(os.environ if environment is None else environment)
    if data is None:
        raise UserError(
            "no place for the frameworks a rank is traced with: neither HOME nor XDG_DATA_HOME is an absolute path"
        )
    return data / "frameworks"


def is_installed(folder: Path) -> bool:
    """All of it, to the end: an installation that was interrupted does not count."""
    return (folder / MARK).is_file() and python_of(folder).exists()


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in this folder."""
    return folder / "bin" / "python"


def versions_in(folder: Path) -> dict[str, str]:
    """Of the packages that are traced, the versions installed there, by package; no process is started."""
    places = [str(path) for path in folder.glob("lib/python3*/site-packages")]
    found = {_plain(one.metadata["Name"] or ""): one.version for one in distributions(path=places)}
    return {name: found[_plain(name)] for name in TRACED if _plain(name) in found}


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
