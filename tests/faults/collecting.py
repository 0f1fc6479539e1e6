"""Programs that collect, to be killed or stopped in their way, and what must be in the store afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmlaunch.store.collect import collect
from llmlaunch.store.database import open_store
from llmlaunch.store.location import where
from llmlaunch.store.measurements import contents
from llmlaunch.store.runs import list_runs
from support.store_run_dirs import GIB, RunDir

# The command as a person types it, with small transactions, so that there are many to be caught in. LLMLAUNCH_PAUSE
# names a folder and a moment: there it writes `here`, and waits until somebody has written `go`.
PROGRAM = """
import os, sys, time
from pathlib import Path
from sqlalchemy import Engine, event
import llmlaunch.store.collect, llmlaunch.store.database
from llmlaunch.cli.main import main

llmlaunch.store.collect.MOST_RECORDS = 50
llmlaunch.store.database.BUSY_SECONDS = float(os.environ.get("BUSY_SECONDS", 30))
llmlaunch.store.database.SILENT_SECONDS = float(os.environ.get("SILENT_SECONDS", 90))
folder, _, moment = os.environ.get("LLMLAUNCH_PAUSE", "").partition("|")

def pause():
    if not Path(folder, "here").exists():
        Path(folder, "here").touch()
        until = time.monotonic() + 240
        while not Path(folder, "go").exists() and time.monotonic() < until:
            time.sleep(0.01)

written = 0

def executed(connection, cursor, statement, *_):
    global written
    written += statement.startswith("INSERT INTO measurements")
    if moment == "written" and written == 2:
        pause()

def committing(connection):
    if moment == "commit" and written == 2:
        pause()

if moment:
    event.listen(Engine, "after_cursor_execute", executed)
    event.listen(Engine, "commit", committing)
main()
"""


def start(store: str, *words: str | Path, prepare: Callable[[], None] | None = None, **variables: str) -> Any:
    """`llmlaunch WORDS` beside this process; `prepare` runs in it before it begins."""
    environment = {**os.environ, "LLMLAUNCH_STORE": store, **variables}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=prepare,
    )  # fmt: skip


def said(process: Any, code: int) -> tuple[str, str]:
    """stdout and stderr of a program that must end with `code`, and never with a traceback."""
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in err, err
    assert "hush" not in out + err
    assert process.returncode == code, err
    return out, err


def many_runs(folder: Path, count: int = 30, ranks: int = 16) -> list[Path]:
    made = []
    for number in range(count):
        run = RunDir(folder / f"run{number}", nodes=ranks // 8, devices=8, run_id=f"many-{number:03d}")
        run.ranks(resident_peak_bytes=GIB + number)
        run.status()
        made.append(run.path)
    return made


def held(store: str) -> dict[str, Any]:
    """Everything a person gets out of a store: its runs, and its records by id."""
    with open_store(where({"LLMLAUNCH_STORE": store})) as opened:
        records = [json.loads(text) for text in contents(opened)]
        runs = {run.run_id: (run.state, run.measured_bytes, run.exit_code) for run in list_runs(opened)}
    assert len({record["id"] for record in records}) == len(records)
    return {"runs": runs, "records": {record["id"]: record for record in records}}


def expected(folder: Path, runs: Sequence[Path]) -> dict[str, Any]:
    """The same of a store that nothing happened to."""
    place = str(folder / "undisturbed.db")
    with open_store(where({"LLMLAUNCH_STORE": place})) as opened:
        assert {outcome.did for outcome in collect(opened, runs)} == {"collected"}
    return held(place)
