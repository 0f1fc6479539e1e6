"""What was found of a file, a folder or a SLURM option that a job needs; and how files are looked at.

A path is looked for on this machine, which sees the job's file systems where it is a login node. What the container
mounts from another place of the host is looked for there. Where not even the topmost folder of a path exists here, its
file system is not mounted here, and the path is unseen. Only a bounded part of a file is read, and nothing of a device
or a pipe, which might never answer.
"""

from __future__ import annotations

import json
import os
import re
import stat
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.frozen import frozen
from llmlaunch.recipe.types import Recipe
from llmlaunch.user_data import with_home

MISSING, DOUBTFUL, UNSEEN, NOTE = "missing", "doubtful", "unseen", "note"
MOST_ENTRIES = 10_000
MOST_JSON_BYTES = 64 * 2**20
_ADDRESS = re.compile(r"(?:^|/)[a-z][a-z0-9+.-]*:/")  # s3://bucket, whose two slashes a path has made one
_LFS_POINTER = b"version https://git-lfs"


@frozen
class Finding:
    """One sentence about the recipe's value at `key`. `kind` is MISSING where the job would fail, DOUBTFUL where it may
    not do what is wanted, UNSEEN where only the nodes can tell (the sentence is the path), and NOTE for what the person
    should know."""

    kind: str
    key: KeyPath
    sentence: str


def missing(key: KeyPath, sentence: str) -> Finding:
    """Return a finding for which `submit` refuses."""
    return Finding(MISSING, key, sentence)


def doubtful(key: KeyPath, sentence: str) -> Finding:
    """Return a finding of which `submit` warns."""
    return Finding(DOUBTFUL, key, sentence)


def note(key: KeyPath, sentence: str) -> Finding:
    """Return a finding that is shown with `-v` alone."""
    return Finding(NOTE, key, sentence)


def unseen(key: KeyPath, path: object) -> Finding:
    """Return the finding on a path that this machine cannot see; `submit` warns of all such paths in one line."""
    return Finding(UNSEEN, key, str(path))


def host_path(recipe: Recipe, path: str) -> Path:
    """Return the place on the host of what the container's mounts show at `path`; the last mount over it wins."""
    mounts = () if recipe.container is None else recipe.container.mounts
    for mount in reversed(mounts):
        source, place = mount.split(":")[:2]
        if PurePath(path).is_relative_to(place):
            return Path(source) / PurePath(path).relative_to(place)
    return with_home(path)


def path_state(path: Path) -> str:
    """Return "here", "absent", or "unseen" for an address, a file system that is not mounted here, and a folder that
    may not be looked into."""
    if _ADDRESS.search(str(path)):
        return "unseen"
    try:
        path.stat()
    except FileNotFoundError:
        mounted = Path(*path.parts[:2]).exists()
        return "absent" if mounted else "unseen"
    except NotADirectoryError:
        return "absent"
    except (OSError, ValueError):
        return "unseen"
    return "here"


def first_bytes(path: Path, count: int, offset: int = 0) -> bytes | None:
    """Return up to `count` bytes of a regular file; None for anything else, and for a file that may not be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        return os.pread(descriptor, count, offset) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def file_problem(path: Path) -> str | None:
    """Return why a path that exists is no file with content, or None."""
    if path.is_dir():
        return "is a folder, not a file"
    head = first_bytes(path, len(_LFS_POINTER))
    if head is None:
        return "cannot be read by you; ask for permission to read it" if path.is_file() else "is no regular file"
    if not head:
        return "is empty"
    return "is only a pointer of Git LFS; fetch the file itself (git lfs pull)" if head == _LFS_POINTER else None


def folder_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the first MOST_ENTRIES entries of a folder by name; none of a folder that cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(islice(entries, MOST_ENTRIES), key=lambda entry: entry.name)
    except OSError:
        return []


def read_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """Return the value in a file of JSON; None for one that is absent, larger than `most_bytes` or none of JSON."""
    text = first_bytes(path, most_bytes + 1)
    if text is None or len(text) > most_bytes:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
