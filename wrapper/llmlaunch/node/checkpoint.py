"""The checkpoint an attempt goes on from: what the tracker file names, whether that is whole, and when to refuse.

A trainer that finds no checkpoint begins at step 0 without a word. So what an earlier attempt has seen saved is looked
for before the training starts.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..rundir import file_names
from ..rundir.files import open_regular, read_object, replace_bytes
from ..rundir.run import begun_attempts
from ..rundir.values import byte_count, to_type

if TYPE_CHECKING:
    from ..rundir.attempt import Attempt
    from .files import Record

__all__ = ["Start", "checkpoint_of", "choose_start", "latest_in_folder", "read_tracker", "saved_step"]

CHECK_SECONDS = 20.0  # for the files of one checkpoint; there are thousands on a large job
MOST_TRACKER_BYTES = 4096
_ZIP_START, _ZIP_END, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
_MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
# Folder names: Megatron-LM core 0.19, get_checkpoint_name of megatron/training/checkpointing.py; our DeepSpeed script
# (trainers/deepspeed/checkpoints.py); DeepSpeed 0.19's own tags, save_checkpoint of runtime/engine.py.
_MEGATRON_FOLDER = re.compile(r"iter_(\d+)")
_DEEPSPEED_FOLDER = re.compile(r"(?:global_)?step-?(\d+)")


class Start(NamedTuple):
    """`problem` is why the training must not start, and `remedy` what a person can do; else it goes on from `step`, and
    `note` says what was unusual."""

    step: int
    note: str = ""
    problem: str = ""
    remedy: str = ""


def read_tracker(checkpoint: Record | None) -> int | None:
    """The step that the tracker file of a run.json's "checkpoint" names: `1200` (Megatron-LM) or `step-1200` (our
    DeepSpeed script). None where no file names one."""
    try:
        path = Path(str((checkpoint or {})["path"])) / str((checkpoint or {})["tracker"])
        if not path.is_file():
            return None
        with open_regular(path, follow=True) as file:
            digits = re.search(rb"(\d+)\s*$", file.read(MOST_TRACKER_BYTES))
    except (OSError, KeyError):
        return None
    return int(digits[1]) if digits else None


def _reached_step(attempt: Attempt) -> int | None:
    """The furthest step that the tracker named while `attempt` began, ran or ended; None where it never named one."""
    steps = [record.get("tracker_step") for record in (attempt.began, attempt.progress, attempt.status)]
    return max((step for step in steps if isinstance(step, int)), default=None)


def choose_start(run_directory: Path, checkpoint: Record | None, latest: Attempt | None) -> Start:
    """Where the next attempt starts. `latest` is the last attempt that saved in the same folder.

    A last checkpoint that is torn is left for the newest whole one before it, which the tracker then names. A
    checkpoint that vanished, or a tracker that names an older one than `latest` saw, is refused, unless the file
    `from_older` allows it. Only the trainers that llmlaunch knows are looked into; a script of the person's own may lay
    out its folder as it likes.
    """
    named = read_tracker(checkpoint)
    if checkpoint is None:
        return Start(0)
    reached, folder = None if latest is None else _reached_step(latest), _Folder(checkpoint)
    before = "" if latest is None else f"attempt {latest.name} had saved step {reached}"
    if named is not None:
        wrong = folder.fault(named) if checkpoint.get("promised", True) else ""
        if not wrong and latest is not None and _failed_to_load(latest, named):
            wrong = f"the trainers of attempt {latest.name} could not load it"
        if wrong:
            return _from_the_one_before(run_directory, folder, named, wrong)
        if reached is None or named >= reached or _is_allowed(run_directory):
            return Start(named)
        problem = f"{folder.tracker} names step {named}, but {before}"
        return Start(0, problem=problem, remedy=_remedy(run_directory, f"from step {named}"))
    if not reached:
        return Start(0)
    return _without_tracker(run_directory, folder, reached, f"{folder.tracker} names no checkpoint, but {before}")


def _failed_to_load(attempt: Attempt, step: int) -> bool:
    reason = attempt.status.get("cause") or {}
    return reason.get("kind") == "checkpoint" and reason.get("source") == "log" and attempt.from_step == step


def _from_the_one_before(run_directory: Path, folder: _Folder, named: int, wrong: str) -> Start:
    problem = f"the last checkpoint, step {named} in {folder.path}, is damaged: {wrong}"
    before = folder.newest_whole(named - 1)
    if before is not None:
        return _renamed(folder, before, f"{problem}; continuing from step {before}, the one before it")
    if _is_allowed(run_directory):
        return _set_aside(folder, f"{problem}; starting at step 0, as {file_names.FROM_OLDER} allows")
    problem = f"{problem}; there is no whole one before it"
    return Start(0, problem=problem, remedy=_remedy(run_directory, "from step 0"))


def _without_tracker(run_directory: Path, folder: _Folder, reached: int, problem: str) -> Start:
    whole = folder.newest_whole(reached)
    if whole == reached:
        return _renamed(folder, whole, f"{problem}, which is there and whole: continuing from it")
    if _is_allowed(run_directory):
        if whole is None:
            return _set_aside(folder, f"{problem}; starting at step 0, as {file_names.FROM_OLDER} allows")
        return _renamed(folder, whole, f"{problem}; continuing from step {whole}, as {file_names.FROM_OLDER} allows")
    if not folder.path.is_dir():
        problem = f"{problem} there; the folder {folder.path} is missing (is its file system mounted on this node?)"
    older = "from step 0" if whole is None else f"from step {whole}, the newest whole one"
    return Start(0, problem=problem, remedy=_remedy(run_directory, older))


def _renamed(folder: _Folder, step: int, note: str) -> Start:
    try:
        folder.name(step)
    except OSError as error:
        return Start(0, problem=f"{note}; but {folder.tracker} cannot be written: {error.strerror}")
    return Start(step, note)


def _set_aside(folder: _Folder, note: str) -> Start:
    """A tracker that names what cannot be loaded would end the trainers."""
    try:
        if folder.tracker.exists():
            folder.tracker.replace(folder.tracker.with_name(f"{folder.tracker.name}.damaged"))
    except OSError as error:
        return Start(0, problem=f"{note}; but {folder.tracker} cannot be moved away: {error.strerror}")
    return Start(0, note)


def _is_allowed(run_directory: Path) -> bool:
    return (run_directory / file_names.FROM_OLDER).exists()


def _remedy(run_directory: Path, older: str) -> str:
    return (
        f"Nothing was trained. Put the checkpoint back and run {to_type('resume', run_directory)}; "
        f"or train {older}: {to_type('resume', run_directory, '--from-older')}"
    )


class _Folder:
    """The folder a run saves its checkpoints in."""

    def __init__(self, checkpoint: Record) -> None:
        self.path = Path(str(checkpoint.get("path")))
        self.tracker = self.path / str(checkpoint.get("tracker"))
        self._is_megatron = self.tracker.name == _MEGATRON_TRACKER

    def newest_whole(self, most: int) -> int | None:
        """The newest step up to `most` whose checkpoint has no fault."""
        steps = sorted((step for step in self._steps() if 0 < step <= most), reverse=True)
        return next((step for step in steps if not self.fault(step)), None)

    def fault(self, step: int) -> str:
        """What is wrong with the checkpoint of a step, as far as its files show; empty where nothing is."""
        folder = self.path / self._steps().get(step, f"iter_{step:07d}" if self._is_megatron else f"step-{step}")
        if not folder.is_dir():
            return f"{folder.name} is missing"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not files:
            return f"{folder.name} is empty"
        names = {path.name for path in files}
        if any(name.endswith(".distcp") for name in names) and ".metadata" not in names:
            return f"{folder.name} has no .metadata"
        give_up_at = time.monotonic() + CHECK_SECONDS
        for path in files:
            if _is_torn(path):
                return f"{path.relative_to(self.path)} is cut short"
            if time.monotonic() > give_up_at:
                break
        return ""

    def name(self, step: int) -> None:
        """Make the tracker name a step. Raises OSError."""
        text = str(step) if self._is_megatron else self._steps()[step]
        replace_bytes(self.tracker, text.encode())

    def _steps(self) -> dict[int, str]:
        """The folder's name of each step that has one."""
        pattern = _MEGATRON_FOLDER if self._is_megatron else _DEEPSPEED_FOLDER
        try:
            matches = [pattern.fullmatch(path.name) for path in self.path.iterdir() if path.is_dir()]
        except OSError:
            return {}
        return {int(match[1]): match[0] for match in matches if match is not None}


