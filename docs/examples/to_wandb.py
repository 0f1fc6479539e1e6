"""Writes runs as offline runs of Weights & Biases, which `wandb sync` uploads.

    llmlaunch runs --since 7d --export - | python to_wandb.py FOLDER
    wandb sync FOLDER/wandb/offline-run-*

A run whose line is the same as the last time is not written again. One that has changed is written anew under the same
id, which W&B takes for the same run.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import wandb

PROJECT = "llmlaunch"
ONGOING = ("pending", "running")
WORDS = ("state", "why", "cause", "attempt", "launcher", "job_id", "cluster", "recipe_digest")
# Nothing of this machine's user, its code or its output.
QUIET = {
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


def write_runs(lines: Iterable[str], folder: Path) -> None:
    """Write the runs of an export. A run that the training itself writes (tracking.wandb) gets its figures under the
    id that it has there, once it has ended: what is written here says that it has."""
    written = folder / "written"
    written.mkdir(parents=True, exist_ok=True)
    for line in lines:
        run = json.loads(line)
        last = written / f"{short_id(run['run_id'])}.json"
        if (run["wandb"] and run["state"] in ONGOING) or (last.exists() and last.read_text("utf-8") == line):
            continue
        write_run(run, folder)
        last.write_text(line, "utf-8")


def write_run(run: dict[str, Any], folder: Path) -> None:
    """Write one run: settings are its configuration, numbers and words its summary."""
    tracked = run["wandb"] or {}
    begun = wandb.init(
        project=tracked.get("project", PROJECT),
        entity=tracked.get("entity"),
        id=tracked.get("id", short_id(run["run_id"])),
        name=tracked.get("name", run["run_id"]),
        group=run["recipe"],
        tags=[run["state"]],
        config=run["settings"],
        dir=str(folder),
        mode="offline",
        resume="allow",
        settings=wandb.Settings(**QUIET),
    )
    begun.summary.update({**run["numbers"], **{name: run[name] for name in WORDS if run[name] is not None}})
    begun.finish(exit_code=0 if run["state"] in ("succeeded", *ONGOING) else 1)


def short_id(run_id: str) -> str:
    """Return an id that W&B takes: letters, digits, dashes and underscores. Two runs never share one."""
    word = re.sub(r"[^A-Za-z0-9_-]", "-", run_id)
    if word == run_id and len(word) <= 120:
        return word
    return f"{word[:100]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


if __name__ == "__main__":
    write_runs(sys.stdin, Path(sys.argv[1]))
