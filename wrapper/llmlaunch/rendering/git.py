"""What git says about a source tree: commit, branch, tracked changes. Untracked files never leave the tree.

git runs on a checkout that somebody else configured, without running any program that this configuration names:
filters, hooks, a file system monitor, a pager, external diffs, remote helpers. What only lists (`rev-parse`,
`ls-files`, `check-attr`, `config --list`) runs none of them once the monitor, hooks and transports are switched off.
What compares file contents would run filters, so it runs in a repository of our own that borrows the objects and a
copy of the index, and has nothing of the configuration but plain switches.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.documents.secrets import holds_secret, is_secret_file, known_secret

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
    stdin_bytes: bytes = b"",
) -> bytes:
    """Return git's stdout in `folder`, without locks or another repository's variables; of a longer output only the
    first `limit_bytes` + 1 bytes. Raises GitFailed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # no transport: a partial clone would fetch what it lacks through programs that its configuration names
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none", "LC_ALL": "C", **(variables or {})}
    command = ["git", *_SWITCHED_OFF, "-C", str(folder), *arguments]
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as stdin:
        stdin.write(stdin_bytes)
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


DIFF_LIMIT_BYTES = 8 * 2**20
_MOST_NAMES = 20  # of a sentence; code.json lists all
_DIFF = ("diff", "--no-color", "--no-renames", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
_SUBMODULE = b"160000 "
_PATCH_HEAD = (
    b"diff --git "  # lines of a hunk begin with a space, + or -, those of a binary file with a letter and no space
)
_PATCH = re.compile(rb"^" + _PATCH_HEAD, re.MULTILINE)
_BINARY = b"\nGIT binary patch\n"
_UNMERGED = re.compile(rb"^\* Unmerged path .*\n", re.MULTILINE)


@dataclass(frozen=True)
class GitState:
    """`commit` is None where the tree is no git checkout, and `note` says why. A diff longer than
    DIFF_LIMIT_BYTES is left out whole: half a diff applies to nothing."""

    commit: str | None = None
    branch: str | None = None
    diff: bytes = b""
    diff_left_out: bool = False
    untracked_files: int = 0
    not_compared: tuple[str, ...] = ()  # files a filter converts: whether they were changed, only the filter knows
    changed_submodules: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # changed files that may hold secrets: their changes are not in `diff`
    note: str = ""

    @property
    def dirty(self) -> bool | None:
        """Whether tracked files were changed; None where only a filter could say."""
        if self.diff or self.diff_left_out or self.changed_submodules or self.left_out:
            return True
        return None if self.not_compared else False

    def as_json(self) -> dict[str, object] | None:
        if self.commit is None:
            return None
        return {
            "commit": self.commit,
            "branch": self.branch,
            "dirty": self.dirty,
            "diff_left_out": self.diff_left_out,
            "untracked_files": self.untracked_files,
            "not_compared": list(self.not_compared),
            "changed_submodules": list(self.changed_submodules),
            "left_out": list(self.left_out),
        }


def read_git(root: Path, no_secrets: Collection[str] = ()) -> GitState:
    """The state of the checkout that holds `root`; `no_secrets` are files whose changes are kept although they look as
    if they held secrets. Never raises: what git refuses becomes a note."""
    try:
        commit = run_git(root, "rev-parse", "--verify", "HEAD").decode().strip()
        if not tracked_files(root):
            return GitState(note=f"{root} lies inside a git checkout that tracks nothing of it")
        branch = run_git(root, "rev-parse", "--abbrev-ref", "HEAD").decode().strip()
        others = run_git(root, "ls-files", "--others", "--exclude-standard", "-z")
        with borrowed(root) as checkout:
            changes = _changes(checkout, no_secrets)
            submodules = _changed_submodules(checkout.top)
    except GitFailed as error:
        return GitState(note=str(error))
    return GitState(
        commit=commit,
        branch=None if branch == "HEAD" else branch,
        diff=changes.diff or b"",
        diff_left_out=changes.diff is None,
        untracked_files=others.count(b"\0"),
        not_compared=changes.not_compared,
        changed_submodules=submodules,
        left_out=changes.left_out,
        note="; ".join(filter(None, (changes.note, *_notes(changes, submodules)))),
    )


def tracked_files(root: Path) -> list[str]:
    """Tracked files below `root`, relative to it, submodules included. Raises GitFailed."""
    return sorted(_names(run_git(root, "ls-files", "-z", "--recurse-submodules")))


@dataclass(frozen=True)
class _Changes:
    """`diff` is None where there are changes that are not kept, and `note` says why."""

    diff: bytes | None
    not_compared: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    note: str = ""


def _changes(checkout: BorrowedCheckout, no_secrets: Collection[str]) -> _Changes:
    """HEAD against the working tree: staged and unstaged changes of tracked files, binary ones too, of the whole
    checkout, so that `git apply` at its top restores it."""
    entries = _names(checkout.run(*_DIFF, "--raw", "-z", "HEAD"))
    changed = {name: status[-1] for status, name in zip(entries[::2], entries[1::2], strict=True) if status[-1] != "U"}
    unknown = _filtered(checkout, list(changed))
    secret = [name for name in changed if is_secret_file(name) and name not in {*unknown, *no_secrets}]
    apart = {*unknown, *secret}
    shown = {name: status for name, status in changed.items() if name not in apart}
    if not shown:
        return _Changes(b"", unknown, tuple(secret))
    but = [f":(exclude,top,literal){name}" for name in sorted(apart)]
    diff = checkout.run(*_DIFF, "--binary", "HEAD", "--", ".", *but, limit_bytes=DIFF_LIMIT_BYTES)
    if len(diff) > DIFF_LIMIT_BYTES:
        note = f"the changes are more than {DIFF_LIMIT_BYTES} bytes and are not kept"
        return _Changes(None, unknown, tuple(secret), note)
    patches = _patches(diff, shown)
    if patches is None:
        return _Changes(None, unknown, tuple(secret), "files changed while they were read; their changes are not kept")
    hidden = {name for name, patch in patches if name not in no_secrets and _is_secret(patch, checkout.top / name)}
    diff_shown = b"".join(patch for name, patch in patches if name not in hidden)
    return _Changes(diff_shown, unknown, (*secret, *sorted(hidden)))


def _patches(diff: bytes, changed: Mapping[str, str]) -> list[tuple[str, bytes]] | None:
    """The patch of each file, in their order, which is that of `changed`; a file that became a link, or was one, has
    two. None where the files are others."""
    patches = [_PATCH_HEAD + patch for patch in _PATCH.split(_UNMERGED.sub(b"", diff))[1:]]
    owners = [name for name, status in changed.items() for _ in range(2 if status == "T" else 1)]
    return list(zip(owners, patches, strict=True)) if len(owners) == len(patches) else None


def _is_secret(patch: bytes, path: Path) -> bool:
    return known_secret(patch.decode("latin-1")) is not None or (_BINARY in patch and holds_secret(path))


def _filtered(checkout: BorrowedCheckout, names: list[str]) -> tuple[str, ...]:
    """Those of `names` that a filter converts on their way into the repository. As they lie in the working tree they
    differ from what is committed, changed or not; a file whose size and times git knows is not among `names`."""
    if not checkout.filters or not names:
        return ()
    paths = b"\0".join(map(os.fsencode, names)) + b"\0"
    answer = _names(run_git(checkout.top, "check-attr", "-z", "--stdin", "filter", stdin_bytes=paths))
    return tuple(
        name
        for name, driver in zip(answer[::3], answer[2::3], strict=True)
        if driver in checkout.filters and os.path.lexists(checkout.top / name)
    )


def _changed_submodules(top: Path) -> tuple[str, ...]:
    """Submodules that are checked out and were changed, or may have been."""
    entries = run_git(top, "ls-files", "-s", "-z").split(b"\0")
    names = [os.fsdecode(entry.partition(b"\t")[2]) for entry in entries if entry.startswith(_SUBMODULE)]
    return tuple(name for name in names if _is_changed_submodule(top, name))


def _is_changed_submodule(top: Path, name: str) -> bool:
    folder = (top / name).resolve()
    if not (folder / ".git").exists() or top.resolve() not in folder.parents:
        return False
    shown = run_git(folder, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(shown).rstrip("\n")).resolve() == folder and read_git(folder).dirty is not False


def _notes(changes: _Changes, submodules: tuple[str, ...]) -> list[str]:
    notes = []
    if changes.left_out:
        names = listed(changes.left_out)
        notes.append(f"these files look as if they held secrets, and code.diff leaves them out: {names}")
    if changes.not_compared:
        notes.append(
            "a git filter converts these files and is not run here, so whether they were changed is not known, and "
            f"code.diff leaves them out: {listed(changes.not_compared)}"
        )
    if submodules:
        notes.append(f"code.diff does not hold the changes inside these submodules: {listed(submodules)}")
    return notes


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _names(output: bytes) -> list[str]:
    return [os.fsdecode(name) for name in output.split(b"\0") if name]
