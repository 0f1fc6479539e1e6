"""Which code a run trains with: commit, uncommitted changes, container digest, or the plain reason why not known.

Reading, not judging: whatever cannot be found out becomes a note in code.json. Only a snapshot that was asked for
and cannot be taken is an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from llmlaunch import __version__
from llmlaunch.documents.secrets import holds_secret, is_secret_file
from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework_version import CHECKOUT_VARIABLE
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.git import GitFailed, GitState, ignored_without_git, listed, read_git, tracked_files
from llmlaunch.user_data import with_home

_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")
_IMAGE_FILES = (".sqsh", ".sif")


@dataclass(frozen=True)
class Provenance:
    """`code` is code.json as a value, `diff` the bytes of code.diff (empty = no such file), `snapshot` the files to
    copy into code/ (None = none asked for)."""

    code: dict[str, object]
    diff: bytes = b""
    snapshot: Snapshot | None = None
    left_out: tuple[str, ...] = ()  # files of the tree that look as if they held secrets

    @property
    def notes(self) -> list[str]:
        """What the person who renders should know, in sentences."""
        if not self.left_out:
            return []
        return [
            "these files of the trainer's code look as if they held secrets, and the run directory leaves them or "
            f"their changes out: {listed(self.left_out)} (where that is wrong, name them under not_secrets:)"
        ]


def gather_provenance(recipe: Recipe) -> Provenance:
    """Reads the trainer's source tree and the container image, where they are on this machine.

    A local image is read whole for its sha256. Raises UserError where a snapshot was asked for and there is no
    tree, or one too large.
    """
    root, why_not = code_root(recipe)
    state = read_git(root, recipe.not_secrets) if root is not None else GitState(note=why_not)
    snapshot = wanted_snapshot(recipe)
    code: dict[str, object] = {
        "schema": 1,
        "llmlaunch_version": __version__,
        "path": None if root is None else str(root),
        "git": state.as_json(),
        "note": state.note,
        "container": _container(recipe.container),
        "snapshot": None if snapshot is None else snapshot.as_json(),
    }
    left_out = {*state.left_out, *(snapshot.left_out if snapshot is not None else ())}
    return Provenance(code=code, diff=state.diff, snapshot=snapshot, left_out=tuple(sorted(left_out)))


def wanted_snapshot(recipe: Recipe) -> Snapshot | None:
    """Return what the recipe wants copied of its trainer's source tree; None where it wants nothing copied.

    Raises:
        UserError: there is no tree to copy, or it is too large.
    """
    root, why_not = code_root(recipe)
    # our own trainer is copied into every run directory as it is
    wanted = recipe.code.snapshot and (root is not None or not _ours(recipe))
    return list_snapshot(recipe, root, why_not) if wanted else None


def _ours(recipe: Recipe) -> bool:
    return recipe.backend.traits.ships_trainer and recipe.backend.script is None and recipe.code.path is None


def code_root(recipe: Recipe) -> tuple[Path | None, str]:
    """The tree the trainer comes from, as an absolute path, else the reason why there is none to read."""
    checkout, script = recipe.backend.path, recipe.backend.script
    if recipe.code.path is not None:
        named, key = recipe.code.path, "code.path"
    elif checkout is not None and (script is None or Path(script).is_relative_to(checkout)):
        named, key = checkout, "backend.path"
    elif script is not None:
        named, key = str(Path(script).parent), "backend.script"
    elif recipe.backend.traits.has_checkout:
        advice = "name backend.path or code.path to have its commit recorded"
        return None, f"{CHECKOUT_VARIABLE} is set on the nodes; {advice}"
    else:
        return None, "the trainer is llmlaunch's own and lies in trainer/"
    root = Path(recipe.path).parent / with_home(named)
    root = Path(str(root.absolute()))
    if not root.is_dir():
        return None, f"{key} names {root}, which is no folder on the machine that rendered this"
    return root, ""


def _container(container: Container | None) -> dict[str, object] | None:
    if container is None:
        return None
    digest, note = _image_digest(container.image)
    return {"image": container.image, "digest": digest, "note": note}


def _image_digest(image: str) -> tuple[str | None, str]:
    """The image's sha256 and a note where it is not known."""
    if match := _DIGEST.search(image):
        return match.group(1), ""
    if not image.endswith(_IMAGE_FILES):
        return None, "the reference names no digest; write image@sha256:... to pin one"
    try:
        with Path(image).open("rb") as file:
            sha256 = hashlib.sha256()
            while block := file.read(1 << 20):
                sha256.update(block)
    except OSError as error:
        return None, f"cannot be read on the machine that rendered this: {error.strerror}"
    return f"sha256:{sha256.hexdigest()}", ""


