"""The folder a run saves its checkpoints in: how the frameworks call them, and which of them are whole."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..rundir.files import open_regular, replace_bytes

if TYPE_CHECKING:
    from .files import Record

__all__ = ["CheckpointFolder", "Skipped"]

CHECK_SECONDS = 20.0  # for the files of one checkpoint; there are thousands on a large job
_ZIP_START, _ZIP_END, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
_MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
# Megatron-Bridge 0.6 writes the tracker, but goes on from what this file holds, a copy of the one of its step
# (save_checkpoint and _get_latest_iteration of training/checkpointing.py).
_BRIDGE_TRACKER, _BRIDGE_STATE = "latest_train_state.pt", "train_state.pt"
# Folder names: Megatron-LM core 0.19, get_checkpoint_name of megatron/training/checkpointing.py; our DeepSpeed script
# (trainers/deepspeed/checkpoints.py); DeepSpeed 0.19's own tags, save_checkpoint of runtime/engine.py.
_MEGATRON_FOLDER = re.compile(r"iter_(\d+)")
_DEEPSPEED_FOLDER = re.compile(r"(?:global_)?step-?(\d+)")


class Skipped(NamedTuple):
    """A checkpoint that an attempt did not begin with, and what is wrong with it."""

    step: int
    why: str


class CheckpointFolder:
    """What a run.json's "checkpoint" names. `unloadable` says of steps whose files look whole why they are not."""

    def __init__(self, checkpoint: Record) -> None:
        self.path = Path(str(checkpoint.get("path")))
        self.tracker = self.path / str(checkpoint.get("tracker"))
        self.unloadable: dict[int, str] = {}
        self._is_megatron = self.tracker.name == _MEGATRON_TRACKER

    def newest_whole(self, most: int) -> tuple[int | None, tuple[Skipped, ...]]:
        """Return the newest step up to `most` whose checkpoint has no fault, None where there is none, and the steps
        between the two."""
        skipped: list[Skipped] = []
        for step in sorted((step for step in self.steps() if 0 < step <= most), reverse=True):
            wrong = self.fault(step)
            if not wrong:
                return step, tuple(skipped)
            skipped.append(Skipped(step, wrong))
        return None, tuple(skipped)

    def fault(self, step: int) -> str:
        """What is wrong with the checkpoint of a step, as far as its files and earlier attempts show; empty where
        nothing is."""
        folder = self.folder_of(step)
        if not folder.is_dir():
            return f"{folder.name} is missing"
        files = _files(folder)
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
        return self.unloadable.get(step, "")

    def changed_ns(self, step: int) -> int | None:
        """When a file of the checkpoint was last written, replaced or renamed, in nanoseconds by the clock of its file
        system; None where it has none."""
        times = []
        for path in _files(self.folder_of(step)):
            try:
                times.append(path.stat().st_ctime_ns)
            except OSError:
                continue
        return max(times, default=None)

    def name(self, step: int) -> None:
        """Make the tracker name a step, that of Megatron-Bridge too. Raises OSError."""
        text = str(step) if self._is_megatron else self.steps()[step]
        state = self.folder_of(step) / _BRIDGE_STATE
        if state.is_file():
            replace_bytes(self.path / _BRIDGE_TRACKER, state.read_bytes())
        else:
            self._set_aside(self.path / _BRIDGE_TRACKER)
        replace_bytes(self.tracker, text.encode())

    def name_none(self) -> None:
        """Move the trackers away, so that the trainers begin at step 0. Raises OSError."""
        self._set_aside(self.path / _BRIDGE_TRACKER)
        self._set_aside(self.tracker)

    @staticmethod
    def _set_aside(tracker: Path) -> None:
        if tracker.exists():
            tracker.replace(tracker.with_name(f"{tracker.name}.damaged"))

    def set_aside_after(self, step: int, suffix: str) -> list[str]:
        """Rename the checkpoints of later steps, so that nobody loads them; returns their new names. Raises OSError."""
        names = []
        for _, name in sorted(item for item in self.steps().items() if item[0] > step):
            number, aside = 1, f"{name}{suffix}"
            while (self.path / aside).exists():
                number += 1
                aside = f"{name}{suffix}.{number}"
            (self.path / name).rename(self.path / aside)
            names.append(aside)
        return names

    def folder_of(self, step: int) -> Path:
        """Return the folder of a step, whether or not it is there."""
        return self.path / self.steps().get(step, f"iter_{step:07d}" if self._is_megatron else f"step-{step}")

    def steps(self) -> dict[int, str]:
        """The folder's name of each step that has one."""
        pattern = _MEGATRON_FOLDER if self._is_megatron else _DEEPSPEED_FOLDER
        try:
            matches = [pattern.fullmatch(path.name) for path in self.path.iterdir() if path.is_dir()]
        except OSError:
            return {}
        return {int(match[1]): match[0] for match in matches if match is not None}

    def own_steps(self) -> dict[int, str]:
        """The same of those alone whose folder is a real one, named exactly as the trainers name it."""
        own = {}
        for step, name in self.steps().items():
            exact = (f"iter_{step:07d}",) if self._is_megatron else (f"step-{step}", f"global_step{step}")
            if name in exact and not (self.path / name).is_symlink():
                own[step] = name
        return own


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


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
