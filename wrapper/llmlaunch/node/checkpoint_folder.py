"""The folder a run saves its checkpoints in: how the frameworks call them, and which of them are whole."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..rundir.files import replace_bytes
from ..rundir.regular_files import open_regular

if TYPE_CHECKING:
    from ..rundir.run_file import Checkpoints


MOST_TRACKER_BYTES = 4096
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
_BEST = "best"
_TENSOR_FILE = re.compile(rb"__\d{1,9}_\d{1,9}\.distcp")
_DEEPSPEED_FILE = re.compile(
    r"(?:((?:bf16_|fp16_)?zero_pp_rank)_(\d{1,6})_)?mp_rank_(\d{1,6})_(model|optim)_states\.pt", re.ASCII
)


class Skipped(NamedTuple):
    """A checkpoint that an attempt did not begin with, and what is wrong with it."""

    step: int
    why: str


class CheckpointFolder:
    """What a run.json's "checkpoint" names. `unloadable` says of steps whose files look whole why they are not.

    Megatron-LM's non-persistent checkpoints lie in a folder within this one, with a tracker of their own. Before each
    save it removes all of them but the one with the highest number. It goes on from the one that their tracker names
    unless the other tracker names a later step (save_checkpoint, cleanup_old_non_persistent_checkpoint and
    _load_base_checkpoint of megatron/training/checkpointing.py, core 0.19). `durable_only` leaves them out."""

    def __init__(self, checkpoint: Checkpoints, durable_only: bool = False) -> None:
        self.path = Path(str(checkpoint.get("path")))
        self.tracker = self.path / str(checkpoint.get("tracker"))
        within = None if durable_only else checkpoint.get("non_persistent")
        self.non_persistent = None if within is None else self.path / str(within)
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
        name = folder.relative_to(self.path)
        if not folder.is_dir():
            return f"{name} is missing"
        files = _files(folder)
        if not files:
            return f"{name} is empty"
        names = {path.name for path in files}
        if any(path.suffix == ".distcp" for path in files) and ".metadata" not in names:
            return f"{name} has no .metadata"
        give_up_at = time.monotonic() + CHECK_SECONDS
        missing = _missing_part(folder, names, give_up_at)
        if missing:
            return f"{name}/{missing} is missing"
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
        """Make the trackers name a step, so that the trainers go on from it. Raises OSError."""
        if self.non_persistent is None:
            self._name_durable(step)
            return
        named = step_named_by(self.tracker)
        if step in self._durable_steps():
            if named != step:
                self._name_durable(step)
        else:
            newest = self.non_persistent / self.tracker.name
            if step_named_by(newest) != step:
                replace_bytes(newest, str(step).encode())
            # without this one Megatron-LM takes --pretrained-checkpoint; where both name the same step, it takes the
            # non-persistent one
            if named is None or named > step:
                replace_bytes(self.tracker, str(step).encode())
        self.leave_to_trainers(step)

    def _name_durable(self, step: int) -> None:
        """That of Megatron-Bridge, too."""
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
        self.leave_to_trainers(0)

    def leave_to_trainers(self, step: int) -> None:
        """Have the trainers remove the non-persistent checkpoints that a training from `step` has no use for. Raises
        OSError.

        One that a crash cut off has the highest number: before the next save Megatron-LM would keep it, and remove the
        whole one. With the number 0 it is the first to go, and none is loaded from it.
        """
        if self.non_persistent is None:
            return
        tracker = self.non_persistent / self.tracker.name
        most = step - 1 if step in self._durable_steps() else step
        if (step_named_by(tracker) or 0) > most:
            self._set_aside(tracker)
        for later, name in sorted(self._steps_in(self.non_persistent).items()):
            if later > most and later > 0:
                number = "0000000"
                while (self.non_persistent / f"iter_{number}").exists():
                    number += "0"
                (self.non_persistent / name).rename(self.non_persistent / f"iter_{number}")

    @staticmethod
    def _set_aside(tracker: Path) -> None:
        if tracker.exists():
            tracker.replace(tracker.with_name(f"{tracker.name}.damaged"))

    def set_aside_after(self, step: int, suffix: str) -> list[str]:
        """Rename the durable checkpoints of later steps, so that nobody loads them; returns their new names. Raises
        OSError."""
        names = []
        for _, name in sorted(item for item in self._durable_steps().items() if item[0] > step):
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
        """The name of each step's folder, from `path` on; of two that of the durable checkpoint."""
        if self.non_persistent is None:
            return self._durable_steps()
        names = self._steps_in(self.non_persistent)
        return {**{step: f"{self.non_persistent.name}/{name}" for step, name in names.items()}, **self._durable_steps()}

    def _durable_steps(self) -> dict[int, str]:
        return self._steps_in(self.path)

    def _steps_in(self, path: Path) -> dict[int, str]:
        pattern = _MEGATRON_FOLDER if self._is_megatron else _DEEPSPEED_FOLDER
        try:
            matches = [pattern.fullmatch(path.name) for path in path.iterdir() if path.is_dir()]
        except OSError:
            return {}
        return {int(match[1]): match[0] for match in matches if match is not None}

    def best(self) -> int | None:
        """The step with the lowest validation loss, which our DeepSpeed script names (--keep-best)."""
        return step_named_by(self.path / _BEST)

    def own_steps(self) -> dict[int, str]:
        """The durable ones alone whose folder is a real one, named exactly as the trainers name it."""
        own = {}
        for step, name in self._durable_steps().items():
            exact = (f"iter_{step:07d}",) if self._is_megatron else (f"step-{step}", f"global_step{step}")
            if name in exact and not (self.path / name).is_symlink():
                own[step] = name
        return own