LIMIT_BYTES = 512 * 2**20
_NEVER = frozenset({".git", ".hg", ".svn", "__pycache__"})


@dataclass(frozen=True)
class Snapshot:
    """`files` are relative to `root`: what git tracks there, as it lies in the working tree, or without git all."""

    root: Path
    files: tuple[str, ...]
    bytes_total: int
    from_git: bool
    left_out: tuple[str, ...] = ()  # look as if they held secrets

    def as_json(self) -> dict[str, object]:
        kind = "files git tracks, as they lay in the working tree" if self.from_git else "all files but ignored ones"
        left_out = list(self.left_out)
        return {"files": len(self.files), "bytes": self.bytes_total, "holds": kind, "left_out": left_out}


def list_snapshot(recipe: Recipe, root: Path | None, why_not: str) -> Snapshot:
    """What a snapshot would copy. Raises UserError where there is no tree, or one of more than LIMIT_BYTES."""
    if root is None:
        raise UserError(f"{recipe.path}: code.snapshot: nothing to copy: {why_not}; name the tree in code.path")
    return snapshot_of(root, recipe.not_secrets, f"{recipe.path}: code.snapshot")


def snapshot_of(root: Path, not_secrets: Collection[str], asked_by: str) -> Snapshot:
    """Return which files of a tree go with a run; `asked_by` is the key or option that asks for them. Raises UserError
    for a tree of more than LIMIT_BYTES."""
    try:
        names = tracked_files(root)
    except GitFailed:
        names = []
    files = names or _all_files(root)
    sizes = {}
    linked: dict[Path, bool] = {}
    for name in files:
        path = root / name
        if _behind_a_link(path.parent, root, linked):  # for git such a file is deleted; its copy would follow the link
            continue
        if path.is_symlink() or path.is_file():  # not what is tracked but deleted, nor sockets and pipes
            sizes[name] = path.lstat().st_size
    total = sum(sizes.values())
    if total > LIMIT_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        raise UserError(
            f"{asked_by}: {root} holds {total / 2**20:.0f} MiB, more than the {LIMIT_BYTES // 2**20} MiB that go with "
            f"a run; the largest: {', '.join(largest)}. Point code.path at the code alone, or "
            "keep data and checkpoints out of what git tracks"
        )
    secret = [name for name in sizes if name not in not_secrets and _is_secret(root, name)]
    copied = sorted(sizes.keys() - set(secret))
    return Snapshot(root, tuple(copied), sum(sizes[name] for name in copied), bool(names), tuple(sorted(secret)))


def _is_secret(root: Path, name: str) -> bool:
    try:
        return is_secret_file(name) or holds_secret(root / name)
    except OSError:  # it cannot be copied either, which is said there
        return False


def _behind_a_link(folder: Path, root: Path, cache: dict[Path, bool]) -> bool:
    if folder not in cache:
        cache[folder] = folder != root and (folder.is_symlink() or _behind_a_link(folder.parent, root, cache))
    return cache[folder]


def copy_snapshot(snapshot: Snapshot, target: Path) -> None:
    """Copies the files below `target`; links stay links, the owner's execute bit stays."""
    for name in snapshot.files:
        destination = target / name
        destination.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copy2(snapshot.root / name, destination, follow_symlinks=False)
        if not destination.is_symlink():
            destination.chmod(0o600 | (destination.stat().st_mode & 0o100))


def _all_files(root: Path) -> list[str]:
    """Every file below `root`, without version control's own, caches, what a .gitignore names, and run directories
    rendered there."""
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        if "run.json" in names and "node.pyz" in names:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in _NEVER]
        here = Path(folder)
        paths += [here / name for name in names]
        paths += [here / name for name in folders if (here / name).is_symlink()]
    try:
        ignored = ignored_without_git(root)
    except GitFailed:  # no git here
        ignored = set()
    return sorted({str(path.relative_to(root)) for path in paths} - ignored)
