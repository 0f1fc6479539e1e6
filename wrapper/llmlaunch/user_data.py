"""Where what is a person's own lies, as the XDG base directory specification says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_data(environment: Mapping[str, str]) -> Path | None:
    """`$XDG_DATA_HOME/llmlaunch`, else `~/.local/share/llmlaunch`; None where there is no home directory."""
    data, home = Path(environment.get("XDG_DATA_HOME", "")), Path(environment.get("HOME", ""))
    if data.is_absolute():  # a relative one is ignored
        return data / "llmlaunch"
    return home / ".local" / "share" / "llmlaunch" if home.is_absolute() else None


def with_home(path: str | Path) -> Path:
    """Return a path whose `~` or `~user` is that person's home directory; one without a home stays as it is, where
    pathlib raises."""
    return Path(os.path.expanduser(path))  # noqa: PTH111
