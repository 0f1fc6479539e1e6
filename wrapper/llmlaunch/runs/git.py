"""What git says about a source tree: commit, branch, tracked changes. Untracked files never leave the tree."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GitState", "read_git", "run_git", "tracked_files"]

DIFF_LIMIT_BYTES = 8 * 2**20
_TIMEOUT_SECONDS = 120
_DIFF_OPTIONS = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv")  # no program of the checkout's config


@dataclass(frozen=True)
class GitState:
    """`commit` is None where the tree is no git checkout, and `note` says why. A diff longer than
    DIFF_LIMIT_BYTES is left out whole: half a diff applies to nothing."""

    commit: str | None = None
    branch: str | None = None
    diff: bytes = b""
    diff_left_out: bool = False
    untracked_files: int = 0
    note: str = ""

    def as_json(self) -> dict[str, object] | None:
        if self.commit is None:
            return None
        return {
            "commit": self.commit,
            "branch": self.branch,
            "dirty": bool(self.diff) or self.diff_left_out,
            "diff_left_out": self.diff_left_out,
            "untracked_files": self.untracked_files,
        }


class GitFailed(Exception):
    """git is not here, refuses, or takes too long; the message is its own."""


def read_git(root: Path) -> GitState:
    """The state of the checkout that holds `root`. Never raises: what git refuses becomes a note."""
    try:
        commit = run_git(root, "rev-parse", "--verify", "HEAD").decode().strip()
        if not tracked_files(root):
            return GitState(note=f"{root} lies inside a git checkout that tracks nothing of it")
        branch = run_git(root, "rev-parse", "--abbrev-ref", "HEAD").decode().strip()
        # HEAD against the working tree: staged and unstaged changes of tracked files, binary ones too, of the
        # whole checkout, so that `git apply` at its top restores it
        diff = run_git(root, "diff", "HEAD", *_DIFF_OPTIONS, limit_bytes=DIFF_LIMIT_BYTES)
        others = run_git(root, "ls-files", "--others", "--exclude-standard", "-z")
    except GitFailed as error:
        return GitState(note=str(error))
    too_long = len(diff) > DIFF_LIMIT_BYTES
    return GitState(
        commit=commit,
        branch=None if branch == "HEAD" else branch,
        diff=b"" if too_long else diff,
        diff_left_out=too_long,
        untracked_files=others.count(b"\0"),
        note=f"the changes are more than {DIFF_LIMIT_BYTES} bytes and are not kept" if too_long else "",
    )


def tracked_files(root: Path) -> list[str]:
    """Tracked files below `root`, relative to it, submodules included. Raises GitFailed."""
    names = run_git(root, "ls-files", "-z", "--recurse-submodules")
    return sorted(os.fsdecode(name) for name in names.split(b"\0") if name)


def run_git(root: Path, *arguments: str, limit_bytes: int | None = None) -> bytes:
    """git's stdout in `root`, without locks or another repository's variables; of a longer one the first
    `limit_bytes` + 1 bytes. Raises GitFailed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), *arguments]
    with tempfile.TemporaryFile() as errors:
        try:
            git = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
        except FileNotFoundError:
            raise GitFailed("git is not installed here") from None
        assert git.stdout is not None
        patience = threading.Timer(_TIMEOUT_SECONDS, git.kill)
        patience.start()
        try:
            output = git.stdout.read() if limit_bytes is None else git.stdout.read(limit_bytes + 1)
            if limit_bytes is not None and len(output) > limit_bytes:
                git.kill()
                return output
            code = git.wait()
        finally:
            patience.cancel()
            git.stdout.close()
            git.wait()
        if code != 0:
            errors.seek(0)
            words = errors.read().decode(errors="replace").strip().splitlines()
            raise GitFailed(f"git in {root}: {words[0] if words else f'ended with {code}'}")
    return output
