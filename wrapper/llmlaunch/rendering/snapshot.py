"""`code: {snapshot: true}`: which files of the trainer's tree a run directory keeps, and the copying of them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.documents.secrets import holds_secret, is_secret_file
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.git import tracked_files
from llmlaunch.rendering.git_program import GitFailed, ignored_without_git

__all__ = ["Snapshot", "copy_snapshot", "list_snapshot"]

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
            f"{recipe.path}: code.snapshot: {root} holds {total / 2**20:.0f} MiB, more than the {LIMIT_BYTES // 2**20} "
            f"MiB a run directory takes; the largest: {', '.join(largest)}. Point code.path at the code alone, or "
            "keep data and checkpoints out of what git tracks"
        )
    secret = [name for name in sizes if name not in recipe.not_secrets and _is_secret(root, name)]
    kept = sorted(sizes.keys() - set(secret))
    return Snapshot(root, tuple(kept), sum(sizes[name] for name in kept), bool(names), tuple(sorted(secret)))


def _is_secret(root: Path, name: str) -> bool:
    try:
        return is_secret_file(name) or holds_secret(root / name)
    except OSError:  # it cannot be copied either, which is said there
        return False


def _behind_a_link(folder: Path, root: Path, known: dict[Path, bool]) -> bool:
    if folder not in known:
        known[folder] = folder != root and (folder.is_symlink() or _behind_a_link(folder.parent, root, known))
    return known[folder]


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
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        if "run.json" in names and "node.pyz" in names:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in _NEVER]
        here = Path(folder)
        found += [here / name for name in names]
        found += [here / name for name in folders if (here / name).is_symlink()]
    try:
        ignored = ignored_without_git(root)
    except GitFailed:  # no git here
        ignored = set()
    return sorted({str(path.relative_to(root)) for path in found} - ignored)