def step_named_by(tracker: Path) -> int | None:
    """The step that a tracker file names: `1200` (Megatron-LM) or `step-1200` (our DeepSpeed script). None where there
    is none, or it names none."""
    try:
        if not tracker.is_file():
            return None
        with open_regular(tracker, follow=True) as file:
            digits = re.search(rb"(\d+)\s*$", file.read(MOST_TRACKER_BYTES))
    except OSError:
        return None
    return int(digits[1]) if digits else None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _missing_part(folder: Path, names: set[str], give_up_at: float) -> str:
    """The name of a file that the others of a checkpoint speak of, and that is not there; empty where there is none.
    Sites that remove old files take them one by one.

    torch.distributed.checkpoint: `.metadata` names each file of tensors (_StorageInfo.relative_path, torch 2.13
    distributed/checkpoint/filesystem.py). DeepSpeed: ranks of each kind are numbered from 0 on, and states of an
    optimizer stand beside those of a model (_get_rank_zero_ckpt_name and _get_ckpt_name of runtime/engine.py, 0.19).
    """
    if ".metadata" in names:
        return min(_named_in(folder / ".metadata", give_up_at) - names, default="")
    files = [match.groups() for match in map(_DEEPSPEED_FILE.fullmatch, sorted(names)) if match is not None]
    ranks: dict[tuple[str, str, str], set[int]] = {}
    for prefix, zero_rank, model_rank, kind in files:
        place = (f"{prefix}_", f"_mp_rank_{model_rank}", kind) if zero_rank else ("mp_rank_", "", kind)
        ranks.setdefault(place, set()).add(int(zero_rank or model_rank))
    for (before, after, kind), numbers in ranks.items():
        gap = next((number for number in range(max(numbers)) if number not in numbers), None)
        if gap is not None:
            return f"{before}{gap if after else f'{gap:02d}'}{after}_{kind}_states.pt"
    of_models, of_optimizers = ({file[2] for file in files if file[3] == kind} for kind in ("model", "optim"))
    lost = min(of_optimizers - of_models, default=None)
    return "" if lost is None else f"mp_rank_{lost}_model_states.pt"


def _named_in(metadata: Path, give_up_at: float) -> set[str]:
    """The files that a `.metadata` names, as far as it is read by then. It is not unpickled: that would run what it
    says."""
    names: set[bytes] = set()
    tail = b""
    try:
        with open_regular(metadata, follow=True) as file:
            while (block := file.read(1 << 20)) and time.monotonic() < give_up_at:
                names.update(_TENSOR_FILE.findall(tail + block))
                tail = block[-64:]
    except OSError:
        return set()
    return {name.decode() for name in names}


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
