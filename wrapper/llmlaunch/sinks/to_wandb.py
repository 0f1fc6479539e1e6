"""Runs as offline runs of Weights & Biases: a folder each, which `wandb sync` uploads whenever somebody wants it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from llmlaunch.documents.writing import write_whole
from llmlaunch.sinks.figures import Figures, Sink, changed_runs

_MARKS = "llmlaunch-marks"
_LONGEST_ID = 120
_ONGOING = ("running", "submitted")


class Wandb(Sink):
    """`folder` gets W&B's own folder `wandb/`, and beside it one small file a run that says what was written."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._marks = self._folder / _MARKS
        self._marks.mkdir(parents=True, exist_ok=True)

    def due(self, marks: Mapping[str, str]) -> list[str]:
        return changed_runs(marks, {run_id: str(self._written(run_id).get("mark")) for run_id in marks})

    def send(self, run: Figures, mark: str) -> None:
        """Replace the run written before, unless that was uploaded: then write beside it under the same id, which W&B
        takes for the same run. A run that the training itself tracks gets its figures under the id that the training
        has, once it has ended: what is written here says that it has."""
        tracked = run.tracked_as
        if tracked is not None and run.state in _ONGOING:
            (self._folder / "wandb").mkdir(exist_ok=True)
            self._remember(run.run_id, mark, ".")
            return
        import wandb  # 2 s, which a collect that has nothing to send is spared

        before = self._written(run.run_id).get("folder")
        named = tracked or {}
        begun = wandb.init(
            project=named.get("project") or os.environ.get("WANDB_PROJECT") or "llmlaunch",
            entity=named.get("entity"),
            id=_id(run.run_id) if tracked is None else tracked_id(run.run_id),
            name=named.get("name", run.run_id),
            group=run.recipe or None,
            tags=[run.state],
            config=dict(run.settings),
            dir=str(self._folder),
            mode="offline",
            resume="allow",
            settings=wandb.Settings(**_quiet()),
        )
        begun.summary.update({**run.numbers, **run.texts})
        begun.finish(exit_code=0 if run.state in ("succeeded", *_ONGOING) else 1)
        written = Path(begun.dir).parent
        if isinstance(before, str):
            self._remove(before, written.name)
        self._remember(run.run_id, mark, written.name)

    def _written(self, run_id: str) -> dict[str, object]:
        try:
            value = json.loads((self._marks / f"{_id(run_id)}.json").read_bytes())
        except (OSError, ValueError):
            return {}
        exists = isinstance(value, dict) and (self._folder / "wandb" / str(value.get("folder"))).is_dir()
        return value if exists else {}

    def _remove(self, name: str, but: str) -> None:
        old = self._folder / "wandb" / name
        if name != but and re.fullmatch(r"offline-run-[\w-]+", name) and not any(old.glob("*.synced")):
            shutil.rmtree(old, ignore_errors=True)

    def _remember(self, run_id: str, mark: str, folder: str) -> None:
        record = json.dumps({"run_id": run_id, "mark": mark, "folder": folder})
        write_whole(self._marks / f"{_id(run_id)}.json", f"{record}\n")


def tracked_id(run_id: str) -> str:
    """Return the id by which the training itself writes the run, as templates/train.sh.j2 makes it."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", run_id)


def _id(run_id: str) -> str:
    """Return an id for W&B: a short word of letters, digits, dashes and underscores. Two runs never share one."""
    word = re.sub(r"[^A-Za-z0-9_-]", "-", run_id)
    if word == run_id and len(word) <= _LONGEST_ID:
        return word
    return f"{word[:_LONGEST_ID]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def _quiet() -> dict[str, object]:
    """Return wandb.Settings that write nothing of this machine's user, its code or its output."""
    return {
        "silent": True,
        "console": "off",
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
    }
