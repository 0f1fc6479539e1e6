"""Git repositories made for tests, and what is recorded of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from run_samples import recipe

from llmlaunch.recipe.types import Code
from llmlaunch.rendering.provenance import Provenance, gather_provenance

IDENTITY = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
LONG_AGO = 1_700_000_000_000_000_000  # a commit so old that git trusts the times of its files


def git(folder: Path, *arguments: str) -> str:
    command = ["git", *IDENTITY, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
        os.utime(folder / name, ns=(LONG_AGO, LONG_AGO))
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "files")


def gathered(folder: Path, *not_secrets: str, snapshot: bool = True) -> Provenance:
    code = Code(path=str(folder), snapshot=snapshot)
    return gather_provenance(recipe(code=code, not_secrets=not_secrets))


def state(provenance: Provenance) -> dict[str, object]:
    recorded = provenance.code["git"]
    assert isinstance(recorded, dict), provenance.code["note"]
    return recorded


def copied(provenance: Provenance) -> tuple[str, ...]:
    """Return the files of the snapshot."""
    assert provenance.snapshot is not None
    return provenance.snapshot.files
