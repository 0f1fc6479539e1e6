"""What could not be written to the run directory, kept on the node's own disk and delivered later: by the same
monitor, or by any later one of the same user on this node.

Whoever dies in the middle leaves a file that the next one delivers; a line that has already arrived is not written
again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from pathlib import Path

from ..rundir.files import read_object, replace_bytes
from ..rundir.spool_place import RUN_FILE, is_private, spool_folder
from .files import PeaksFile

# A file on its way to the run directory, no longer written to: node1.<nanoseconds>.taken.jsonl
CLAIMED = re.compile(r"\.\d+\.taken(?=\.\w+$)")
TRIES = 50
BETWEEN_TRIES_SECONDS = 0.005


class Spool:
    """One run's folder. Made when it is first needed."""

    def __init__(self, root: Path, run_directory: Path) -> None:
        self._root = root
        self._run_directory = run_directory
        self.folder = spool_folder(root, str(run_directory))

    def append(self, relative: str, lines: bytes) -> bool:
        """Append `lines` to the file of that path; False where this disk cannot take them, either."""
        path = self.folder / relative
        for _ in range(TRIES):
            try:
                self._prepare(path.parent)
                if _append(path, lines):
                    self._prepare(path.parent)  # the run's name may have been taken away just before
                    return True
            except (FileNotFoundError, FileExistsError):  # whoever delivered took an empty folder away just then
                pass
            except OSError:
                return False
            time.sleep(BETWEEN_TRIES_SECONDS)
        return False

    def _prepare(self, directory: Path) -> None:
        """Raises OSError where /var/tmp holds something of another user's by that name."""
        for folder in (self._root, self.folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700, parents=folder is self._root and not self._root.parent.exists())
            if not is_private(folder):
                os.lstat(folder)  # FileNotFoundError where it was there a moment ago
                raise PermissionError(f"{folder} is not a private directory of this user")
        if not (self.folder / RUN_FILE).exists():
            _name(self.folder, os.fsencode(self._run_directory))
        directory.mkdir(0o700, parents=True, exist_ok=True)

    def deliver(self) -> None:
        """Raises OSError where the run directory still cannot be written."""
        if self.folder.exists():
            deliver(self._root, self.folder)


def deliver_all(root: Path, but: Path) -> None:
    """Deliver every run's folder except `but`; what cannot be delivered stays. It may hang, as any file system."""
    with contextlib.suppress(OSError):
        for folder in sorted(root.iterdir()) if is_private(root) else ():
            if folder != but:
                with contextlib.suppress(OSError):
                    deliver(root, folder)


def deliver(root: Path, folder: Path) -> None:
    """Move what lies in one run's folder to its run directory. Raises OSError where that cannot be written."""
    if not is_private(root) or not is_private(folder):
        return
    name = (folder / RUN_FILE).read_bytes()
    run_directory = os.fsdecode(name.rstrip(b"\n"))
    if spool_folder(root, run_directory) != folder or not Path(run_directory).is_dir():
        return
    for path in _files(folder):
        claimed = _claim(path)
        descriptor = _lock(claimed)
        if descriptor is None:
            continue
        try:
            target = Path(run_directory) / path.relative_to(folder).with_name(CLAIMED.sub("", path.name))
            deliver_one = _append_missing if path.suffix == ".jsonl" else _replace_older
            deliver_one(target, claimed)
            claimed.unlink()
        finally:
            os.close(descriptor)
    _remove_if_empty(folder, name)


def _append(path: Path, lines: bytes) -> bool:
    """False where `path` was taken away in this moment: try again. Raises OSError.

    A lock on it lasts as long as one writes, and as long as one delivers it, which nobody is to wait for.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            return False
        if os.write(descriptor, lines) != len(lines):
            raise OSError("short write: the disk is full")
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    """What is to be delivered: what an earlier one left behind first, nothing half written."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    wanted = [path for path in files if path.parent != folder and not path.name.startswith(".")]
    return sorted(wanted, key=lambda path: (CLAIMED.search(path.name) is None, path))


def _claim(path: Path) -> Path:
    """Rename the file for delivery: from now on, whoever has more to write begins another file."""
    if CLAIMED.search(path.name) is not None:
        return path
    claimed = path.with_name(f"{path.stem}.{time.time_ns()}.taken{path.suffix}")
    path.rename(claimed)
    return claimed


def _lock(path: Path) -> int | None:
    """A descriptor to close in the end; None where another delivers this file. Waits for one who still writes to it."""
    for _ in range(TRIES):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            time.sleep(BETWEEN_TRIES_SECONDS)
            continue
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
    return None


def _append_missing(target: Path, claimed: Path) -> None:
    """Append to `target` the whole lines of `claimed` that are not there yet. Raises OSError."""
    content = claimed.read_bytes()
    missing = dict.fromkeys(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1])
    with contextlib.suppress(FileNotFoundError), target.open("rb") as file:
        for line in file:
            missing.pop(line.rstrip(b"\n"), None)
    if not missing:
        return
    file_there = PeaksFile(target)
    if not file_there.append(b"".join(line + b"\n" for line in missing), sync=True):
        raise OSError(f"{target} cannot be written")
    file_there.close()


def _replace_older(target: Path, claimed: Path) -> None:
    """Replace `target` by `claimed` if that was written later, by the `at` timestamp inside each file."""
    ours, theirs = read_object(claimed) or {}, read_object(target) or {}
    if (theirs.get("at") or 0) > (ours.get("at") or 0):
        return
    replace_bytes(target, claimed.read_bytes())


def _remove_if_empty(folder: Path, name: bytes) -> None:
    """Somebody may just be about to put more into it: then it keeps its name."""
    for below in sorted(folder.rglob("*"), reverse=True):
        if below.is_dir():
            with contextlib.suppress(OSError):
                below.rmdir()
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [RUN_FILE]:
            (folder / RUN_FILE).unlink()
            try:
                folder.rmdir()
            except OSError:
                _name(folder, name)


def _name(folder: Path, name: bytes) -> None:
    fresh = folder / f".{RUN_FILE}.{os.getpid()}.{threading.get_ident()}.tmp"
    fresh.write_bytes(name)
    fresh.replace(folder / RUN_FILE)
