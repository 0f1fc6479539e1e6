"""Hand-made run directories for the local launcher: real scripts that keep the run directory's protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

# What every job.sbatch does around its training: a name for the attempt, a log, a last word.
_FRAME = """#!/bin/bash
attempt=local-$(date +%s)-$$.0
mkdir -p "attempts/$attempt"
log=logs/$attempt.job.log
finish() {
  state=failed
  [ "$1" != 0 ] || state=succeeded
  printf '{"schema": 1, "attempt": "%s", "state": "%s", "exit_code": %d, "nodes": [], "ranks": [], "ended_at": 1,
    "why": "%s"}' "$attempt" "$state" "$1" "$2" > .status && mv .status status.json
  exit "$1"
}
"""


def run_directory(path: Path, body: str, nodes: int = 1) -> Path:
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"schema": 1, "name": "sample", "nodes": nodes}))
    (path / "job.sbatch").write_text(_FRAME + body)
    return path


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    """Returns when `true()` is; fails after a time no healthy machine needs."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