def _is_torn(path: Path) -> bool:
    """Whether a file of torch.save lost its end: a zip archive, whose last 22 bytes close its directory (APPNOTE.TXT
    6.3.10, 4.3.16; torch writes no comment after them). A .distcp file holds one such archive for each tensor. Other
    files are not judged, but for those that must not be empty."""
    try:
        if path.suffix in (".pt", ".distcp"):
            with open_regular(path, follow=True) as file:
                start = file.read(len(_ZIP_START))
                file.seek(max(0, file.seek(0, 2) - _ZIP_END_BYTES))
                end = file.read(_ZIP_END_BYTES)
            return (not start and path.suffix == ".pt") or (start == _ZIP_START and not end.startswith(_ZIP_END))
        return path.name in (".metadata", "metadata.json") and path.stat().st_size == 0
    except OSError:
        return True


def checkpoint_of(run_directory: Path, layout: str) -> Record | None:
    """Where this layout saves; None where no checkpoints are written."""
    described = read_object(run_directory / layout / file_names.RUN) or {}
    checkpoint = described.get("checkpoint")
    return checkpoint if isinstance(checkpoint, dict) else None


def saved_step(run_directory: Path, layout: str) -> int:
    """The step of the last whole checkpoint this layout would go on from; 0 where there is none.

    Of a script that may write another tracker, and wrote none, the last step that was due to be saved stands for it.
    """
    checkpoint = checkpoint_of(run_directory, layout)
    step = read_tracker(checkpoint)
    if step is None and checkpoint is not None and not checkpoint.get("promised", True):
        return _step_due(run_directory, checkpoint)
    return step or 0


def _step_due(run_directory: Path, checkpoint: Record) -> int:
    """The furthest step due to be saved that a log has shown, of all attempts that save in the same place."""
    furthest = 0
    for attempt in begun_attempts(run_directory):
        if checkpoint_of(run_directory, attempt.layout) == checkpoint:
            furthest = max(furthest, byte_count(attempt.progress.get("step")) or 0)
    return furthest - furthest % (byte_count(checkpoint.get("interval")) or 1)


def latest_in_folder(attempts: list[Attempt], run_directory: Path, checkpoint: Record | None) -> Attempt | None:
    """The last of `attempts` that saves in the same place."""
    in_folder = (item for item in reversed(attempts) if checkpoint_of(run_directory, item.layout) == checkpoint)
    return next(in_folder, None)
