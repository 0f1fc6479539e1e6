"""Old checkpoints are removed, so that the newest whole ones stay (training.keep_checkpoints).

It runs in a process of its own beside the training, on the batch host: a slow or stuck file system holds up nobody
else. A checkpoint first gets a name that no loader takes, which is one atomic step, and is then removed; whatever ends
this process leaves checkpoints that are whole, or that nobody finds. No link is followed out of the checkpoint folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir.attempt import Attempt
from ..rundir.run import begun_attempts
from .checkpoint import attempts_in_folder, checkpoint_of, durable_step, unloadable_steps
from .checkpoint_folder import CheckpointFolder
from .files import command_parser, say
from .signals import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..rundir.run_file import Checkpoints


_NICE = 19
_REMOVED = ".removed-"
_LEFT_BEHIND = re.compile(re.escape(_REMOVED) + r"(iter_\d{7,}|step-\d+|global_step\d+)")


def main(argv: list[str]) -> int:
    """Prune once. Always returns 0: nothing that goes wrong here is the training's affair."""
    parser = command_parser("prune")
    parser.add_argument("--layout", default=".", help="folder in the run directory whose run.json counts")
    options = parser.parse_args(argv)
    die_with_parent(signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    prune(options.run_dir, options.attempt, options.layout)
    return 0


class Pruner:
    """Starts `node.pyz prune` for an attempt whenever the tracker names another checkpoint."""

    def __init__(self, run_directory: Path, attempt: str, layout: str) -> None:
        archive = str(Path(sys.argv[0]).absolute())
        place = ["--run-dir", str(run_directory), "--attempt", attempt, "--layout", layout or "."]
        self._command = [sys.executable, "-I", "-S", archive, "prune", *place]
        self._step: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, step: int) -> None:
        """Prune in a new process, unless one still runs or `step` was the one before, too. Raises OSError."""
        if step == self._step or (self._process is not None and self._process.poll() is None):
            return
        self._step = step
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)


def kept_count(checkpoint: Checkpoints | None) -> int:
    """How many whole checkpoints stay, of a run.json's "checkpoint"; 0 where all of them do."""
    return checkpoint.get("keep", 0) if checkpoint is not None and checkpoint.get("promised") else 0


def prune(run_directory: Path, attempt: str, layout: str) -> None:
    """Remove the checkpoints of this layout's folder that are older than those to keep, the oldest first, and say so,
    or in one line what went wrong."""
    try:
        checkpoint = checkpoint_of(run_directory, layout)
        keep = kept_count(checkpoint)
        last = durable_step(checkpoint) if keep else None
        if checkpoint is None or last is None:
            return
        folder = CheckpointFolder(checkpoint, durable_only=True)
        folder.unloadable = unloadable_steps(
            folder, attempts_in_folder(begun_attempts(run_directory), run_directory, checkpoint)
        )
        first = Attempt(run_directory, attempt).from_step
        names = _removable(folder, keep, last, first)
        with _opened(str(folder.path)) as descriptor:
            _remove_left_behind(descriptor)
            for name in names:
                os.rename(name, _REMOVED + name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
                # no trainer finds it any more, whether what follows is cut or not
                say(f"removed the checkpoint {folder.path / name}: the newest {keep} stay (training.keep_checkpoints)")
                _remove_tree(_REMOVED + name, descriptor, os.fstat(descriptor).st_dev)
    except Exception as error:  # whatever it is, the training goes on
        say(f"old checkpoints stay: {type(error).__name__}: {error}; the training continues")


def _removable(folder: CheckpointFolder, keep: int, last: int, first: int) -> list[str]:
    """Return the names of the folders to remove, the oldest first.

    `last` is the step that the tracker names, newer ones are being written or were left; `first` is where the attempt
    began, which stays until a newer one is whole. So does the one with the lowest validation loss.
    """
    own = folder.own_steps()
    whole: list[int] = []
    for step in sorted((step for step in own if step <= last), reverse=True):
        if len(whole) == keep:
            break
        if not folder.fault(step):
            whole.append(step)
    if len(whole) < keep:
        return []
    stay = {last, folder.best()} if any(step > first for step in whole) else {last, first, folder.best()}
    return [own[step] for step in sorted(own) if step < whole[-1] and step not in stay]


@contextlib.contextmanager
def _opened(name: str, parent: int | None = None) -> Iterator[int]:
    """The descriptor of a folder; of one in `parent` that is no link."""
    follow = 0 if parent is None else os.O_NOFOLLOW
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_left_behind(folder: int) -> None:
    device = os.fstat(folder).st_dev
    for name in os.listdir(folder):
        if _LEFT_BEHIND.fullmatch(name):
            _remove_tree(name, folder, device)


def _remove_tree(name: str, parent: int, device: int) -> None:
    """Remove a folder with all in it: links themselves, never what they point to. Raises OSError, also for another
    file system that is mounted in it."""
    with _opened(name, parent) as descriptor:
        if os.fstat(descriptor).st_dev != device:
            raise OSError(errno.EXDEV, "another file system is mounted there", name)
        with os.scandir(descriptor) as entries:
            folders = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        for inner, is_folder in folders.items():
            if is_folder:
                _remove_tree(inner, descriptor, device)
            else:
                os.unlink(inner, dir_fd=descriptor)
    os.rmdir(name, dir_fd=parent)
