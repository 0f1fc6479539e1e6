"""git, run on a checkout that somebody else configured, without running any program that this configuration names.

A repository's own configuration may name programs: filters, hooks, a file system monitor, a pager, external diffs,
remote helpers. What only lists (`rev-parse`, `ls-files`, `check-attr`, `config --list`) runs none of them once the
monitor, hooks and transports are switched off. What compares file contents would run filters, so it runs in a
repository of our own that borrows the objects and a copy of the index, and has nothing of the configuration but
plain switches.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BorrowedCheckout", "GitFailed", "borrowed", "ignored_without_git", "run_git"]

_TIMEOUT_SECONDS = 120
_SWITCHED_OFF = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "--no-pager")
_SWITCHES = re.compile(
    r"core\.(?:filemode|symlinks|ignorecase|autocrlf|eol|checkstat|trustctime|sparsecheckout|sparsecheckoutcone)"
    r"|extensions\.objectformat"
)
_SWITCH_VALUE = re.compile(r"[A-Za-z0-9]{1,20}")
_FILTER = re.compile(r"filter\.(.+)\.(?:clean|process)", re.DOTALL)


class GitFailed(Exception):
    """git is not here, refuses, or takes too long; the message is its own."""


def run_git(
    folder: Path,
    *arguments: str,
    limit_bytes: int | None = None,
    variables: Mapping[str, str] | None = None,
    given: bytes = b"",
) -> bytes:
    """Return git's stdout in `folder`, without locks or another repository's variables, with `given` on stdin; of a
    longer output only the first `limit_bytes` + 1 bytes. Raises GitFailed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # no transport: a partial clone would fetch what it lacks through programs that its configuration names
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none", "LC_ALL": "C", **(variables or {})}
    command = ["git", *_SWITCHED_OFF, "-C", str(folder), *arguments]
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as stdin:
        stdin.write(given)
        stdin.seek(0)
        try:
            git = subprocess.Popen(command, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=errors)
        except FileNotFoundError:
            raise GitFailed("git is not installed here") from None
        except OSError as error:  # more names than a command line takes
            raise GitFailed(f"git in {folder}: {error.strerror or error}") from None
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
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise GitFailed(f"git in {folder}: {lines[0] if lines else f'ended with {code}'}")
    return output


@dataclass(frozen=True)
class BorrowedCheckout:
    """A checkout seen through a repository of our own. `top` is its topmost folder, `filters` the names of the filters
    that its configuration defines and that do not run here."""

    top: Path
    filters: frozenset[str]
    variables: Mapping[str, str]

    def run(self, *arguments: str, limit_bytes: int | None = None) -> bytes:
        return run_git(self.top, *arguments, limit_bytes=limit_bytes, variables=self.variables)


@contextlib.contextmanager
def borrowed(root: Path) -> Iterator[BorrowedCheckout]:
    """The checkout that holds `root`, such that comparing its files runs nothing. Raises GitFailed."""
    top, objects, index, *shared = _places(root)
    settings = _settings(root)
    filters = frozenset(match[1] for name in settings if (match := _FILTER.fullmatch(name)))
    with tempfile.TemporaryDirectory(prefix="llmlaunch-git-") as name:
        folder = Path(name)
        variables = _own_repository(folder, top, run_git(root, "rev-parse", "--verify", "HEAD"), _config(settings))
        try:
            for path in (index, *shared):
                if path.exists():
                    # with its times: git trusts an entry that is older than its index without reading the file
                    shutil.copy2(path, folder / path.name)
        except OSError as error:
            raise GitFailed(f"git in {root}: the index cannot be read: {error.strerror or error}") from None
        variables |= {"GIT_OBJECT_DIRECTORY": str(objects), "GIT_INDEX_FILE": str(folder / index.name)}
        yield BorrowedCheckout(top, filters, variables)


def ignored_without_git(root: Path) -> set[str]:
    """Return the files below `root`, relative to it, that its .gitignore files name, for a tree that is no checkout: a
    copy of one, say. Raises GitFailed."""
    with tempfile.TemporaryDirectory(prefix="llmlaunch-git-") as name:
        variables = _own_repository(Path(name), root, b"ref: refs/heads/none\n", _config({}))
        listed = run_git(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", variables=variables)
    return {os.fsdecode(path) for path in listed.split(b"\0") if path}


def _own_repository(folder: Path, worktree: Path, head: bytes, config: str) -> dict[str, str]:
    """Make a repository in `folder`; return the variables with which git uses it on `worktree`, without any other
    configuration."""
    for name in ("refs", "objects"):
        (folder / name).mkdir()
    (folder / "HEAD").write_bytes(head)
    (folder / "config").write_text(config)
    return {
        "GIT_DIR": str(folder),
        "GIT_WORK_TREE": str(worktree),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "HOME": str(folder),  # git before 2.32 knows no GIT_CONFIG_GLOBAL
        "XDG_CONFIG_HOME": str(folder),
    }


def _places(root: Path) -> list[Path]:
    """The topmost folder, the objects, the index and, where the index is split, the part that is shared."""
    wanted = ("--show-toplevel", "--git-path", "objects", "--git-path", "index", "--shared-index-path")
    lines = os.fsdecode(run_git(root, "rev-parse", *wanted)).rstrip("\n").split("\n")
    if not 3 <= len(lines) <= 4:  # a line break in a path
        raise GitFailed(f"git in {root}: its paths cannot be read")
    return [root / line for line in lines]


def _settings(root: Path) -> dict[str, str]:
    """Every setting that holds for the checkout, the person's own included; one without a value is `true`."""
    entries = os.fsdecode(run_git(root, "config", "--null", "--list")).split("\0")
    pairs = (entry.partition("\n") for entry in entries if entry)
    return {name: value if equals else "true" for name, equals, value in pairs}


def _config(settings: Mapping[str, str]) -> str:
    """The switches that decide what counts as a change, and nothing that could name a program or a path."""
    lines = ["[core]\n\trepositoryformatversion = 1\n\tbare = false\n"]
    for name, value in settings.items():
        if _SWITCHES.fullmatch(name) and _SWITCH_VALUE.fullmatch(value):
            section, _, switch = name.partition(".")
            lines.append(f"[{section}]\n\t{switch} = {value}\n")
    return "".join(lines)
