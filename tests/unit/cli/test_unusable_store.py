"""A store that is locked, damaged or of another version costs one short wait and one message; what can go on without it
does."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.store.calibrations import put, use
from llmlaunch.store.database import open_store
from support.calibrated import calibration, score
from support.checkouts import megatron_checkout
from support.command_line import CommandLine
from support.store_run_dirs import finished_cpu_run

RECIPE = str(asset("recipes", "llama3-8b.yaml"))
ONE = "layout={tensor: 2, pipeline: 1, context: 1, micro_batch_size: 1, recompute: none, techniques: asked}"
SCORES = [score(0.97 + i / 1000) for i in range(40)]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def text(path: Path) -> Iterator[None]:
    path.write_text("these are my notes, not a database\n" * 100)
    yield


@contextmanager
def torn(path: Path) -> Iterator[None]:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    yield


@contextmanager
def flipped(path: Path) -> Iterator[None]:
    """The first page of the table of runs."""
    with closing(sqlite3.connect(path)) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'runs'").fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    content = bytearray(path.read_bytes())
    for place in range((page - 1) * size, (page - 1) * size + 64):
        content[place] ^= 0xFF
    path.write_bytes(content)
    yield


@contextmanager
def no_text(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE runs SET state = CAST(x'ff00fe' AS TEXT)")
    yield


@contextmanager
def newer(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE llmlaunch_version SET version_num = '9999'")
    yield


HARMS = {
    locked: "is in use by another program",
    text: "is damaged or not a SQLite file",
    torn: "is damaged or not a SQLite file",
    flipped: "is damaged or not a SQLite file",
    no_text: "is damaged or not a SQLite file",
    newer: "was written by another version of llmlaunch (tables 9999",
}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each connection to a SQLite file would wait at most; none waits that long here."""
    waited: list[float] = []
    connect = sqlite3.connect

    def counted(*place: Any, timeout: float = 5.0, **more: Any) -> sqlite3.Connection:
        waited.append(timeout)
        return connect(*place, timeout=min(timeout, 0.05), **more)

    monkeypatch.setattr("sqlite3.connect", counted)
    monkeypatch.setattr("sqlite3.dbapi2.connect", counted)
    monkeypatch.setattr("llmlaunch.store.location._last_in_use", {})
    return waited


@pytest.fixture
def used_store(
    llmlaunch: CommandLine, store_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> Path:
    """A store with a run of the recipe and a calibration for it."""
    monkeypatch.setenv("MEGATRON_LM_PATH", str(megatron_checkout(tmp_path / "Megatron-LM")))
    run = finished_cpu_run(tmp_path / "run")
    run.write("run.json", {**run.run, "name": "llama3-8b"})
    llmlaunch("collect", run.path)
    entry = calibration(SCORES, accelerator="h100-80gb")
    with open_store() as store, store.write() as connection:
        put(connection, entry)
        use(connection, entry.backend, entry.accelerator, entry.id, 100.0)
    waits.clear()
    return store_file


@pytest.mark.parametrize("harm", HARMS)
def test_a_plan_is_made_without_it_with_one_warning(
    llmlaunch: CommandLine, used_store: Path, waits: list[float], harm: Callable[[Path], Any]
) -> None:
    with harm(used_store):
        waits.clear()
        out, err = llmlaunch("check", RECIPE, ONE)
    assert err.count("warning: ") == 1
    assert f"warning: measured runs are not used: store {used_store} {HARMS[harm]}" in err
    assert "Before" not in out
    if harm is locked:
        assert len(waits) > 3
        assert sum(waits) == 3.0


@pytest.mark.parametrize("harm", HARMS)
def test_what_needs_it_is_refused_in_one_line(
    llmlaunch: CommandLine, used_store: Path, waits: list[float], harm: Callable[[Path], Any]
) -> None:
    with harm(used_store):
        for words in ("runs", "collect", "measurements list", "accuracy", "nodes", "status last"):
            waits.clear()
            _, err = llmlaunch(*words.split(), code=2)
            assert err.count("\n") == 1
            assert err.startswith(f"error: store {used_store} {HARMS[harm]}")
            assert sum(waits) <= (10.0 if words == "collect" else 3.0)


@pytest.mark.parametrize("command", ["status", "report", "status --watch"])
def test_a_run_directory_is_shown_without_it(
    llmlaunch: CommandLine, used_store: Path, tmp_path: Path, waits: list[float], command: str
) -> None:
    run = finished_cpu_run(tmp_path / "other", "other-1")
    run.write(
        "submission.json", {"schema": 1, "launcher": "slurm", "job_id": "77", "submitted_at": 1.0, "cluster": None}
    )
    with locked(used_store):
        waits.clear()
        out, err = llmlaunch(*command.split(), run.path)
    assert "succeeded" in out
    assert err.count("is in use by another program") <= 1
    assert sum(waits) <= 3.0
