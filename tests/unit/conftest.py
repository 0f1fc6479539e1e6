from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _shared_temporary_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of tests lie below /tmp, which jobs of several nodes share in no cluster."""
    monkeypatch.setattr("llmlaunch.readiness.written_folders.OWN_DISK", re.compile("(?!)"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    """An empty store of the test's own."""
    from llmlaunch.store.database import open_store  # most tests need no database
    from llmlaunch.store.location import where

    with open_store(where({"LLMLAUNCH_STORE": str(tmp_path / "store.db")})) as opened:
        yield opened


@pytest.fixture
def store_file(own_home: Path) -> Path:
    """Where the store of the person is, unless a variable says otherwise."""
    return own_home / "data" / "llmlaunch" / "store.db"


@pytest.fixture
def put_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`put_commands(squeue="echo 1")` puts shell scripts before all other commands, and returns their folder."""
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(**scripts: str) -> Path:
        folder.mkdir(exist_ok=True)
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        return folder

    return put
